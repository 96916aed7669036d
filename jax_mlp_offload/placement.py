"""Which tier a record goes to, and how fast each tier is.

The tiers are one virtual tier (MLP-Offload, arXiv 2509.02480, section 3.2): every record that leaves memory is written
anew, so it may go to any of them. A tier *pulls* the next record while it has fewer than ``QUEUE`` writes in flight, up
to its share of the step's writes. A freed slot reads from the tier with the longest remaining drain time.

Bandwidth is bytes per time with at least one request in flight, over one update phase: never bytes per latency of
single requests, which queueing makes wrong by up to ten times. A change in mid-phase is taken up once two windows agree
on it, and what is left of the phase is split anew.

Pure; no clock of its own: callers give ``now_s``. Used by the scheduler's thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

QUEUE = 2  # writes in flight a tier: one runs while the next is ready
_MIN_BUSY_S = 0.05  # shorter phases measure start-up, not bandwidth
_JUMP = 0.10  # a change larger than this is taken at once
_ALPHA = 0.3  # smaller ones are smoothed
_WINDOW_S = 0.2  # busy time of a window within a phase
_WINDOW_REQUESTS = 4  # a window of fewer requests measures their edges
_WINDOW_JUMP = 0.25  # change on which two windows have to agree


@dataclasses.dataclass(frozen=True, slots=True)
class TierSpec:
    """What is known of a tier beforehand: its name, capacity in bytes, and bandwidths in bytes/s (None: unknown)."""

    name: str
    capacity_bytes: int | None = None
    read_bps: float | None = None
    write_bps: float | None = None


@dataclasses.dataclass(slots=True)
class _Span:
    """Bytes and requests that ended while so much time was busy."""

    size_bytes: int = 0
    busy_s: float = 0.0
    requests: int = 0

    def add(self, size_bytes: int, busy_s: float, requests: int) -> None:
        self.size_bytes += size_bytes
        self.busy_s += busy_s
        self.requests += requests

    @property
    def bps(self) -> float:
        return self.size_bytes / self.busy_s if self.busy_s > 0 else 0.0


@dataclasses.dataclass(slots=True)
class Direction:
    """Traffic of one tier in one direction, and what it tells of its bandwidth (``bps``, bytes/s; None: nothing)."""

    bps: float | None
    in_flight: int = 0
    in_flight_bytes: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    _busy_since_s: float = 0.0
    _phase: _Span = dataclasses.field(default_factory=_Span)
    _window: _Span = dataclasses.field(default_factory=_Span)
    _last_window_bps: float | None = None

    @property
    def mean_bps(self) -> float:
        """Bytes per busy second since the start."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0

    def begin(self, size_bytes: int, now_s: float) -> None:
        """A request was given out."""
        if self.in_flight == 0:
            self._busy_since_s = now_s
        self.in_flight += 1
        self.in_flight_bytes += size_bytes

    def end(self, size_bytes: int, now_s: float, ok: bool) -> bool:
        """A request ended; returns whether the bandwidth was found to have changed."""
        self._add(size_bytes if ok else 0, now_s, 1)
        self.in_flight -= 1
        self.in_flight_bytes -= size_bytes
        if self._window.busy_s < _WINDOW_S or self._window.requests < _WINDOW_REQUESTS:
            return False
        seen, before = self._window.bps, self._last_window_bps
        self._window, self._last_window_bps = _Span(), seen
        if self.bps is None or before is None or abs(seen - before) > _JUMP * before:
            return False
        if min(abs(seen - self.bps), abs(before - self.bps)) <= _WINDOW_JUMP * self.bps:
            return False
        self.bps = (seen + before) / 2
        self._phase = _Span()
        return True

    def close_phase(self, now_s: float) -> None:
        """Takes up what the phase showed."""
        self._add(0, now_s, 0)
        phase, self._phase = self._phase, _Span()
        self._window, self._last_window_bps = _Span(), None
        if phase.busy_s >= _MIN_BUSY_S and phase.size_bytes > 0:
            if self.bps is None or abs(phase.bps - self.bps) > _JUMP * self.bps:
                self.bps = phase.bps
            else:
                self.bps += _ALPHA * (phase.bps - self.bps)

    def _add(self, size_bytes: int, now_s: float, requests: int) -> None:
        busy_s = now_s - self._busy_since_s if self.in_flight else 0.0
        self._busy_since_s = now_s
        self.bytes += size_bytes
        self.busy_s += busy_s
        self._phase.add(size_bytes, busy_s, requests)
        self._window.add(size_bytes, busy_s, requests)


@dataclasses.dataclass(slots=True)
class Tier:
    """One path's traffic, content and share."""

    spec: TierSpec
    reads: Direction
    writes: Direction
    stored_bytes: int = 0  # held, or on its way
    cap: int = 0  # writes it may take in this phase
    taken: int = 0  # writes it took in this phase
    retired: bool = False

    def has_room(self, size_bytes: int) -> bool:
        """Whether a record of this size still fits."""
        capacity = self.spec.capacity_bytes
        return not self.retired and (capacity is None or self.stored_bytes + size_bytes <= capacity)

    def speed(self) -> float:
        """The slower direction's estimate, bytes/s: what was written to a tier is what is read from it next."""
        known = [d.bps for d in (self.reads, self.writes) if d.bps]
        return min(known) if known else 0.0


