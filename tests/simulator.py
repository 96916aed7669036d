"""The scheduler under a virtual clock: modelled tiers, kernels, devices and programs, and a check on every action.

1. A ``World`` says what is simulated (``tests.worlds``); ``random_world(seed)`` draws one. A seed gives one run.
2. Each device runs executions one after another; an execution hands over the buckets of each optimizer in some order.
3. Every action is checked against a model of what each slot and each tier holds before it is performed.
4. At the end nothing may be open, and no slot lost.

The simulation is one class, longer than a file should be: every check needs the model that the others keep.

Replay a failing seed with ``python -m tests.simulator SEED`` or ``pytest tests/test_scheduler.py --replay-seed SEED``.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable

from jax_mlp_offload import errors
from jax_mlp_offload.operations import DOOM_GRACE_S, QUIET_GRACE_OF_SEVERAL_S
from jax_mlp_offload.placement import TierSpec
from jax_mlp_offload.scheduler import Scheduler
from jax_mlp_offload.types import (
    POISON,
    Complete,
    Fail,
    HandBack,
    Life,
    Read,
    Record,
    Update,
    Warn,
    Write,
)
from tests.channels import Disk, Smooth, make_channels
from tests.worlds import Execution, Pattern, Source, World, random_world


class CheckError(AssertionError):
    """The scheduler did what it must not."""


@dataclasses.dataclass(eq=False)
class Call:
    """An operation as XLA sees it."""

    request: int
    run: Run
    optimizer: int
    bucket: int
    device: int
    ticket: int
    arrived_s: float
    handed_back: int = 0
    updates: Counter[int] = dataclasses.field(default_factory=Counter)
    running: int = 0
    ended: str | None = None


@dataclasses.dataclass(eq=False)
class Run:
    """One execution on all devices."""

    number: int
    spec: Execution
    optimizers: tuple[int, ...]
    tickets: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)  # given, by (device, optimizer)
    serials: dict[int, set[int]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    results: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    calls: list[Call] = dataclasses.field(default_factory=list)
    left: dict[int, int] = dataclasses.field(default_factory=dict)  # operations by device
    waiting: list[int] = dataclasses.field(default_factory=list)  # devices at the barrier
    begun: bool = False
    failed: bool = False
    abandoned: bool = False
    start_s: float = 0.0
    end_s: float = 0.0


class Simulation:
    """Runs a world to its end, checking every action. ``runs`` and the counters tell what happened."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now_s = 0.0
        self.random = random.Random(world.seed)
        self.events = 0  # told to the scheduler
        self._last_begun = 0
        self._looked = 0  # events at the last look at every record
        self.warnings: list[Warn] = []
        self.failures: list[str] = []
        self.poisons = 0
        self.no_space = 0  # writes that met a full file system
        self.moves: list[tuple[str, int, int]] = []  # (read/write, record, tier)
        self.by_run: dict[int, Counter[str]] = defaultdict(Counter)
        self.tiers_by_run: dict[tuple[int, str], Counter[int | None]] = defaultdict(Counter)  # by (run, what)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._told: list[Callable[[], None]] = []
        self._values = itertools.count(1)
        specs = [
            TierSpec(
                f"t{i}",
                t.capacity_bytes,
                t.read_bps if t.known else None,
                t.write_bps if t.known else None,
                t.device,
                t.queue,
                t.free_bytes,
            )
            for i, t in enumerate(world.tiers)
        ]
        self.scheduler = Scheduler(specs, world.order, world.deadline_s)
        for device in range(world.devices):
            self.scheduler.add_slots(device, range(device * world.slots, (device + 1) * world.slots))
        for number, buckets in enumerate(world.optimizers):
            self.scheduler.add_instance(
                number,
                f"opt{number}",
                range(world.devices),
                buckets,
                lambda bucket, subgroup: [f"leaf{bucket}.{subgroup}"],
                lambda bucket, leaf: f"leaf{bucket}.{leaf}",
                world.foreign,
                first_serial=1 + number * 10**6,
            )
        count = len(self.scheduler.records)
        self.truth: list[int] = [0] * count  # the value of each record's latest version
        self.slots: dict[int, tuple[int, int]] = {}  # slot -> (record, value)
        self.stored: dict[tuple[int, int], int] = {}  # (tier, record) -> value
        self.busy: dict[int, str] = {}  # slot -> what is done with it
        self.void: set[int] = set()  # records that start afresh at their next update
        self.calls: dict[int, Call] = {}
        self.runs: list[Run] = []
        self._latest: dict[tuple[int, int], int] = defaultdict(int)  # tickets by (device, optimizer)
        self._history: dict[int, list[int]] = defaultdict(list)  # serials that ended well, by optimizer
        self._writing: Counter[int | str] = Counter()  # by device
        self._after: dict[int, list[tuple[int, int]]] = {}  # what a forced program hands over after a request
        self._hung: list[Callable[[], None]] = []
        # tiers of one device share what the first of them has
        paths = [t.device if t.device is not None else f"own {i}" for i, t in enumerate(world.tiers)]
        first = {path: world.tiers[paths.index(path)] for path in paths}
        channels = {path: make_channels(self, model) for path, model in first.items()}
        disks = {path: Disk(model.free_bytes) for path, model in first.items()}
        self._paths = paths
        self._neighbours = any(model.neighbour for model in world.tiers)
        self._channels = [channels[path] for path in paths]
        self.disks = [disks[path] for path in paths]
        for path, model in first.items():
            for time_s, taken_bytes in model.neighbour:
                self.at(time_s, lambda disk=disks[path], taken_bytes=taken_bytes: disk.take(taken_bytes))  # type: ignore[misc]
        self._kernels = [Smooth(self, world.kernel_bps, world.kernel_bps, fifo=True) for _ in range(world.devices)]

    # -- the clock

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._order), event))

    def run(self) -> Simulation:
        for device in range(self.world.devices):
            self._begin(0, device)
        self._loop()
        self._check_end()
        return self

    def _loop(self) -> None:
        ticks = 0
        while True:
            next_s = self.scheduler.next_tick_s()
            if self._heap and (next_s is None or self._heap[0][0] <= next_s):
                ticks = 0
                self.now_s, _, event = heapq.heappop(self._heap)
                event()
                if len(self._told) >= self.world.batch or not (self._heap and self._heap[0][0] <= self.now_s):
                    self._deliver()
            elif next_s is not None:
                ticks += 1
                self._check(ticks < 5000, "ticks without end")
                self.now_s = max(self.now_s, next_s)
                self.scheduler.tick(self.now_s)
                again_s = self.scheduler.next_tick_s()
                self._check(again_s is None or again_s > self.now_s, f"tick spins: {again_s} at {self.now_s}")
                self._perform()
            else:
                return

    def _tell(self, function: Callable[[], None]) -> None:
        self._told.append(function)

    def _deliver(self) -> None:
        told, self._told = self._told, []
        if self.world.batch > 1:
            self.random.shuffle(told)
        for function in told:
            self.events += 1
            function()
        self._perform()

    # -- programs

    def _run(self, number: int) -> Run:
        while len(self.runs) <= number:
            spec = self.world.executions[len(self.runs)]
            optimizers = spec.optimizers or tuple(range(len(self.world.optimizers)))
            run = Run(len(self.runs), spec, optimizers)
            run.left = {d: sum(len(self.world.optimizers[o]) for o in optimizers) for d in range(self.world.devices)}
            self.runs.append(run)
        return self.runs[number]

    def _begin(self, number: int, device: int) -> None:
        """A device gets to an execution."""
        if number >= len(self.world.executions):
            return
        run = self._run(number)
        before = self.runs[number - 1] if number else None
        if self.world.barrier or (before and before.failed) or run.spec.source is not Source.LATEST:
            run.waiting.append(device)
            if len(run.waiting) == self.world.devices:
                for waiting in run.waiting:
                    self._start(run, waiting)
            return
        self._start(run, device)

    def _source(self, run: Run) -> Source:
        before = self.runs[run.number - 1] if run.number else None
        if before is None or before.failed:
            return Source.ZERO
        return run.spec.source

    def _start(self, run: Run, device: int) -> None:
        source = self._source(run)
        for optimizer in run.optimizers:
            ticket = self._latest[device, optimizer]
            if source in (Source.ZERO, Source.ZERO_UNASKED):
                ticket = 0
            elif source is Source.STALE and len(self._history[optimizer]) > 1:
                ticket = self._history[optimizer][-2]
            elif source is Source.TWICE:
                given = self.runs[run.number - 1].tickets
                ticket = max((t for (_, o), t in given.items() if o == optimizer), default=ticket)
            run.tickets[device, optimizer] = ticket
        delay_s = self.world.compute_s + self.random.random() * self.world.lag_s
        self.at(self.now_s + delay_s, lambda: self._hand_over(run, device))

    def _hand_over(self, run: Run, device: int) -> None:
        if not run.begun:
            run.begun, run.start_s, self._last_begun = True, self.now_s, run.number
        following = run.number + 1
        if following < len(self.world.executions):
            after = self.world.executions[following].source
            if after in (Source.ZERO_UNASKED, Source.TWICE):
                run.abandoned = True
                self.at(self.now_s + self.random.random() * 0.05, lambda: self._begin(following, device))
        todo = [(o, b) for o in run.optimizers for b in range(len(self.world.optimizers[o]))]
        if run.spec.backwards:
            todo.reverse()
        if run.spec.pattern is Pattern.FORCED:
            self._arrive(run, device, todo)
            return
        for i, item in enumerate(todo):
            delay_s = 0.0
            if run.spec.pattern is Pattern.GAPS:
                delay_s = i * run.spec.gap_s
            elif run.spec.pattern is Pattern.RANDOM:
                delay_s = self.random.random() * run.spec.gap_s * len(todo)
            self.at(self.now_s + delay_s, lambda item=item: self._arrive(run, device, [item]))  # type: ignore[misc]

    def _arrive(self, run: Run, device: int, todo: list[tuple[int, int]]) -> None:
        if not todo:
            return
        (optimizer, bucket), rest = todo[0], todo[1:]
        call = Call(len(self.calls), run, optimizer, bucket, device, run.tickets[device, optimizer], self.now_s)
        self.calls[call.request] = call
        run.calls.append(call)
        self._after[call.request] = rest

        def tell() -> None:
            self.scheduler.arrived(
                call.request, optimizer, bucket, device, run.number, call.ticket, run.spec.skip, self.now_s
            )

        self._tell(tell)

    def _end(self, call: Call, how: str, ticket: int) -> None:
        self._check(call.ended is None, f"request {call.request} ended twice: {call.ended}, {how}")
        self._check(call.running == 0, f"request {call.request} ended while a kernel works for it")
        call.ended = how
        run, device = call.run, call.device
        if how == "failed":
            run.failed = True
        elif ticket == POISON:
            self.poisons += 1
        key = device, call.optimizer
        run.results[key] = max(run.results.get(key, 0), ticket)
        run.left[device] -= 1
        run.end_s = self.now_s
        if rest := self._after.pop(call.request, []):
            self.at(self.now_s + run.spec.gap_s, lambda: self._arrive(run, device, rest))
        if run.left[device] == 0:
            for optimizer in run.optimizers:
                if not run.abandoned:
                    self._latest[device, optimizer] = run.results[device, optimizer]
                if run.results[device, optimizer] not in (POISON, *self._history[optimizer][-1:]):
                    self._history[optimizer].append(run.results[device, optimizer])
            if not run.abandoned:
                self._begin(run.number + 1, device)

    # -- actions

    def _perform(self) -> None:
        while actions := self.scheduler.take_actions():
            for action in actions:
                match action:
                    case Read(record):
                        self._read(record)
                    case Write(record):
                        self._write(record)
                    case Update(record, request, fresh):
                        self._update(record, self.calls[request], fresh)
                    case HandBack(request):
                        self._hand_back(self.calls[request])
                    case Complete(request, ticket):
                        self._complete(self.calls[request], ticket)
                    case Fail(request, message):
                        self._fail(self.calls[request], message)
                    case Warn():
                        self.warnings.append(action)
        if self.events >= self._looked + len(self.truth) // 4:
            self._looked = self.events
            self._check_slots()

    def _occupy(self, record: Record, what: str) -> int:
        slot = record.slot
        self._check(slot is not None, f"{what} without a slot", record)
        assert slot is not None
        self._check(slot in self.scheduler.devices[record.device].slots, "foreign slot", record)
        self._check(slot not in self.busy, f"{what} of slot {slot} during {self.busy.get(slot)}", record)
        self.busy[slot] = f"{what} of record {record.index}"
        return slot

    def _transfer(self, record: Record, tier: int, reading: bool, done: Callable[[bool], None]) -> None:
        model = self.world.tiers[tier]
        ok = self.random.random() >= (model.read_errors if reading else model.write_errors)
        if not reading and self.now_s >= model.dies_s:
            ok = False
        latency_s = model.latency_s + self.random.random() * model.jitter_s
        tell = lambda: self._tell(lambda: done(ok))  # noqa: E731
        if self.now_s >= model.hangs_s:
            self._hung.append(tell)
            return
        channel = self._channels[tier][0 if reading else 1]
        channel.submit(record.size_bytes, reading, lambda: self.at(self.now_s + latency_s, tell))

    def _read(self, record: Record) -> None:
        slot = self._occupy(record, "read")
        tier = record.tier
        assert tier is not None
        value = self.stored.get((tier, record.index))
        self._check(value is not None, f"read of what tier {tier} does not hold", record)
        assert value is not None
        self._check(value == self.truth[record.index], "read of an old version", record)
        self.moves.append(("read", record.index, tier))
        self._count(record, "reads")

        def done(ok: bool) -> None:
            del self.busy[slot]
            if ok:
                self.slots[slot] = record.index, value
                disk.moved_on(tier, record.index, record.size_bytes)
            error = None if ok else self._error(tier, "read", record)
            self.scheduler.read_done(record, error, self.now_s, begun_s, disk.free_bytes)

        disk, begun_s = self.disks[tier], self.now_s
        self._transfer(record, tier, True, done)

    def _write(self, record: Record) -> None:
        slot = self._occupy(record, "write")
        tier = record.tier
        assert tier is not None
        content = self.slots.get(slot)
        self._check(
            content == (record.index, self.truth[record.index]), f"write of a slot that holds {content}", record
        )
        assert content is not None
        live = not self.scheduler.placement.tiers[tier].retired or self.world.batch > 1
        self._check(live, "write to a retired tier", record)
        path, most = self._paths[tier], self.scheduler.placement.tiers[tier].device.wanted_queue
        self._writing[path] += 1
        late = [self.scheduler.records[index] for index in self.scheduler._transfers.overdue]
        late = [r for r in late if r.life is Life.WRITING and r.tier is not None and self._paths[r.tier] == path]
        self._check(self._writing[path] - len(late) <= most, f"more than {most} writes on the device of tier {tier}")
        self.moves.append(("write", record.index, tier))
        self._count(record, "writes")
        capacity = self.world.tiers[tier].capacity_bytes
        for other in range(len(self.world.tiers)):
            self.stored.pop((other, record.index), None)
        if capacity is not None:
            held = sum(self.scheduler.records[r].size_bytes for t, r in self.stored if t == tier and self._counts(t, r))
            self._check(held + record.size_bytes <= capacity, f"tier {tier} is over its capacity")
        for other, disk in enumerate(self.disks):
            if other != tier:
                disk.moved_on(other, record.index, record.size_bytes)
        disk, begun_s = self.disks[tier], self.now_s
        fits = disk.write(tier, record.index, record.size_bytes)
        self._check(fits or bool(self._neighbours), f"tier {tier} has no space left", record)
        self.no_space += not fits

        def done(ok: bool) -> None:
            del self.busy[slot]
            self._writing[path] -= 1
            self._check(self.slots.get(slot) == content, "slot changed while it was written", record)
            if ok and fits:
                self.stored[tier, record.index] = content[1]
            error = None if ok and fits else self._error(tier, "write", record)
            self.scheduler.write_done(record, 7, error, self.now_s, begun_s, disk.free_bytes)
            if record.tier != tier:
                disk.moved_on(tier, record.index, record.size_bytes)

        self._transfer(record, tier, False, done)

    def _counts(self, tier: int, index: int) -> bool:
        record = self.scheduler.records[index]
        return record.tier == tier and record.life in (Life.STORED, Life.READING)

    def _error(self, tier: int, verb: str, record: Record) -> errors.TierError:
        return errors.TierError(f"tier 't{tier}': injected {verb} error; {self.scheduler.describe(record)}")

    def _update(self, record: Record, call: Call, fresh: bool) -> None:
        slot = self._occupy(record, "update")
        self._check(call.ended is None, "update for an ended request", record)
        self._check(not call.run.spec.skip, "update in a skipped step", record)
        place = (call.optimizer, call.bucket, call.device)
        self._check((record.instance, record.bucket, record.device) == place, "update for another's request", record)
        if fresh:
            empty = record.index in self.void or self.truth[record.index] == 0
            self._check(call.ticket == 0 or empty, "fresh for no reason", record)
        else:
            self._check(record.index not in self.void, "what is stored no longer counts", record)
            self._check(call.ticket != 0, "ticket 0 has to start afresh", record)
            content = self.slots.get(slot)
            self._check(content == (record.index, self.truth[record.index]), f"slot holds {content}", record)
        call.updates[record.index] += 1
        self._check(call.updates[record.index] == 1, "updated twice by one request", record)
        call.running += 1
        self._count(record, "updates")
        adopted = [0] if not fresh and self.random.random() < self.world.adoptions else []
        error = None
        if self.world.update_errors and self.random.random() < self.world.update_errors:
            adopted, error = [], errors.AcceleratorError(f"injected; {self.scheduler.describe(record)}")

        def done() -> None:
            del self.busy[slot]
            call.running -= 1
            self.truth[record.index] = next(self._values)
            self.void.discard(record.index)
            self.slots[slot] = record.index, self.truth[record.index]
            for tier in range(len(self.world.tiers)):
                self.stored.pop((tier, record.index), None)
            self.scheduler.update_done(record, adopted, self.now_s, error)

        self._kernels[record.device].submit(record.size_bytes, True, lambda: self._tell(done))

    def _hand_back(self, call: Call) -> None:
        call.handed_back += 1
        self._check(call.handed_back == 1, f"request {call.request} handed back twice")
        self._check(call.running == 0, f"request {call.request} handed back while a kernel works for it")
        call.running += 1

        def done() -> None:
            call.running -= 1
            self.scheduler.handed_back(call.request, self.now_s)

        self.at(self.now_s + 1e-4, lambda: self._tell(done))

    def _complete(self, call: Call, ticket: int) -> None:
        run = call.run
        if ticket == POISON:
            self._check(self.world.may_fail, f"poison where nothing went wrong: {self._cause(call)}")
            self._check(call.handed_back == 1, "poison without old params")
            self._end(call, "poisoned", ticket)
            return
        wanted = {r.index for r in self.scheduler.instances[call.optimizer].records[call.bucket, call.device]}
        if run.spec.skip:
            self._check(call.handed_back == 1 and not call.updates, "a skipped step has to hand back old params")
            if call.ticket == 0:
                self.void |= wanted
        else:
            self._check(set(call.updates) == wanted, f"request {call.request} ended with records not updated")
        run.serials[call.optimizer].add(ticket)
        self._check(len(run.serials[call.optimizer]) == 1, f"two serials in one step: {run.serials}")
        self._check(ticket > call.ticket, f"serial {ticket} follows ticket {call.ticket}")
        others = [r for r in self.runs[: run.number] if ticket in r.serials.get(call.optimizer, ())]
        self._check(not others, f"serial {ticket} was used before")
        self._end(call, "completed", ticket)

    def _fail(self, call: Call, message: str) -> None:
        self._check(self.world.may_fail, f"failure where nothing went wrong: {message}")
        self._check(bool(message) and message != "None", "failure without a message")
        self._check(f"'opt{call.optimizer}'" in message or "tier" in message, f"message without a name: {message}")
        self.failures.append(message)
        run = call.run
        mine = [c for c in run.calls if c.optimizer == call.optimizer]
        expected = len(self.world.optimizers[call.optimizer]) * self.world.devices
        waited_s = self.now_s - min(c.arrived_s for c in mine)
        quiet_s = self.now_s - max(c.arrived_s for c in mine)
        met = len({c.device for c in mine}) == self.world.devices and quiet_s >= QUIET_GRACE_OF_SEVERAL_S * 0.999
        self._check(
            self.world.devices == 1 or len(mine) == expected or met or waited_s >= DOOM_GRACE_S * 0.999,
            "a device fails before the others came",
        )
        self._end(call, "failed", POISON)

    # -- checks

    def _cause(self, call: Call) -> object:
        return self.scheduler.instances[call.optimizer].error

    def _count(self, record: Record, what: str) -> None:
        operation = record.wanted_by
        number = self.calls[operation.request].run.number if operation else self._last_begun
        self.by_run[number][what] += 1
        self.tiers_by_run[number, what][record.tier] += 1

    def _check(self, condition: bool, message: str, record: Record | None = None) -> None:
        if not condition:
            about = f": {record}" if record is not None else ""
            raise CheckError(f"seed {self.world.seed}, at {self.now_s:.4f} s: {message}{about}")

    def _check_slots(self) -> None:
        """Looks at every record: what the scheduler counts has to be what is there."""
        used: dict[int, list[int]] = {device: list(cache.free) for device, cache in self.scheduler.devices.items()}
        resting: dict[int, set[int]] = {device: set() for device in used}
        stored = [0] * len(self.world.tiers)
        for record in self.scheduler.records:
            outside = record.life in (Life.STORED, Life.ABSENT)
            if outside != (record.slot is None):
                self._check(False, "slot without content, or content without slot", record)
            if record.slot is not None:
                used[record.device].append(record.slot)
            if record.life is Life.DIRTY:
                resting[record.device].add(record.index)
            if record.tier is not None:
                stored[record.tier] += record.size_bytes
        for device, cache in self.scheduler.devices.items():
            self._check(sorted(used[device]) == sorted(cache.slots), "slots lost or shared")
            waiting = list(cache.waiting_records())
            self._check(len(waiting) == cache.waiting <= cache.records, "count of waiting records")
            waiting_bytes: Counter[int] = Counter()
            for record in waiting:
                if record.tier is not None:
                    waiting_bytes[record.tier] += record.size_bytes
            self._check(waiting_bytes == cache.waiting_bytes, "count of waiting bytes")
            self._check(cache.resting() == resting[device], "records that rest")
            self._check(len(cache._fetched) <= max(1, cache._most_ahead), "records read ahead")
            self._check(all(r.slot is not None for r in cache._fetched.values()), "read ahead, but not in a slot")
            ahead = sum(r.size_bytes for queue in cache._expected.values() for r in queue.values())
            self._check(ahead == sum(cache.ahead_bytes.values()), "bytes expected")
        for optimizer in self.scheduler.instances.values():
            self._check(len(optimizer.ledger._open) <= 64, "steps that stay open")
        counted = [tier.files.stored_bytes for tier in self.scheduler.placement.tiers]
        self._check(stored == counted, "bytes held by the tiers")

    def _check_end(self) -> None:
        self._check(self.scheduler.quiescent, "not quiescent at the end")
        while self._hung:
            hung, self._hung = self._hung, []
            for tell in hung:
                tell()
            self._deliver()
            self._loop()
        unfinished = [c.request for c in self.calls.values() if c.ended is None]
        self._check(not unfinished, f"requests never ended: {unfinished}")
        done = len(self.runs) == len(self.world.executions) and not any(any(r.left.values()) for r in self.runs)
        self._check(done, "the program did not get to its end")
        self._check_slots()
        for record in self.scheduler.records:
            self._check(record.life in (Life.DIRTY, Life.STORED, Life.ABSENT), "at the end", record)
            self._check(record.wanted_by is None, "wanted at the end", record)
            if record.life is Life.STORED and not record.void:
                assert record.tier is not None
                value = self.stored.get((record.tier, record.index))
                self._check(value == self.truth[record.index], "old version at the end", record)
        for device, cache in self.scheduler.devices.items():
            counts = cache.reading, cache.writing, cache.updating, cache.waiting, cache._open_ops, len(cache._asked)
            self._check(not any(counts), f"counts of device {device} at the end: {counts}")
        self._check(not self.scheduler._transfers.overdue, "overdue at the end")
        self._check(not self.busy, f"busy at the end: {self.busy}")


def main() -> None:
    """Replays seeds."""
    for argument in sys.argv[1:]:
        world = random_world(int(argument))
        print(world)
        simulation = Simulation(world).run()
        print(f"seed {argument}: {simulation.events} events, {len(simulation.failures)} failed operations: passed")


if __name__ == "__main__":
    main()
