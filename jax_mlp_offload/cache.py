"""The slots of one device: which records they hold, which records wait for one, and which is given up.

What always holds: a slot is free, or belongs to exactly one record. A record that rests in a slot (dirty, wanted by
nobody) is in exactly one of three groups: *over* for this step, still *due* in it, or of an *idle* optimizer that has
not stepped for a while. Idle records go first. Then the *most* recently updated of those that are over: in a step every
record is used once, so the one just updated is the one whose next use is furthest away (Belady's optimum for a cyclic
order; least-recently-used would evict each record just before its use). Records that are due go only where nothing else
can make progress.

A step wants each record once, mostly in the order of the last step. So once it began, what is outside is *expected*: it
is read ahead of its operation where that costs no record that is due, and only as far as keeps every tier busy.

The other orders are there for comparison. They begin when all of a step's operations have come (or no more seem to),
take records strictly in the order of the model, a window at a time, and evict the least recently used one, due or not:
``SEQUENTIAL`` is ZeRO-Infinity's, ``ALTERNATING`` turns round at each step, as MLP-Offload does (arXiv 2509.02480).

Every call costs the same however many records there are, except ``begin_turn`` (once a step) and what follows a failure
(``withdraw``, ``expect_none``): in proportion to slots and records.
Pure; used by the scheduler's thread only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator

from jax_mlp_offload.types import Life, Operation, Order, Record

IDLE_STEPS = 4
"""An optimizer is idle once another one of the same device has begun this many steps since it last did."""


class DeviceCache:
    """Slots and records of one device.

    Args:
      ordinal: the device.
      order: how records are taken and evicted.
      window: records on their way that keep every tier busy: most that are read ahead, and in the orders that are not
        resident-first most that wait for a slot at once.
    """

    def __init__(self, ordinal: int, order: Order = Order.RESIDENT_FIRST, window: int = 4) -> None:
        self.ordinal = ordinal
        self.order = order
        self.slots: set[int] = set()
        self.free: list[int] = []
        self.records = 0  # all records that live on this device
        self.reading = 0
        self.writing = 0
        self.updating = 0
        self.stuck = 0  # slots whose read or write was given up, but may go on
        self.waiting = 0  # records that need a slot
        self.waiting_bytes: dict[int, int] = {}  # bytes that wait to be read, by tier
        self.stalled_since_s: float | None = None
        self.forced = False  # the program hands over one bucket at a time
        self._window = window
        self._asked: list[tuple[tuple[int, int, int], int, Record, Operation]] = []  # heap
        self._numbers = itertools.count()
        self._misses: dict[int | None, OrderedDict[int, Record]] = {}  # by the tier they are on; None: nothing stored
        self.ahead_bytes: dict[int, int] = {}  # bytes that are expected to be read, by tier
        self._expected: dict[int, OrderedDict[int, Record]] = {}  # by the tier they are on
        self._expecting = 0
        self._fetched: dict[int, Record] = {}  # read ahead of their operation, which has not come
        self._arrivals: dict[int, dict[int, None]] = {}  # buckets of each optimizer's last step, as they came
        # records that rest in a slot, by index, in the order of their updates
        self._over: OrderedDict[int, Record] = OrderedDict()
        self._due: OrderedDict[int, Record] = OrderedDict()
        self._idle: OrderedDict[int, Record] = OrderedDict()
        self._begun: dict[int, deque[int]] = {}  # each optimizer's last steps here, by their order
        self._to_come: dict[int, int] = {}  # operations that the step of each optimizer still lacks
        self._backwards = False
        self._open_ops = 0
        self._phase_ops = 0
        self._most_open_ops = 0
        self._open_since_s = 0.0
        self._open_s = 0.0
        self._phase_since_s = 0.0
        self._last_end_s = 0.0

    def add_slots(self, slots: range) -> None:
        """More slots for this device."""
        self.slots.update(slots)
        self.free.extend(reversed(slots))

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that could free a slot."""
        return self.reading == 0 and self.writing == 0 and self.updating == 0

    # -- steps and operations

    def has_begun(self, instance: int, step: int) -> bool:
        """Whether this step of the optimizer, or a later one, has begun on this device."""
        begun = self._begun.get(instance)
        return begun is not None and begun[-1] >= step

    def begin_turn(self, instance: int, step: int, buckets: list[list[Record]], reads: bool, now_s: float) -> None:
        """The first operation of a new step of an optimizer starts: its records are due again.

        Args:
          instance: the optimizer.
          step: its place in the order of all steps.
          buckets: its records on this device.
          reads: whether the step wants what is stored.
          now_s: the time.
        """
        if not self.slots:
            raise RuntimeError(f"device {self.ordinal} has no slots")
        self._begun.setdefault(instance, deque(maxlen=IDLE_STEPS)).append(step)
        self._to_come[instance] = len(buckets)
        self._backwards = self.order is Order.ALTERNATING and not self._backwards
        self._learn(now_s)
        self._regroup(instance)
        self.expect_none(instance)
        arrivals, self._arrivals[instance] = self._arrivals.get(instance, {}), {}
        if reads and not self.forced and self.order is Order.RESIDENT_FIRST:
            for bucket in arrivals:
                self._expect(buckets[bucket])

    def _regroup(self, instance: int) -> None:
        begun = self._begun[instance]
        horizon = begun[0] if len(begun) == IDLE_STEPS else 0
        resting = [*self._idle.values(), *self._due.values(), *self._over.values()]
        over, self._due, self._idle = self._over, OrderedDict(), OrderedDict()
        self._over = OrderedDict()
        for record in resting:
            if record.instance != instance and self._begun[record.instance][-1] < horizon:
                self._idle[record.index] = record
            elif record.instance != instance and record.index in over:
                self._over[record.index] = record
            else:
                self._due[record.index] = record

    def op_arrived(self, now_s: float) -> None:
        """An operation of this device came."""
        if self._open_ops == 0:
            self._open_since_s = now_s
        self._phase_ops += 1
        self._open_ops += 1
        self._most_open_ops = max(self._most_open_ops, self._open_ops)

    def op_ended(self, now_s: float) -> None:
        """An operation of this device ended."""
        self._open_ops -= 1
        self._last_end_s = now_s
        if self._open_ops == 0:
            self._open_s += now_s - self._open_since_s

    def _learn(self, now_s: float) -> None:
        """Learns from the step that ended whether operations come one by one; the new one's first has come.

        That none ever met another says so only where they took most of the time: else they may just have been quick.
        """
        if self._phase_ops > 2:
            if self._most_open_ops > 1:
                self.forced = False
            elif 2 * self._open_s > self._last_end_s - self._phase_since_s:
                self.forced = True
        self._phase_ops = 1
        self._most_open_ops = self._open_ops
        self._open_s, self._phase_since_s = 0.0, now_s

    # -- records that operations ask for

    def ask(self, record: Record, operation: Operation) -> None:
        """Queues a record that an operation wants updated."""
        key = (0, 0, 0)
        if self.order is not Order.RESIDENT_FIRST:
            sign = -1 if self._backwards else 1
            key = (operation.order, sign * record.bucket, sign * record.subgroup)
        heapq.heappush(self._asked, (key, next(self._numbers), record, operation))

    @property
    def pending(self) -> int:
        """Records that are asked for and neither in use nor on their way."""
        return self.waiting + len(self._asked)

    def next_asked(self, desperate: bool) -> tuple[Record, Operation] | None:
        """The record to start with next; resident-first starts with all, hits and misses.

        Args:
          desperate: whether to begin though operations are missing.
        """
        if not self._asked:
            return None
        if self.order is not Order.RESIDENT_FIRST:
            if desperate or self.forced:
                self._to_come = dict.fromkeys(self._to_come, 0)
            if self.waiting >= self._window or any(count > 0 for count in self._to_come.values()):
                return None
        _, _, record, operation = heapq.heappop(self._asked)
        return record, operation

    def withdraw(self, operation: Operation) -> None:
        """The operation no longer asks for anything."""
        if any(entry[3] is operation for entry in self._asked):
            self._asked = [entry for entry in self._asked if entry[3] is not operation]
            heapq.heapify(self._asked)

    # -- records that operations will ask for

    def came(self, records: list[Record], instance: int, bucket: int) -> None:
        """The operation on these records starts: they are expected no longer."""
        self._arrivals[instance][bucket] = None
        self._to_come[instance] -= 1
        for record in records:
            self._unexpect(record)

    def expect_none(self, instance: int) -> None:
        """The optimizer's step will not ask for more."""
        for queue in list(self._expected.values()):
            for record in [record for record in queue.values() if record.instance == instance]:
                self._unexpect(record)
        self._fetched = {i: record for i, record in self._fetched.items() if record.instance != instance}

    def was_fetched(self, record: Record) -> bool:
        """Whether the record was read ahead for the operation that asks for it now."""
        return self._fetched.pop(record.index, None) is not None

    @property
    def ahead(self) -> int:
        """How many more records may be read ahead."""
        return min(self._expecting, self._most_ahead - len(self._fetched))

    @property
    def lacking(self) -> int:
        """Slots that are needed and not about to be free."""
        return self.waiting + max(0, self.ahead - len(self.free)) - self.writing

    def next_ahead(self, tier: int) -> Record:
        """The next record that is expected and on this tier, to be read now."""
        record = next(iter(self._expected[tier].values()))
        self._unexpect(record)
        self._fetched[record.index] = record
        return record

    def _expect(self, records: list[Record]) -> None:
        for record in records:
            if record.life is Life.STORED and record.tier is not None and record.wanted_by is None and not record.void:
                self._expected.setdefault(record.tier, OrderedDict())[record.index] = record
                self._expecting += 1
                self.ahead_bytes[record.tier] = self.ahead_bytes.get(record.tier, 0) + record.size_bytes

    def _unexpect(self, record: Record) -> None:
        tier = record.tier
        if tier is None or self._expected.get(tier, OrderedDict()).pop(record.index, None) is None:
            return
        self._expecting -= 1
        _add(self.ahead_bytes, tier, -record.size_bytes)

    @property
    def _most_ahead(self) -> int:
        return min(self._window, len(self.slots) // 2)

    # -- records that wait for a slot

    def wait(self, record: Record) -> None:
        """Queues a record that needs a slot."""
        self._misses.setdefault(record.tier, OrderedDict())[record.index] = record
        self._count(record, 1)

    def drop(self, record: Record) -> bool:
        """Takes a record out of the queue again; false if it was not there."""
        if self._misses.get(record.tier, OrderedDict()).pop(record.index, None) is None:
            return False
        self._count(record, -1)
        return True

    def next_absent(self) -> Record | None:
        """The next waiting record of which nothing is stored."""
        return self._next(None) if self._misses.get(None) else None

    def next_from(self, tier: int) -> Record:
        """The next waiting record that is on this tier."""
        return self._next(tier)

    def waiting_records(self) -> Iterator[Record]:
        """All records that wait for a slot."""
        return itertools.chain.from_iterable(queue.values() for queue in self._misses.values())

    def _next(self, tier: int | None) -> Record:
        _, record = self._misses[tier].popitem(last=False)
        self._count(record, -1)
        return record

    def _count(self, record: Record, sign: int) -> None:
        self.waiting += sign
        if record.tier is not None:
            _add(self.waiting_bytes, record.tier, sign * record.size_bytes)

    # -- records that hold a slot

    def release(self, record: Record) -> None:
        """The record gives its slot back."""
        if record.slot is None or record.slot not in self.slots:
            raise RuntimeError(f"not a slot of device {self.ordinal}: {record}")
        self.free.append(record.slot)
        record.slot = None

    def rest(self, record: Record) -> None:
        """The record is dirty in a slot and wanted by nobody: it may be a victim."""
        if record.life is not Life.DIRTY or record.wanted_by is not None:
            raise RuntimeError(f"in use: {record}")
        over = record.asked >= self._begun[record.instance][-1]
        (self._over if over else self._due)[record.index] = record

    def wake(self, record: Record) -> None:
        """The record rests no longer."""
        self._fetched.pop(record.index, None)
        for group in (self._over, self._due, self._idle):
            if group.pop(record.index, None) is not None:
                return

    def resting(self) -> set[int]:
        """Indices of all records that rest."""
        return {*self._over, *self._due, *self._idle}

    def victim(self, desperate: bool) -> Record | None:
        """The record to write out next; None if there is none that may go.

        Args:
          desperate: whether a record that this step still needs may go as well, if one is waiting. Where buckets come one
            by one there may be no other, and as many go as keep the tiers busy.
        """
        if self._idle:
            return next(iter(self._idle.values()))
        if self.order is not Order.RESIDENT_FIRST:
            return next(itertools.chain(self._due.values(), self._over.values()), None)
        if self._over:
            return next(reversed(self._over.values()))
        if not self._due or self.waiting <= self.writing:
            return None
        starved = self.forced and self.updating == 0 and self.reading + self.writing < self._window
        return next(reversed(self._due.values())) if desperate or starved else None

    def count(self, life: Life, change: int) -> None:
        """So many more of the device's records are being read, or written (``life`` says which)."""
        if life is Life.READING:
            self.reading += change
        else:
            self.writing += change


def _add(sizes: dict[int, int], tier: int, size_bytes: int) -> None:
    sizes[tier] = sizes.get(tier, 0) + size_bytes
    if not sizes[tier]:
        del sizes[tier]
