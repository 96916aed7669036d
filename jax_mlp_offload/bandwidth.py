"""How fast a storage device is each way, as its traffic shows, and what a tier's traffic was.

1. Bandwidth is bytes per time with at least one request in flight, over one update phase: never bytes per latency of
   single requests, which queueing makes wrong by up to ten times. A phase that was busy for less than 50 ms tells
   nothing alone; it counts together with the next (else a tier that was slow and gets one record a step would never be
   found to be fast again).
2. At the end of a phase a change of more than a tenth is taken as it is; a smaller one is smoothed.
3. Within a phase a change is taken up once two windows in a row agree on it: a single one may be the burst that a
   throttle lets through after a pause.

Pure; no clock of its own: callers give ``now_s``. Used by the scheduler's thread only.
"""

from __future__ import annotations

import dataclasses

_MIN_BUSY_S = 0.05  # shorter phases measure start-up, not bandwidth
_JUMP = 0.10  # a change larger than this is taken at once
_ALPHA = 0.3  # smaller ones are smoothed
_WINDOW_S = 0.2  # busy time of a window within a phase
_WINDOW_REQUESTS = 4  # a window of fewer requests measures their edges
_EDGE_REQUESTS = 8  # that have to end for each that is more in flight at the end of a span than at its start, or less
_WINDOW_JUMP = 0.25  # change on which two windows have to agree


@dataclasses.dataclass(slots=True)
class _Span:
    """Bytes and requests that ended while so much time was busy."""

    in_flight: int = 0  # at its start
    size_bytes: int = 0
    busy_s: float = 0.0
    requests: int = 0

    def add(self, size_bytes: int, busy_s: float, requests: int) -> None:
        self.size_bytes += size_bytes
        self.busy_s += busy_s
        self.requests += requests

    def is_fair(self, in_flight: int) -> bool:
        """Whether what requests in flight had moved at its start and have moved at its end matters little."""
        return self.requests >= _EDGE_REQUESTS * abs(in_flight - self.in_flight)

    @property
    def bps(self) -> float:
        return self.size_bytes / self.busy_s if self.busy_s > 0 else 0.0


@dataclasses.dataclass(slots=True)
class Direction:
    """Requests of one device in one direction, and the bandwidth that they show (``bps``, bytes/s; None: unknown)."""

    bps: float | None
    in_flight: int = 0
    in_flight_bytes: int = 0
    _busy_since_s: float = 0.0
    _phase: _Span = dataclasses.field(default_factory=_Span)
    _window: _Span = dataclasses.field(default_factory=_Span)
    _last_window_bps: float | None = None

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
        window = self._window
        if window.busy_s < _WINDOW_S or window.requests < _WINDOW_REQUESTS or not window.is_fair(self.in_flight):
            return False
        seen, before = window.bps, self._last_window_bps
        self._window, self._last_window_bps = _Span(self.in_flight), seen
        if before is None or abs(seen - before) > _JUMP * before:
            return False
        if self.bps is not None and min(abs(seen - self.bps), abs(before - self.bps)) <= _WINDOW_JUMP * self.bps:
            return False
        self.bps = (seen + before) / 2
        self._phase = _Span(self.in_flight)
        return True

    def abandon(self, size_bytes: int, now_s: float) -> None:
        """A request is waited for no longer. The time that it took tells nothing of what others get."""
        self._add(0, now_s, 0)
        self.in_flight -= 1
        self.in_flight_bytes -= size_bytes
        self._phase, self._window = _Span(self.in_flight), _Span(self.in_flight)
        self._last_window_bps = None

    def close_phase(self, now_s: float) -> None:
        """Takes up what the phase showed."""
        self._add(0, now_s, 0)
        self._window, self._last_window_bps = _Span(self.in_flight), None
        phase = self._phase
        if phase.busy_s < _MIN_BUSY_S:
            return
        self._phase = _Span(self.in_flight)
        if phase.size_bytes > 0 and phase.is_fair(self.in_flight):
            if self.bps is None or abs(phase.bps - self.bps) > _JUMP * self.bps:
                self.bps = phase.bps
            else:
                self.bps += _ALPHA * (phase.bps - self.bps)

    def _add(self, size_bytes: int, now_s: float, requests: int) -> None:
        busy_s = now_s - self._busy_since_s if self.in_flight else 0.0
        self._busy_since_s = now_s
        self._phase.add(size_bytes, busy_s, requests)
        self._window.add(size_bytes, busy_s, requests)


@dataclasses.dataclass(slots=True)
class Traffic:
    """What one tier moved in one direction since the start."""

    requests: int = 0  # that ended well, as all that follows
    bytes: int = 0
    largest_bytes: int = 0
    queue_s: float = 0.0  # sum over requests of the time from being given out to being begun
    busy_s: float = 0.0  # with a request in flight, however it ended
    last_phase_bytes: int = 0  # of the last phase that is over
    _phase_bytes: int = 0
    _in_flight: int = 0
    _since_s: float = 0.0

    @property
    def mean_bps(self) -> float:
        """Bytes per busy second since the start."""
        return self.bytes / self.busy_s if self.busy_s > 0 else 0.0

    @property
    def mean_queue_s(self) -> float:
        """Seconds that a request waited before storage began with it."""
        return self.queue_s / self.requests if self.requests else 0.0

    @property
    def whole_phases_bytes(self) -> int:
        """Bytes of all phases that are over."""
        return self.bytes - self._phase_bytes

    def begin(self, now_s: float) -> None:
        """A request was given out."""
        self._tick(now_s)
        self._in_flight += 1

    def end(self, size_bytes: int, now_s: float, ok: bool, queue_s: float) -> None:
        """A request ended, after having waited for so long."""
        self._tick(now_s)
        self._in_flight -= 1
        if ok:
            self.requests += 1
            self.bytes += size_bytes
            self._phase_bytes += size_bytes
            self.largest_bytes = max(self.largest_bytes, size_bytes)
            self.queue_s += queue_s

    def abandon(self, now_s: float) -> None:
        """A request is waited for no longer."""
        self._tick(now_s)
        self._in_flight -= 1

    def close_phase(self) -> None:
        """A phase is over."""
        self.last_phase_bytes, self._phase_bytes = self._phase_bytes, 0

    def _tick(self, now_s: float) -> None:
        if self._in_flight:
            self.busy_s += now_s - self._since_s
        self._since_s = now_s
