"""Which tier a record goes to, and how fast each tier is.

The tiers are one virtual tier (MLP-Offload, arXiv 2509.02480, section 3.2): every record that leaves memory is written
anew, so it may go to any of them.

1. Tiers on one storage device are one path: bandwidth is the device's (``bandwidth``), and so is the queue. Each gets an
   equal part of both.
2. A tier *pulls* the next record while its device has fewer than ``QUEUE`` writes in flight (a remote one may want
   more), up to its share of the step's writes: the slower direction's bandwidth, since what is written to a tier is
   what is read from it next. While the bandwidth of any is unknown there are no shares, so the split follows the pull.
3. A freed slot reads from a tier that would idle, else from the one whose device needs longest for what is left on it.
4. A tier takes a record only if it fits (``space``).

Pure; no clock of its own: callers give ``now_s``. Used by the scheduler's thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from jax_mlp_offload.bandwidth import Direction, Traffic
from jax_mlp_offload.space import Files, FileSystem

QUEUE = 2  # requests in flight a device, each way: one runs while the next is ready
_QUEUE_PART = 20  # of a phase's writes, one in so many may be in flight to one device


@dataclasses.dataclass(frozen=True, slots=True)
class TierSpec:
    """What is known of a tier beforehand.

    Args:
      name: for messages and statistics.
      capacity_bytes: most bytes to keep there; None: as many as fit.
      read_bps: bandwidth of its device, bytes/s; None: unknown.
      write_bps: the same for writes.
      device: tiers that give the same one share its bandwidth and its queue; None: a device of its own.
      queue: most requests in flight of that device, each way.
      free_bytes: what is free on its file system; None: unknown, or without end.
      file_system: tiers that give the same one share what is free there; None: as ``device`` says.
    """

    name: str
    capacity_bytes: int | None = None
    read_bps: float | None = None
    write_bps: float | None = None
    device: Hashable | None = None
    queue: int = QUEUE
    free_bytes: int | None = None
    file_system: Hashable | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Device:
    """The path that one or more tiers share."""

    reads: Direction
    writes: Direction
    wanted_queue: int
    queue: int  # most requests in flight each way
    tiers: int = 0
    live: int = 0  # tiers that are not retired

    def bps(self) -> float | None:
        """The slower direction's bandwidth, bytes/s: what was written to a tier is what is read from it next."""
        return min((d.bps for d in (self.reads, self.writes) if d.bps), default=None)


@dataclasses.dataclass(eq=False, slots=True)
class Tier:
    """One path's traffic, content and share."""

    spec: TierSpec
    device: Device
    files: Files
    read: Traffic = dataclasses.field(default_factory=Traffic)
    written: Traffic = dataclasses.field(default_factory=Traffic)
    cap: int = 0  # writes it may take in this phase
    taken: int = 0  # writes it took in this phase
    retired: bool = False
    full: bool = False  # its file system was found full once

    def has_room(self, size_bytes: int, record: int | None = None) -> bool:
        """Whether a record of this size still fits (``record``: its index, if it may have a file here)."""
        return not self.retired and self.files.has_room(size_bytes, record)

    @property
    def sharers(self) -> int:
        """Tiers that the device's bandwidth is divided among."""
        return self.device.live or self.device.tiers

    @property
    def read_bps(self) -> float | None:
        """Its part of the device's bandwidth, bytes/s; None: unknown."""
        return self.device.reads.bps and self.device.reads.bps / self.sharers

    @property
    def write_bps(self) -> float | None:
        """Its part of the device's bandwidth, bytes/s; None: unknown."""
        return self.device.writes.bps and self.device.writes.bps / self.sharers