class Placement:
    """Chooses tiers for writes and reads, and learns their bandwidth."""

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        self.tiers = [Tier(spec, Direction(spec.read_bps), Direction(spec.write_bps)) for spec in specs]
        self._speeds = self.speeds()

    def speeds(self) -> list[float]:
        """Relative speed of each tier; one that is unknown counts as the mean of the known ones."""
        known = [speed for tier in self.tiers if (speed := tier.speed()) > 0]
        unknown = sum(known) / len(known) if known else 1.0
        return [tier.speed() or unknown for tier in self.tiers]

    # -- phases

    def begin_phase(self, writes: int, now_s: float) -> None:
        """Splits the phase's expected writes among the live tiers, at least one each (else it is never measured)."""
        self.end_phase(now_s)
        self._split(writes)

    def extend_phase(self, writes: int) -> None:
        """More writes are expected than the phase began with."""
        self._split(writes + self._left())

    def end_phase(self, now_s: float) -> None:
        """Takes up what the phase showed of each tier's bandwidth."""
        for tier in self.tiers:
            tier.reads.close_phase(now_s)
            tier.writes.close_phase(now_s)
        self._speeds = self.speeds()

    def _left(self) -> int:
        return sum(max(0, tier.cap - tier.taken) for tier in self.tiers if not tier.retired)

    def _split(self, writes: int) -> None:
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
        self._speeds = self.speeds()
        self._split(self._left())

    # -- choices

    def choose_write(self, size_bytes: int) -> int | None:
        """The tier that takes the next record now, or None if none pulls."""
        fitting = [i for i, tier in enumerate(self.tiers) if tier.has_room(size_bytes)]
        free = [i for i in fitting if self.tiers[i].writes.in_flight < QUEUE]
        within = [i for i in free if self.tiers[i].taken < self.tiers[i].cap]
        if within:
            return max(within, key=lambda i: (self.tiers[i].cap - self.tiers[i].taken) / self._speeds[i])
        # every cap is used up (more writes came than were expected, or tiers with room left are full)
        if any(self.tiers[i].taken < self.tiers[i].cap for i in fitting):
            return None
        return min(free, key=lambda i: (self.tiers[i].taken + 1) / self._speeds[i], default=None)

    def can_write(self, size_bytes: int) -> bool:
        """Whether any live tier has room for a record of this size, now or when its queue is shorter."""
        return any(tier.has_room(size_bytes) for tier in self.tiers)

    def choose_read(self, waiting_bytes: dict[int, int], ahead_bytes: dict[int, int]) -> int | None:
        """The tier to read from next.

        One that would idle comes first, then the one that needs longest for all that is to be read from it. What is
        read ahead never queues.

        Args:
          waiting_bytes: by tier, what operations wait for.
          ahead_bytes: by tier, what they will want later.
        """

        def key(i: int) -> tuple[bool, bool, float]:
            reads = self.tiers[i].reads
            left = waiting_bytes.get(i, 0) + ahead_bytes.get(i, 0) + reads.in_flight_bytes
            return reads.in_flight < QUEUE, i in waiting_bytes, left / self._speeds[i]

        idling = [i for i in ahead_bytes if i not in waiting_bytes and self.tiers[i].reads.in_flight < QUEUE]
        return max([*waiting_bytes, *idling], key=key, default=None)

    # -- traffic

    def write_begins(self, tier: int, size_bytes: int, now_s: float) -> None:
        """A write was given to the tier."""
        self.tiers[tier].taken += 1
        self.tiers[tier].stored_bytes += size_bytes
        self.tiers[tier].writes.begin(size_bytes, now_s)

    def write_ends(self, tier: int, size_bytes: int, now_s: float, ok: bool) -> None:
        """A write ended."""
        if self.tiers[tier].writes.end(size_bytes, now_s, ok):
            self._changed()
        if not ok:
            self.forget(tier, size_bytes)

    def read_begins(self, tier: int, size_bytes: int, now_s: float) -> None:
        """A read was given to the tier."""
        self.tiers[tier].reads.begin(size_bytes, now_s)

    def read_ends(self, tier: int, size_bytes: int, now_s: float, ok: bool) -> None:
        """A read ended; what the tier holds of the record is no longer needed if it went well."""
        if self.tiers[tier].reads.end(size_bytes, now_s, ok):
            self._changed()
        if ok:
            self.forget(tier, size_bytes)

    def retire(self, tier: int) -> list[str]:
        """Gives nothing more to the tier; returns the names of those that go on."""
        self.tiers[tier].retired = True
        self._split(self._left() + max(0, self.tiers[tier].cap - self.tiers[tier].taken))
        return [other.spec.name for other in self.tiers if not other.retired]

    def forget(self, tier: int, size_bytes: int) -> None:
        """The tier no longer holds a record of this size."""
        self.tiers[tier].stored_bytes -= size_bytes
