"""The state machine of the engine: events in, actions out.

1. ``arrived``: an operation (one bucket, one device, one step) wants each of its records updated. One that is in a
   slot is updated at once (a hit); the others wait for a slot.
2. A freed slot goes to a waiting record: read from its tier, or taken empty where nothing is stored yet.
3. While more records wait than slots are about to be free, the most recently updated record is written out to the tier
   that pulls. So a step reads and writes as many records as did not fit, and no more.
4. When all records of an operation are updated it completes with the step's serial as its ticket.
5. A failure ends every operation of that optimizer with the *old* params and the poison ticket, on all devices; its
   next step is refused as a whole (see ``ledger``).

What always holds: a record is updated exactly once by each operation that ran; a slot is never lost; what a record is
doing is its ``life`` and nothing else. No thread, clock, file or jax here: times come in with the events, and
``take_actions`` gives out what is to be done. The same class runs under the driver, the simulator and the fault tests.
Thread contract: one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jax_mlp_offload import errors
from jax_mlp_offload.cache import DeviceCache
from jax_mlp_offload.instances import ForeignParams, Instance
from jax_mlp_offload.ledger import Ledger, Step
from jax_mlp_offload.placement import Placement, TierSpec
from jax_mlp_offload.types import (
    POISON,
    Action,
    Complete,
    Fail,
    HandBack,
    Life,
    Operation,
    Order,
    Read,
    Record,
    Update,
    Warn,
    Write,
)

STALL_GRACE_S = 0.02  # how long the next bucket may take before a record that is still needed is evicted
DOOM_GRACE_S = 10.0  # how long a refused step waits for its other operations


class Scheduler:
    """Decides what happens to every record. See the module's text."""

    def __init__(self, tiers: Sequence[TierSpec], order: Order = Order.RESIDENT_FIRST, deadline_s: float = 600.0) -> None:
        self.placement = Placement(tiers)
        self.order = order
        self.deadline_s = deadline_s
        self.devices: dict[int, DeviceCache] = {}
        self.instances: dict[int, Instance] = {}
        self.records: list[Record] = []
        self.hits = 0
        self.misses = 0
        self._operations: dict[int, Operation] = {}
        self._steps: dict[int, Step] = {}  # by request
        self._running: set[Step] = set()  # steps of the phase
        self._in_flight: dict[int, float] = {}  # record index -> start of its I/O
        self._doomed_since_s: float | None = None
        self._actions: list[Action] = []
        self._now_s = 0.0

    # -- set-up

    def add_slots(self, device: int, slots: range) -> None:
        """Gives slots to a device (a new device, or more for a known one)."""
        self.devices.setdefault(device, DeviceCache(device, self.order)).add_slots(slots)

    def add_instance(
        self,
        number: int,
        name: str,
        devices: Sequence[int],
        bucket_records: Sequence[Sequence[int]],
        leaf_names: Callable[[int, int], list[str]],
        bucket_leaf: Callable[[int, int], str],
        foreign: ForeignParams = ForeignParams.WATCH,
        serials: Iterator[int] | None = None,
    ) -> Instance:
        """Registers an optimizer.

        Args:
          number: its number in compiled programs.
          name: for messages.
          devices: ordinals; each has all buckets.
          bucket_records: for each bucket the sizes of its records in bytes.
          leaf_names: names of the leaves under (bucket, subgroup).
          bucket_leaf: name of a leaf of a bucket.
          foreign: what replaced 16-bit params lead to.
          serials: source of serials, for tests.
        """
        records: dict[tuple[int, int], list[Record]] = {}
        for device in devices:
            cache = self.devices.setdefault(device, DeviceCache(device, self.order))
            for bucket, sizes in enumerate(bucket_records):
                row = []
                for subgroup, size in enumerate(sizes):
                    record = Record(len(self.records), number, bucket, device, subgroup, size)
                    self.records.append(record)
                    row.append(record)
                records[bucket, device] = row
                cache.records += len(row)
        ledger = Ledger(name, len(bucket_records), devices, serials)
        instance = Instance(number, name, tuple(devices), records, leaf_names, bucket_leaf, foreign, ledger)
        self.instances[number] = instance
        return instance

    # -- what the driver asks

    def take_actions(self) -> list[Action]:
        """What is to be done now; each action is given out once."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def quiescent(self) -> bool:
        """Whether no operation is open and nothing is in flight."""
        return not self._operations and not self._in_flight and self._doomed_since_s is None

    def next_tick_s(self) -> float | None:
        """When ``tick`` is wanted if nothing else happens, as a time; None: not at all."""
        times = [d.stalled_since_s + STALL_GRACE_S for d in self.devices.values() if d.stalled_since_s is not None]
        if self._doomed_since_s is not None:
            times.append(self._doomed_since_s + DOOM_GRACE_S)
        if self._in_flight:
            times.append(min(self._in_flight.values()) + self.deadline_s)
        return min(times, default=None)

    def describe(self, record: Record) -> str:
        """A record in words, for messages."""
        instance = self.instances[record.instance]
        names = instance.leaf_names(record.bucket, record.subgroup)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"optimizer {instance.name!r}, subgroup {record.subgroup} of bucket {record.bucket} "
            f"on device {record.device} (leaves {shown})"
        )

    # -- events

    def arrived(
        self, request: int, instance: int, bucket: int, device: int, run_id: int, ticket: int, skip: bool, now_s: float
    ) -> None:
        """XLA handed over one bucket of one device."""
        self._now_s = now_s
        owner = self.instances[instance]
        step = owner.ledger.admit(bucket, device, run_id, ticket)
        if step.doomed is not None:
            self._doom(owner, step, request)
            return
        if step.failed and owner.error is None and owner.ledger.broken is not None:
            owner.error = errors.StaleTicketError(owner.ledger.broken)
        elif not step.failed and step not in self._running:
            self._begin(owner, step)
        records = owner.records[bucket, device]
        operation = Operation(request, instance, bucket, device, step.serial, pending=len(records))
        self._operations[request] = operation
        self._steps[request] = step
        cache = self.devices[device]
        cache.op_arrived()
        if ticket == 0:
            for record in records:
                record.void = True
        if step.failed:
            self._fail_operations([operation])
        elif skip:
            if len(step.arrived) == 1:
                owner.skipped += 1
                self._warn(errors.SkippedStepWarning, f"optimizer {owner.name!r}: skipped a step with gradients that are not finite")
            operation.handing_back = True
            self._actions.append(HandBack(request))
        else:
            for record in records:
                record.wanted_by = operation
            for record in records:
                self._want(record)
            self._pump(cache)

    def read_done(self, record: Record, error: errors.OffloadError | None, now_s: float) -> None:
        """A record was read, or could not be."""
        self._now_s = now_s
        cache = self.devices[record.device]
        assert record.life is Life.READING and record.tier is not None, record
        self._in_flight.pop(record.index, None)
        cache.reading -= 1
        self.placement.read_ends(record.tier, record.size_bytes, now_s, error is None)
        if error is not None:
            record.life = Life.STORED
            cache.release(record)
            self._fail_instance(self.instances[record.instance], error)
        else:
            record.tier = None
            if record.wanted_by is not None:
                record.life = Life.READY
                self._start_update(record)
            else:
                record.life = Life.DIRTY
                cache.remember(record)
        self._pump(cache)

    def write_done(self, record: Record, crc: int, error: errors.OffloadError | None, now_s: float) -> None:
        """A record was written out, or could not be."""
        self._now_s = now_s
        cache = self.devices[record.device]
        assert record.life is Life.WRITING and record.tier is not None, record
        self._in_flight.pop(record.index, None)
        cache.writing -= 1
        tier, record.crc = record.tier, crc
        self.placement.write_ends(tier, record.size_bytes, now_s, error is None)
        if error is None and record.wanted_by is None:
            record.life = Life.STORED
            cache.release(record)
            self._pump_all(cache)
            return
        record.life, record.tier = Life.DIRTY, None
        if error is None:
            self.placement.forget(tier, record.size_bytes)  # wanted again while it was written: the slot is newer
        else:
            self._retire(tier, error)
        if record.wanted_by is not None:
            self._start_update(record)
        else:
            cache.remember(record)
        self._pump_all(cache, error)

    def update_done(self, record: Record, adopted_leaves: Sequence[int], now_s: float) -> None:
        """The kernel has updated a record."""
        self._now_s = now_s
        cache = self.devices[record.device]
        assert record.life is Life.UPDATING and record.wanted_by is not None, record
        operation = record.wanted_by
        owner = self.instances[record.instance]
        cache.updating -= 1
        record.life, record.wanted_by, record.void = Life.DIRTY, None, False
        record.serial = operation.serial
        cache.touched(record)
        operation.pending -= 1
        operation.updating -= 1
        if adopted_leaves and not operation.failed:
            self._adopt(owner, operation, [owner.bucket_leaf(record.bucket, leaf) for leaf in adopted_leaves])
        if operation.failed:
            self._end_failed(operation)
        elif operation.pending == 0:
            self._complete(operation, operation.serial)
        self._pump(cache)

    def handed_back(self, request: int, now_s: float) -> None:
        """The old params are in the operation's results."""
        self._now_s = now_s
        operation = self._operations[request]
        self._complete(operation, POISON if operation.failed else operation.serial)

    def tick(self, now_s: float) -> None:
        """Time passed: acts on stalls, on refused steps that never became whole, and on storage that gives no answer."""
        self._now_s = now_s
        for cache in self.devices.values():
            if cache.stalled_since_s is not None and now_s >= cache.stalled_since_s + STALL_GRACE_S:
                cache.stalled_since_s = now_s
                self._pump(cache, desperate=True)
        if self._doomed_since_s is not None and now_s >= self._doomed_since_s + DOOM_GRACE_S:
            self._doomed_since_s = None
            for owner in self.instances.values():
                for step in owner.ledger.give_up_waiting():
                    self._fail_held(step)
        late = [i for i, start_s in self._in_flight.items() if now_s >= start_s + self.deadline_s]
        for index in late:
            del self._in_flight[index]
            record = self.records[index]
            assert record.tier is not None
            name = self.placement.tiers[record.tier].spec.name
            verb = "reading" if record.life is Life.READING else "writing"
            cause = errors.DeadlineError(
                f"tier {name!r} gave no answer for {self.deadline_s:g} s while {verb} {self.describe(record)}"
            )
            self.placement.tiers[record.tier].retired = True
            for owner in self.instances.values():
                self._fail_instance(owner, cause)

    def fail_all(self, cause: errors.OffloadError) -> None:
        """Ends everything that is open: the engine cannot go on."""
        for owner in self.instances.values():
            self._fail_instance(owner, cause)

    # -- steps

    def _begin(self, owner: Instance, step: Step) -> None:
        if not self._running:
            writes = sum(max(0, cache.records - len(cache.slots)) for cache in self.devices.values())
            if any(not tier.retired for tier in self.placement.tiers):
                self.placement.begin_phase(writes)
        self._running.add(step)
        owner.serials = [*owner.serials[-1:], step.serial]
        if step.ticket == 0:
            owner.error = None
            owner.adopted_serials.clear()

    def _complete(self, operation: Operation, ticket: int) -> None:
        self._actions.append(Complete(operation.request, ticket))
        self._ended(operation)

    def _ended(self, operation: Operation) -> None:
        owner = self.instances[operation.instance]
        step = self._steps.pop(operation.request)
        del self._operations[operation.request]
        self.devices[operation.device].op_ended()
        if owner.ledger.completed(step):
            if not step.failed:
                owner.steps += 1
            self._end_step(owner, step)

    def _end_step(self, owner: Instance, step: Step) -> None:
        self._running.discard(step)
        if owner.adopted_leaves:
            names = sorted(owner.adopted_leaves)
            owner.adopted_leaves.clear()
            owner.adopted += 1
            if owner.foreign is not ForeignParams.ADOPT:
                shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                self._warn(
                    errors.ForeignParamsWarning,
                    f"optimizer {owner.name!r}: params were replaced from outside since the last update and were "
                    f"adopted, their float32 remainders dropped: {shown}",
                )
        self._end_phase()

    def _end_phase(self) -> None:
        if not self._running:
            self.placement.end_phase()
            for cache in self.devices.values():
                cache.end_phase()

    def _doom(self, owner: Instance, step: Step, request: int) -> None:
        step.held.append(request)
        if owner.ledger.all_here(step):
            self._fail_held(step)
            if not any(other.ledger.waits() for other in self.instances.values()):
                self._doomed_since_s = None
        elif self._doomed_since_s is None:
            self._doomed_since_s = self._now_s

    def _fail_held(self, step: Step) -> None:
        assert step.doomed is not None
        self._actions.extend(Fail(request, step.doomed) for request in step.held)
        step.held.clear()

    # -- records

    def _want(self, record: Record) -> None:
        """An operation needs this record: a hit is updated at once, the others wait for a slot."""
        cache = self.devices[record.device]
        if record.life is Life.STORED and record.void:
            assert record.tier is not None
            self.placement.forget(record.tier, record.size_bytes)
            record.life, record.tier = Life.ABSENT, None
        if record.life in (Life.STORED, Life.ABSENT):
            self.misses += record.life is Life.STORED
            cache.wait(record)
        else:
            self.hits += 1
            if record.life is Life.DIRTY:
                self._start_update(record)

    def _start_update(self, record: Record) -> None:
        operation = record.wanted_by
        assert operation is not None and record.slot is not None, record
        fresh = record.void or record.life is Life.ABSENT
        record.life = Life.UPDATING
        operation.updating += 1
        self.devices[record.device].updating += 1
        self._actions.append(Update(record, operation.request, fresh))

    def _pump(self, cache: DeviceCache, error: errors.OffloadError | None = None, desperate: bool = False) -> None:
        """Moves a device on as far as it goes: free slots to waiting records, victims to tiers."""
        while cache.free and cache.waiting:
            self._fill(cache)
        lacking = cache.waiting - cache.writing
        while lacking > 0:
            record = cache.victim(self._is_over, desperate or (cache.forced and cache.idle))
            if record is None:
                break
            tier = self.placement.choose_write(record.size_bytes)
            if tier is None:
                if not self.placement.can_write(record.size_bytes) and cache.idle:
                    self._no_room(cache, record, error)
                break
            self._write(cache, record, tier)
            desperate = False
            lacking -= 1
        if cache.waiting == 0 or not cache.idle:
            cache.stalled_since_s = None
        elif cache.stalled_since_s is None:
            cache.stalled_since_s = self._now_s

    def _pump_all(self, first: DeviceCache, error: errors.OffloadError | None = None) -> None:
        """A tier's queue is shorter: the device whose write ended goes first, then those that wait for a tier."""
        self._pump(first, error)
        for cache in self.devices.values():
            if cache is not first and cache.waiting:
                self._pump(cache, error)

    def _is_over(self, record: Record) -> bool:
        return record.serial == self.instances[record.instance].ledger.latest

    def _fill(self, cache: DeviceCache) -> None:
        record = cache.next_absent()
        if record is None:
            tier = self.placement.choose_read(cache.waiting_bytes())
            record = cache.next_from(tier)
        record.slot = cache.free.pop()
        if record.life is Life.ABSENT:
            self._start_update(record)
            return
        record.life = Life.READING
        cache.reading += 1
        self._in_flight[record.index] = self._now_s
        self.placement.read_begins(tier, self._now_s)
        self._actions.append(Read(record))

    def _write(self, cache: DeviceCache, record: Record, tier: int) -> None:
        record.life, record.tier = Life.WRITING, tier
        cache.writing += 1
        self._in_flight[record.index] = self._now_s
        self.placement.write_begins(tier, record.size_bytes, self._now_s)
        self._actions.append(Write(record))

    # -- failures

    def _retire(self, tier: int, error: errors.OffloadError) -> None:
        state = self.placement.tiers[tier]
        if state.retired:
            return
        state.retired = True
        live = [other.spec.name for other in self.placement.tiers if not other.retired]
        if live:
            self._warn(errors.TierWarning, f"{error}; the tier is retired, writes go to {', '.join(live)}")

    def _no_room(self, cache: DeviceCache, record: Record, error: errors.OffloadError | None) -> None:
        """No tier takes records any more: whoever waits for a slot of this device fails."""
        cause = error or errors.TierError(
            f"no tier has room for {record.size_bytes} bytes of {self.describe(record)}; give the store another tier, "
            "more capacity or more host_memory"
        )
        for number in {op.instance for op in self._operations.values() if op.device == cache.ordinal and op.pending}:
            self._fail_instance(self.instances[number], cause)

    def _adopt(self, owner: Instance, operation: Operation, leaves: list[str]) -> None:
        owner.adopted_leaves.update(leaves)
        if operation.serial not in owner.adopted_serials:
            owner.adopted_serials = [*owner.adopted_serials[-1:], operation.serial]
        previous = owner.serials[0] if len(owner.serials) == 2 else 0
        twice = operation.serial == owner.serials[-1] and previous in owner.adopted_serials
        if owner.foreign is ForeignParams.ERROR or (owner.foreign is ForeignParams.WATCH and twice):
            again = "again " if twice else ""
            cause = errors.ForeignParamsError(
                f"optimizer {owner.name!r}: 16-bit params ({', '.join(leaves[:4])}) are {again}not what the last update "
                "left. A transform after jmo's optimizer changes its updates; move it in front, or wrap the whole chain "
                "in jmo.offload. If params are meant to be replaced before each update, pass foreign_params='adopt'"
            )
            self._fail_instance(owner, cause, at_once=len(owner.devices) == 1)

    def _fail_instance(self, owner: Instance, cause: errors.OffloadError, at_once: bool = False) -> None:
        """Ends an optimizer's open operations; its steps are refused from here on, until it starts afresh."""
        operations = [op for op in self._operations.values() if op.instance == owner.number and not op.failed]
        for step in {self._steps[op.request] for op in operations}:
            owner.ledger.fail(step, str(cause))
            self._running.discard(step)
        owner.ledger.fail_open(str(cause))
        if not operations:
            owner.ledger.broken = owner.ledger.broken or str(cause)
        owner.error = owner.error or cause
        self._fail_operations(operations, at_once)
        self._end_phase()

    def _fail_operations(self, operations: list[Operation], at_once: bool = False) -> None:
        for operation in operations:
            operation.failed = True
            operation.poisoned = not at_once
            cache = self.devices[operation.device]
            for record in self.instances[operation.instance].records[operation.bucket, operation.device]:
                if record.wanted_by is operation and record.life is not Life.UPDATING:
                    cache.drop(record)
                    record.wanted_by = None
        for operation in operations:
            if operation.updating == 0:
                self._end_failed(operation)

    def _end_failed(self, operation: Operation) -> None:
        """Ends a failed operation once no kernel works for it."""
        if operation.poisoned:
            if operation.updating == 0 and not operation.handing_back:
                operation.handing_back = True
                self._actions.append(HandBack(operation.request))
            return
        # Raised at once (one device): not before every kernel of the step is done, since XLA then takes its buffers.
        owner = self.instances[operation.instance]
        together = [op for op in self._operations.values() if op.instance == owner.number and op.failed]
        if any(op.updating for op in together):
            return
        for op in together:
            self._actions.append(Fail(op.request, str(owner.error)))
            self._ended(op)

    def _warn(self, category: type[Warning], message: str) -> None:
        self._actions.append(Warn(category, message))