class Placement:
    """Chooses tiers for writes and reads, and learns their bandwidth."""

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        self.phases = 0  # that have begun
        devices: dict[Hashable, Device] = {}
        systems: dict[Hashable, FileSystem] = {}
        self.tiers: list[Tier] = []
        for number, spec in enumerate(specs):
            own = ("tier", number)  # no device that a caller names
            device = devices.setdefault(("device", spec.device) if spec.device is not None else own, _new_device())
            where = spec.file_system if spec.file_system is not None else spec.device
            system = systems.setdefault(("files", where) if where is not None else own, FileSystem())
            system.seen(spec.free_bytes)
            _join(device, spec)
            self.tiers.append(Tier(spec, device, Files(system, spec.capacity_bytes)))
        self.devices = list(devices.values())
        self._full: list[int] = []  # tiers found without space, until ``take_full``
        self._slots: int | None = None
        self._phase_writes = 0  # that the phase expects
        self._writes_left = 0  # of them
        self._device_speeds: dict[Device, float] = {}
        self._speeds: list[float] = []
        self._weigh()

    def add_slots(self, slots: int) -> None:
        """There are more slots for records: long queues may have some of them."""
        self._slots = (self._slots or 0) + slots
        self._allot()

    def _allot(self) -> None:
        """Says how much of a long queue is used: what is in flight when the last writes end is read after them.

        So at most a twentieth of the phase's writes, and of half the slots (each way) what is left once every device
        has the usual queue: else a slow tier would hold all slots while the others idle.
        """
        live = [device for device in self.devices if device.live]
        long = [device for device in live if device.wanted_queue > QUEUE]
        if self._slots is None or not long:
            return
        left = max(0, self._slots // 2 - QUEUE * len(live))
        for device in long:
            most = min(QUEUE + left // len(long), self._phase_writes // _QUEUE_PART)
            device.queue = min(device.wanted_queue, max(QUEUE, most))

    @property
    def depth(self) -> int:
        """Requests in flight, each way, that keep every device busy."""
        return sum(device.wanted_queue for device in self.devices)

    def speeds(self) -> list[float]:
        """Relative speed of each tier; one that is unknown counts as the mean of the known ones."""
        return list(self._speeds)

    def _weigh(self) -> None:
        known = [bps for device in self.devices if (bps := device.bps())]
        unknown = sum(known) / len(known) if known else 1.0
        self._device_speeds = {device: device.bps() or unknown for device in self.devices}
        self._speeds = [self._device_speeds[tier.device] / tier.sharers for tier in self.tiers]

    # -- phases

    def begin_phase(self, writes: int, now_s: float) -> None:
        """Splits the phase's expected writes among the live tiers, at least one each (else it is never measured)."""
        self.end_phase(now_s)
        self.phases += 1
        self._phase_writes = writes
        self._allot()
        self._split(writes)

    def extend_phase(self, writes: int) -> None:
        """More writes are expected than the phase began with."""
        self._phase_writes += writes
        self._allot()
        self._split(max(0, self._writes_left) + writes)

    def end_phase(self, now_s: float) -> None:
        """Takes up what the phase showed of each tier's bandwidth."""
        for device in self.devices:
            device.reads.close_phase(now_s)
            device.writes.close_phase(now_s)
        for tier in self.tiers:
            tier.read.close_phase()
            tier.written.close_phase()
        self._weigh()

    def _split(self, writes: int) -> None:
        self._writes_left = writes
        live = [i for i, tier in enumerate(self.tiers) if not tier.retired]
        for tier in self.tiers:
            tier.cap = tier.taken = 0
        if not live:
            return
        total = sum(self._speeds[i] for i in live)
        for i in live:
            self.tiers[i].cap = max(1, int(self._speeds[i] / total * writes))
        # what rounding down left over goes where it is done first
        for _ in range(writes - sum(self.tiers[i].cap for i in live)):
            first = min(live, key=lambda i: (self.tiers[i].cap + 1) / self._speeds[i])
            self.tiers[first].cap += 1

    def _changed(self) -> None:
        self._weigh()
        self._split(max(0, self._writes_left))

    def tell(self, tier: int, read_bps: float, write_bps: float) -> None:
        """What a probe found of a tier's device, bytes/s; of no effect where its own traffic has told by now."""
        device = self.tiers[tier].device
        device.reads.bps = device.reads.bps or read_bps
        device.writes.bps = device.writes.bps or write_bps
        self._changed()

    # -- choices

    def choose_write(self, size_bytes: int, record: int | None = None) -> int | None:
        """The tier that takes the next record now, or None if none pulls."""
        fitting = [i for i, tier in enumerate(self.tiers) if tier.has_room(size_bytes, record)]
        if len(fitting) < len(self.tiers):
            self.note_full(size_bytes, record)
        free = [i for i in fitting if self.tiers[i].device.writes.in_flight < self.tiers[i].device.queue]
        if any(not self.tiers[i].device.bps() for i in fitting):
            return min(free, key=self._pulled, default=None)
        within = [i for i in free if self.tiers[i].taken < self.tiers[i].cap]
        if within:
            return max(within, key=self._pull)
        # every cap is used up (more writes came than were expected, or tiers with room left are full)
        if any(self.tiers[i].taken < self.tiers[i].cap for i in fitting):
            return None
        return min(free, key=lambda i: (self.tiers[i].taken + 1) / self._speeds[i], default=None)

    def note_full(self, size_bytes: int, record: int | None) -> None:
        """Notes which tiers have no space for this record."""
        for i, tier in enumerate(self.tiers):
            if not (tier.full or tier.retired or tier.files.has_space(size_bytes, record)):
                tier.full = True
                self._full.append(i)

    def take_full(self) -> list[int]:
        """Tiers whose file system was found full, each told once."""
        full, self._full = self._full, []
        return full

    def _pull(self, tier: int) -> tuple[bool, float]:
        left = self.tiers[tier].cap - self.tiers[tier].taken
        return self.tiers[tier].device.writes.in_flight < QUEUE, left / self._speeds[tier]

    def _pulled(self, tier: int) -> tuple[int, int]:
        return self.tiers[tier].device.writes.in_flight, self.tiers[tier].taken

    def can_write(self, size_bytes: int, record: int | None = None) -> bool:
        """Whether any live tier has room for a record of this size, now or when its queue is shorter."""
        return any(tier.has_room(size_bytes, record) for tier in self.tiers)

    def choose_read(self, waiting_bytes: Mapping[int, int], ahead_bytes: Mapping[int, int]) -> int | None:
        """The tier to read from next.

        One that would idle comes first, then the one that needs longest for all that is to be read from it. What is
        read ahead never queues.

        Args:
          waiting_bytes: by tier, what operations wait for.
          ahead_bytes: by tier, what they will want later.
        """
        left = {device: device.reads.in_flight_bytes for device in self.devices}
        for sizes in (waiting_bytes, ahead_bytes):
            for i, size_bytes in sizes.items():
                left[self.tiers[i].device] += size_bytes

        def key(i: int) -> tuple[bool, bool, bool, float, int]:
            device = self.tiers[i].device
            idles, pulls = device.reads.in_flight < min(QUEUE, device.queue), device.reads.in_flight < device.queue
            own = waiting_bytes.get(i, 0) + ahead_bytes.get(i, 0)  # between tiers of one device
            return idles, pulls, i in waiting_bytes, left[device] / self._device_speeds[device], own

        devices = [(i, self.tiers[i].device) for i in ahead_bytes if i not in waiting_bytes]
        idling = [i for i, device in devices if device.reads.in_flight < device.queue]
        return max([*waiting_bytes, *idling], key=key, default=None)

    # -- traffic

    def write_begins(self, tier: int, size_bytes: int, now_s: float, record: int | None = None) -> None:
        """A write was given to the tier."""
        self._writes_left -= 1
        for other in self.tiers:
            if record is not None and other is not self.tiers[tier]:
                other.files.written_elsewhere(record)
        taking = self.tiers[tier]
        taking.taken += 1
        taking.files.write_begins(size_bytes, record)
        taking.device.writes.begin(size_bytes, now_s)
        taking.written.begin(now_s)

    def write_ends(
        self,
        tier: int,
        size_bytes: int,
        now_s: float,
        ok: bool,
        queue_s: float = 0.0,
        abandoned: bool = False,
        record: int | None = None,
    ) -> None:
        """A write ended, after it had waited for ``queue_s``; one that was abandoned tells nothing of the bandwidth."""
        ended = self.tiers[tier]
        ended.files.write_ends(size_bytes)
        if not ok:
            self._writes_left += 1  # it is written again
            self.forget(tier, size_bytes, record)
        if not abandoned:
            ended.written.end(size_bytes, now_s, ok, queue_s)
            if ended.device.writes.end(size_bytes, now_s, ok):
                self._changed()

    def read_begins(self, tier: int, size_bytes: int, now_s: float) -> None:
        """A read was given to the tier."""
        self.tiers[tier].device.reads.begin(size_bytes, now_s)
        self.tiers[tier].read.begin(now_s)

    def read_ends(
        self,
        tier: int,
        size_bytes: int,
        now_s: float,
        ok: bool,
        queue_s: float = 0.0,
        abandoned: bool = False,
        record: int | None = None,
    ) -> None:
        """A read ended; what the tier holds of the record is no longer needed if it went well."""
        ended = self.tiers[tier]
        if ok:
            self.forget(tier, size_bytes, record)
        if not abandoned:
            ended.read.end(size_bytes, now_s, ok, queue_s)
            if ended.device.reads.end(size_bytes, now_s, ok):
                self._changed()

    def abandon(self, tier: int, size_bytes: int, reading: bool, now_s: float) -> None:
        """A request is waited for no longer, though it may still end: other tiers of its device have its place."""
        late = self.tiers[tier]
        direction, traffic = (late.device.reads, late.read) if reading else (late.device.writes, late.written)
        direction.abandon(size_bytes, now_s)
        traffic.abandon(now_s)

    def retire(self, tier: int) -> list[str]:
        """Gives nothing more to the tier; returns the names of those that go on."""
        self.tiers[tier].retired = True
        self.tiers[tier].device.live -= 1
        self._allot()
        self._changed()
        return [other.spec.name for other in self.tiers if not other.retired]

    def forget(self, tier: int, size_bytes: int, record: int | None = None) -> None:
        """The tier no longer holds a record of this size; its file may be taken over, unless it is kept."""
        self.tiers[tier].files.moved_on(size_bytes, record)

    def give_up(self, tier: int, size_bytes: int, record: int) -> None:
        """What the tier holds of the record no longer counts; the file stays the record's until it is written anew."""
        self.tiers[tier].files.give_up(size_bytes, record)


def _new_device() -> Device:
    return Device(Direction(None), Direction(None), wanted_queue=0, queue=0)


def _join(device: Device, spec: TierSpec) -> None:
    """Another tier of the device; of what they say of it the largest counts."""
    device.tiers += 1
    device.live += 1
    device.wanted_queue = device.queue = max(device.wanted_queue, spec.queue)
    device.reads.bps = max(filter(None, (device.reads.bps, spec.read_bps)), default=None)
    device.writes.bps = max(filter(None, (device.writes.bps, spec.write_bps)), default=None)
