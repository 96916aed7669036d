"""The state machine of the engine: events in, actions out.

1. ``arrived``: an operation (one bucket, one device, one step) wants each of its records updated. One that is in a
   slot is updated at once (a hit); the others wait for a slot. What the step will ask for is read ahead (``cache``).
2. A freed slot goes to a waiting record: read from its tier, or taken empty where nothing is stored yet.
3. While more records wait than slots are about to be free, a victim (``cache``) is written out to the tier that pulls
   (``placement``). So a step reads and writes as many records as did not fit, and no more.
4. Operations end as ``operations`` says: well, once all their records are updated; else with the old params, all of
   the optimizer's together.
5. A tier that fails a write, or gives no answer, is retired; what it did not take goes to another.

What always holds: a record is updated exactly once by each operation that ran; a slot is never lost; what a record is
doing is its ``life`` and nothing else. An event costs the same however many records there are, but for the first of a
step and a failure. No thread, clock, file or jax here: times come in with the events, and ``take_actions`` gives out
what is to be done. The same class runs under driver, simulator and fault tests. Thread contract: one thread.

One class, a little longer than a file should be: every event needs what the others keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax_mlp_offload import errors
from jax_mlp_offload.cache import DeviceCache
from jax_mlp_offload.instances import ForeignParams, Instance, make_instance
from jax_mlp_offload.operations import Operations
from jax_mlp_offload.placement import TierSpec
from jax_mlp_offload.transfers import Transfers
from jax_mlp_offload.types import Action, Life, Operation, Order, Read, Record, Update, Write

_Error = errors.OffloadError | None
STALL_GRACE_S = 0.02  # how long the next bucket may take before a record that is still needed is evicted


class Scheduler:
    """Decides what happens to every record. See the module's text.

    Args:
      tiers: where records may go.
      order: how records are taken and evicted.
      deadline_s: how long storage may take to answer a request.
    """

    def __init__(
        self, tiers: Sequence[TierSpec], order: Order = Order.RESIDENT_FIRST, deadline_s: float = 600.0
    ) -> None:
        self._transfers = Transfers(tiers, deadline_s)
        self.placement = self._transfers.placement
        self.devices: dict[int, DeviceCache] = {}
        self.records: list[Record] = []
        self.hits = 0
        self.misses = 0
        self._order = order
        self._operations = Operations(self.devices)
        self._depth = max(1, self.placement.depth)  # records on their way out and in that keep every tier busy
        self._moving: dict[DeviceCache, None] = {}  # devices to look at before the event is over, in order
        self._blocked: dict[DeviceCache, None] = {}  # devices that wait for a tier, in order

    # -- set-up

    @property
    def instances(self) -> dict[int, Instance]:
        """The optimizers by number."""
        return self._operations.instances

    def add_slots(self, device: int, slots: range) -> None:
        """Gives slots to a device (a new device, or more for a known one)."""
        self._device(device).add_slots(slots)
        self.placement.add_slots(len(slots))

    def add_instance(
        self,
        number: int,
        name: str,
        devices: Sequence[int],
        bucket_records: Sequence[Sequence[int]],
        leaf_names: Callable[[int, int], list[str]],
        bucket_leaf: Callable[[int, int], str],
        foreign: ForeignParams = ForeignParams.WATCH,
        spans: bool = False,
        first_serial: int | None = None,
    ) -> Instance:
        """Registers an optimizer; see :func:`make_instance` for the arguments."""
        instance = make_instance(
            number,
            name,
            devices,
            bucket_records,
            leaf_names,
            bucket_leaf,
            foreign,
            self.records,
            spans,
            first_serial,
        )
        for device in devices:
            self._device(device).records += sum(map(len, bucket_records))
        self.instances[number] = instance
        return instance

    def _device(self, device: int) -> DeviceCache:
        return self.devices.setdefault(device, DeviceCache(device, self._order, self._depth))

    # -- what the driver asks

    def take_actions(self) -> list[Action]:
        """What is to be done now; each action is given out once."""
        actions, self._operations.actions = self._operations.actions, []
        return actions

    @property
    def quiescent(self) -> bool:
        """Whether no operation is open and nothing is in flight (I/O that was given up does not count)."""
        return self._operations.quiescent and self._transfers.none

    @property
    def is_blocked(self) -> bool:
        """Whether a device waits for a tier that has room."""
        return bool(self._blocked)

    def next_tick_s(self) -> float | None:
        """When ``tick`` is wanted if nothing else happens, as a time; None: not at all."""
        times = [d.stalled_since_s + STALL_GRACE_S for d in self.devices.values() if d.stalled_since_s is not None]
        others = (self._operations.give_up_s(), self._transfers.deadline())
        return min([*times, *(other_s for other_s in others if other_s is not None)], default=None)

    def describe(self, record: Record) -> str:
        """A record in words, for messages."""
        return self.instances[record.instance].describe(record)

    # -- events

    def arrived(
        self,
        request: int,
        instance: int,
        bucket: int,
        device: int,
        run_id: int,
        ticket: int,
        skip: bool,
        now_s: float,
        loads: bool = False,
    ) -> None:
        """XLA handed over one bucket of one device, or (``loads``) a state for it is at hand."""
        self._operations.now_s = now_s
        self._operations.arrive(request, instance, bucket, device, run_id, ticket, skip, loads)
        self._settle()

    def agreed(self, instance: int, device: int, mine: int, ticket: int, now_s: float) -> None:
        """A device learned which ticket all processes gave the step that it has been through (POISON: one failed)."""
        self._operations.now_s = now_s
        self._operations.agreed(instance, device, mine, ticket)

    def read_done(
        self, record: Record, error: _Error, now_s: float, begun_s: float | None = None, free_bytes: int | None = None
    ) -> None:
        """A record was read, or could not be. Storage began with it at ``begun_s`` and has ``free_bytes`` left, if known."""
        self._operations.now_s = now_s
        cache = self.devices[record.device]
        tier = self._ended(record, Life.READING, error is None, begun_s, free_bytes)
        if error is not None and record.wanted_by is not None and record.void:
            self.placement.give_up(tier, record.size_bytes, record.index)  # it starts afresh: nothing stored matters
            error = None
        if error is None:
            record.tier, record.life = None, Life.READY
            self._use_or_rest(record)
        else:
            record.life = Life.STORED
            cache.wake(record)
            cache.release(record)
            if record.wanted_by is not None:
                self._fail(self.instances[record.instance], error, record.wanted_by.serial)
        if self.placement.tiers[tier].files.bounded:
            self._unblock()
        self._moving[cache] = None
        self._settle()

    def write_done(
        self,
        record: Record,
        crc: int,
        error: _Error,
        now_s: float,
        begun_s: float | None = None,
        free_bytes: int | None = None,
    ) -> None:
        """A record was written out, with this CRC32C, or could not be. For the rest see ``read_done``."""
        self._operations.now_s = now_s
        cache = self.devices[record.device]
        tier = self._ended(record, Life.WRITING, error is None, begun_s, free_bytes)
        record.crc = crc
        if error is None and record.wanted_by is None:
            record.life = Life.STORED
            cache.release(record)
        else:
            if error is None:
                self.placement.forget(tier, record.size_bytes, record.index)  # wanted again while it was written
            elif not (isinstance(error, errors.TierError) and error.no_space and self._refuses(tier, record)):
                self._retire(tier, error)
            record.tier = None
            self._use_or_rest(record)
        self._unblock()
        self._moving[cache] = None
        self._settle()

    def update_done(self, record: Record, adopted_leaves: Sequence[int], now_s: float, error: _Error = None) -> None:
        """A record was updated, or (``error``) it may have been in part: an accelerator failed."""
        self._operations.now_s = now_s
        cache = self.devices[record.device]
        operation = record.wanted_by
        if record.life is not Life.UPDATING or operation is None:
            raise RuntimeError(f"an update ended that was not under way: {record}")
        cache.updating -= 1
        record.wanted_by, record.void = None, False
        self._use_or_rest(record)
        owner = self.instances[record.instance]
        if error is not None:
            self._fail(owner, error, operation.serial)
        elif adopted_leaves:
            self._operations.adopted(operation, [owner.bucket_leaf(record.bucket, leaf) for leaf in adopted_leaves])
        self._operations.updated(operation)
        self._moving[cache] = None
        self._settle()

    def space_seen(self, tier: int, free_bytes: int, now_s: float) -> None:
        """So much is free on a tier's file system: a tier that holds nothing hears of room from nobody else."""
        self._operations.now_s = now_s
        self.placement.tiers[tier].files.system.seen(free_bytes)
        self._unblock()
        self._settle()

    def handed_back(self, request: int, now_s: float) -> None:
        """The old params are in the operation's results."""
        self._operations.now_s = now_s
        self._operations.handed_back(request)
        self._settle()

    def hold(self, record: Record) -> None:
        """Keeps what a record holds as it is until ``let_go``: it may be read, but is neither updated nor evicted."""
        record.holds += 1
        self.devices[record.device].wake(record)

    def let_go(self, records: Sequence[Record], now_s: float) -> None:
        """Who held these records needs them no more."""
        self._operations.now_s = now_s
        for record in records:
            record.holds -= 1
            if not record.holds and record.slot is not None and record.life in (Life.READY, Life.DIRTY):
                self._use_or_rest(record)
            self._moving[self.devices[record.device]] = None
        self._settle()

    def fail(self, instance: int, cause: errors.OffloadError, now_s: float, run_id: int | None = None) -> None:
        """What an optimizer is given from outside (by this run) cannot be had: its operations end, and it is broken."""
        self._operations.now_s = now_s
        owner = self.instances[instance]
        if run_id is not None:
            owner.ledger.lose(run_id)
        self._fail(owner, cause)
        self._settle()

    def tick(self, now_s: float) -> None:
        """Time passed: acts on stalls, refused steps that never became whole, and storage that gives no answer."""
        self._operations.now_s = now_s
        for cache in self.devices.values():
            if cache.stalled_since_s is not None and now_s >= cache.stalled_since_s + STALL_GRACE_S:
                cache.stalled_since_s = now_s
                self._move(cache, desperate=True)
        self._operations.give_up()
        while (index := self._transfers.late(now_s)) is not None:
            self._give_up(self.records[index])
        self._settle()

    def suspended(self, duration_s: float) -> None:
        """The whole process stood still for so long: storage had no time to answer."""
        self._transfers.suspended(duration_s)

    def fail_all(self, cause: errors.OffloadError) -> None:
        """Ends everything that is open: the engine cannot go on."""
        self._operations.fail_held()
        for owner in self.instances.values():
            self._fail(owner, cause)
        self._settle()

    # -- operations

    def _settle(self) -> None:
        """Ends an event: starts what may start, and moves every device that it concerned."""
        while self._operations.ready or self._moving or self._out_of_room():
            if self._operations.ready:
                self._start(self._operations.ready.pop(0))
            elif self._moving:
                cache = next(iter(self._moving))
                del self._moving[cache]
                self._move(cache)

    def _start(self, operation: Operation) -> None:
        cache = self.devices[operation.device]
        owner = self.instances[operation.instance]
        if self._operations.begins_step(operation):
            self._expect_writes(owner, operation)
        if not cache.has_begun(operation.instance, operation.order):
            buckets = [owner.records[bucket, operation.device] for bucket in range(owner.buckets)]
            reads = not operation.skip and not operation.fresh
            cache.begin_turn(operation.instance, operation.order, buckets, reads, self._operations.now_s)
        records = owner.records[operation.bucket, operation.device]
        cache.came(records, operation.instance, operation.bucket)
        for record in records:
            record.asked = operation.order
            record.void = record.void or operation.fresh
            if not operation.skip:
                cache.ask(record, operation)
            elif record.life is Life.DIRTY and not record.holds:
                cache.wake(record)
                cache.rest(record)
        if operation.skip:
            self._operations.hand_back(operation)
        else:
            operation.pending = len(records)
            if not records:
                self._operations.settle(operation)
        self._moving[cache] = None

    def _expect_writes(self, owner: Instance, operation: Operation) -> None:
        """Tells the tiers how many records the step will write: as many as lack a slot."""
        writes = sum(max(0, n - len(self.devices[device].free)) for device, n in owner.outside().items())
        if self._operations.others_run(operation):
            self.placement.extend_phase(writes)
        else:
            self.placement.begin_phase(writes, self._operations.now_s)

    def _fail(self, owner: Instance, cause: errors.OffloadError, serial: int | None = None) -> None:
        self._operations.fail(owner, cause, serial)
        self._moving.update(dict.fromkeys(self.devices.values()))

    # -- records

    def _want(self, record: Record, operation: Operation) -> None:
        """An operation needs this record: a hit is updated at once, the others wait for a slot."""
        if record.index in self._transfers.overdue:
            self._fail(self.instances[record.instance], self._transfers.overdue[record.index], operation.serial)
            return
        cache = self.devices[record.device]
        record.wanted_by = operation
        if record.life is Life.STORED and record.void and not record.holds:
            assert record.tier is not None
            self.placement.give_up(record.tier, record.size_bytes, record.index)
            record.life, record.tier = Life.ABSENT, None
        if record.life in (Life.STORED, Life.ABSENT):
            cache.wait(record)
        else:
            self.hits += not cache.was_fetched(record)
            if record.life is Life.DIRTY:
                cache.wake(record)
                self._start_update(record)

    def _start_update(self, record: Record) -> None:
        operation = record.wanted_by
        assert operation is not None
        if record.holds:
            record.life = Life.READY
            return
        fresh = record.void or record.life is Life.ABSENT
        record.life = Life.UPDATING
        operation.updating += 1
        self.devices[record.device].updating += 1
        self._operations.actions.append(Update(record, operation.request, fresh))

    def _use_or_rest(self, record: Record) -> None:
        """What is in the slot is whole: on to the kernel if an operation waits for it."""
        if record.wanted_by is not None:
            self._start_update(record)
        else:
            record.life = Life.DIRTY
            if not record.holds:
                self.devices[record.device].rest(record)

    def _move(self, cache: DeviceCache, desperate: bool = False) -> None:
        """Moves a device on as far as it goes: slots to waiting records, victims to tiers."""
        while True:
            while cache.free and self._fill(cache):
                pass
            asked = cache.next_asked(desperate)
            if asked is None:
                break
            self._want(*asked)
        self._evict(cache, desperate)
        if cache.pending == 0 or not cache.idle:
            cache.stalled_since_s = None
        elif cache.stalled_since_s is None:
            cache.stalled_since_s = self._operations.now_s

    def _evict(self, cache: DeviceCache, desperate: bool) -> None:
        """Writes out as many victims as records wait for a slot, as far as tiers pull."""
        while cache.lacking > 0:
            record = cache.victim(desperate)
            if record is None:
                if cache.stuck == len(cache.slots):
                    self._fail_waiting(cache, self._transfers.why_stuck(cache.slots))
                return
            tier = self.placement.choose_write(record.size_bytes, record.index)
            for full in self.placement.take_full():
                self._operations.warn(errors.TierWarning, self._transfers.told_full(full))
            if tier is None:
                self._blocked[cache] = None
                return
            cache.wake(record)
            record.life, record.tier = Life.WRITING, tier
            cache.count(Life.WRITING, 1)
            self._transfers.begin(record, tier, self._operations.now_s)
            self._operations.actions.append(Write(record))
            desperate = False

    def _fill(self, cache: DeviceCache) -> bool:
        """Gives a free slot to the record that should have it; false if none should."""
        record = cache.next_absent()
        if record is not None:
            record.slot = cache.free.pop()
            self._start_update(record)
            return True
        tier = self.placement.choose_read(cache.waiting_bytes, cache.ahead_bytes if cache.ahead > 0 else {})
        if tier is None:
            return False
        record = cache.next_from(tier) if tier in cache.waiting_bytes else cache.next_ahead(tier)
        record.slot = cache.free.pop()
        record.life = Life.READING
        cache.count(Life.READING, 1)
        self.misses += 1
        self._transfers.begin(record, tier, self._operations.now_s)
        self._operations.actions.append(Read(record))
        return True

    # -- tiers

    def _ended(self, record: Record, life: Life, ok: bool, begun_s: float | None, free_bytes: int | None) -> int:
        """A record's read or write ended; returns the tier."""
        cache = self.devices[record.device]
        tier, late = self._transfers.end(record, life, ok, self._operations.now_s, begun_s, free_bytes)
        if late:
            cache.stuck -= 1
        else:
            cache.count(life, -1)
        return tier

    def _unblock(self) -> None:
        """A tier may take more: devices that wait for one go on, in the order in which they began to."""
        self._moving.update(self._blocked)
        self._blocked.clear()

    def _give_up(self, record: Record) -> None:
        """Storage gives no answer. The slot stays with the request; nobody waits for it any more."""
        assert record.tier is not None
        cause = self._transfers.give_up(record, self.describe(record), self._operations.now_s)
        cache = self.devices[record.device]
        cache.stuck += 1
        cache.count(record.life, -1)
        self._retire(record.tier, cause)
        if record.wanted_by is not None:
            self._fail(self.instances[record.instance], cause, record.wanted_by.serial)
        self._moving.update(dict.fromkeys(self.devices.values()))

    def _refuses(self, tier: int, record: Record) -> bool:
        """Whether a tier that refused a record for want of room is full, as far as one can see."""
        full = self.placement.tiers[tier].files.refuses(record.size_bytes)
        if full:
            self.placement.note_full(record.size_bytes, record.index)
        return full

    def _retire(self, tier: int, error: errors.OffloadError) -> None:
        if message := self._transfers.retire(tier, error):
            self._operations.warn(errors.TierWarning, message)

    def _out_of_room(self) -> bool:
        """Whether a device was found that waits for a tier for ever; whoever waits for its slots fails."""
        if not self._transfers.none or any(tier.files.links for tier in self.placement.tiers):
            return False  # what takes up room now may go
        for cache in self._blocked:
            record = cache.victim(desperate=True)
            if cache.waiting and record is not None and not self.placement.can_write(record.size_bytes, record.index):
                self._fail_waiting(cache, self._transfers.no_room(record, self.describe(record)))
                return True
        return False

    def _fail_waiting(self, cache: DeviceCache, cause: errors.OffloadError) -> None:
        """Nothing frees a slot of this device any more: whoever waits for one fails."""
        for number in {record.instance for record in cache.waiting_records()}:
            self._fail(self.instances[number], cause)
