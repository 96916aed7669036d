"""How fast a tier is, measured with the code that training uses: its slots, its backends, its I/O threads.

1. Records of pseudo-random bytes are written to a few rows once, uncounted: in training a record mostly takes over the
   file of one that has moved on, so blocks are not allocated anew.
2. They are written again, in rotation; then read, with their CRC32C compared; then both at once, 1:1.
3. Bandwidth is bytes completed over the time they took, each way. What comes first is left out: devices under a quota
   grant some of it free after they were idle, and connections have to be opened.
4. Latency is the median over single requests of 4 KiB, one after the other, of another array.
5. All of it is removed again, also the directory if it was not there before.

Not measured: other processes on the same device; the device with more requests in flight than training has; what a
cache behind the interface gives away, such as that of a RAID controller or an object store (the rows together are
8 records). The page cache is passed by where the file system has O_DIRECT and the tier is native; elsewhere (tmpfs, some
network file systems, ``io="tensorstore"``) it is part of what is measured, and reads may look better than they are.

What always holds: the memory, the threads and the folder are the probe's own, and gone when a function here returns or
raises. Thread contract: any thread; several probes do not know of each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import errno
import itertools
import logging
import os
import socket
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jax_mlp_offload import errors, native
from jax_mlp_offload.backends import Backend, Place, make_backend
from jax_mlp_offload.backends.folder import free_bytes_at
from jax_mlp_offload.profile import TierProfile, device_of, nearest_parent, profile_name
from jax_mlp_offload.sizes import format_bytes
from jax_mlp_offload.tiers import File, Remote, Tier

_log = logging.getLogger("jax_mlp_offload")
PAGE_BYTES = 4096  # records are multiples of it, as in training
_ROWS = 8
_FILE_DEPTH, _REMOTE_DEPTH = 2, 4  # requests in flight, each way
_BRIEF_BYTES = 4 * 2**20  # most of a record that is moved beside a running step
_SETTLE_S = 0.2  # a quota's slice of 100 ms, and what it grants after idleness
_USABLE = 0.9  # of what is free: directories and metadata take the rest
_LATENCY_LEAST, _LATENCY_MOST = 3, 32  # requests, each way
_WAIT_S = 0.05  # between two looks at ``stop``
_SILENCE_S = 600.0  # without a single end: the store's default deadline
_CLOSE_S = 60.0
_ARRAY = "0-probe/b0.d0"  # as the engine names arrays


class ProbeStoppedError(Exception):
    """``stop`` was set before the probe was through."""


class Phase(enum.Enum):
    """What a probe is doing; the value is for people."""

    PREPARE = "preparing"
    WRITE = "writing"
    READ = "reading"
    MIXED = "reading and writing"
    LATENCY = "single requests"


Progress = Callable[[Phase, float], None]
"""Called often with the phase and the share of the whole probe that is done, from the probe's thread."""


def measure(
    tier: Tier,
    record_bytes: int,
    seconds: float = 3.0,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> TierProfile:
    """Measures a tier.

    It takes about ``4 * seconds``, longer where a few records do; memory for 4 records (a key-value store: 8) and
    storage for 8. Where that much is not free, there are fewer records, then smaller ones: a warning is logged, and the
    profile's ``record_bytes`` says so.

    Args:
      tier: what to measure.
      record_bytes: size of the records, rounded up to 4096.
      seconds: how long to write, to read, and to do both.
      progress: see :data:`Progress`.
      stop: once it is set the probe ends, within 0.1 s and what a block or request takes.

    Raises:
      ValueError: if an argument makes no sense, or the tier cannot be one.
      OSError: if the tier cannot be used.
      RuntimeError: if the system gives no memory.
      errors.TierError: if it refused a record.
      errors.CorruptRecordError: if one came back with other content.
      errors.DeadlineError: if storage gives no answer.
      ProbeStoppedError: if ``stop`` was set.
    """
    _check_arguments(record_bytes, seconds)
    report = _reporter(progress or _ignore)
    depth = _depth(tier)
    with _left_as_found(tier):
        record_bytes, rows = _fit(tier, record_bytes, depth)
        with contextlib.closing(_Traffic(tier, record_bytes, rows, depth, stop)) as traffic:
            traffic.prepare(seconds, report(Phase.PREPARE))
            write_bps = traffic.bandwidths([_Way.WRITE], seconds, report(Phase.WRITE))[_Way.WRITE]
            read_bps = traffic.bandwidths([_Way.READ], seconds, report(Phase.READ))[_Way.READ]
            mixed_bps = min(traffic.bandwidths([_Way.READ, _Way.WRITE], seconds, report(Phase.MIXED)).values())
        with contextlib.closing(_Traffic(tier, PAGE_BYTES, 2, 1, stop)) as traffic:
            told = report(Phase.LATENCY)
            write_latency_s = traffic.latency_s(_Way.WRITE, seconds / 2, lambda share: told(share / 2))
            read_latency_s = traffic.latency_s(_Way.READ, seconds / 2, lambda share: told(0.5 + share / 2))
        return TierProfile(
            name=profile_name(tier),
            read_bps=read_bps,
            write_bps=write_bps,
            mixed_bps=mixed_bps,
            read_latency_s=read_latency_s,
            write_latency_s=write_latency_s,
            record_bytes=record_bytes,
            device=device_of(tier),
            measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            hostname=socket.gethostname(),
        )


def measure_briefly(
    tier: Tier, record_bytes: int, seconds: float = 0.5, stop: threading.Event | None = None
) -> tuple[float, float]:
    """Bytes/s (read, written) while a tier reads and writes 1:1, for use beside a running step.

    4 slots and 4 rows of ``record_bytes`` (a key-value store: 8), at most 4 MiB each, and limits of the tier's own
    beside those of a store's.

    Args:
      tier: what to measure.
      record_bytes: size of a record in use, rounded up to 4096.
      seconds: how long, after the rows were written once.
      stop: as for :func:`measure`.

    Raises:
      Exception: as :func:`measure`.
    """
    _check_arguments(record_bytes, seconds)
    with _left_as_found(tier):
        depth = _depth(tier)
        record_bytes, _ = _fit(tier, min(record_bytes, _BRIEF_BYTES), depth)
        with contextlib.closing(_Traffic(tier, record_bytes, 2 * depth, depth, stop)) as traffic:
            traffic.prepare(seconds, _ignore)
            speeds = traffic.bandwidths([_Way.READ, _Way.WRITE], seconds, _ignore)
            return speeds[_Way.READ], speeds[_Way.WRITE]


def measured_with(tiers: Sequence[Tier]) -> list[int]:
    """For each tier the first that is one path with it: on the same device, by the same mechanism; mostly itself.

    Raises:
      OSError: if a directory may not be looked at.
    """
    first: dict[tuple[str | int | None, ...], int] = {}
    result = []
    for index, tier in enumerate(tiers):
        io = tier.io if isinstance(tier, File) else None
        key = device_of(tier), io, tier.number("read_limit"), tier.number("write_limit")
        result.append(first.setdefault(key, index))
    return result


def check(tier: Tier) -> None:
    """Opens a tier and closes it again; raises what :func:`measure` would if that is impossible."""
    with _left_as_found(tier):
        _Traffic(tier, PAGE_BYTES, 2, 1, None).close()


class _Way(enum.Enum):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class _Transfer:
    way: _Way
    row: int
    slot: int
    begin_s: float  # of native.now_s(), when it was asked for


_Durations = dict[_Way, list[tuple[float, float]]]  # begin and end of each transfer, as they ended


class _Traffic:
    """Records of one size on their way between slots and rows of a tier, up to ``depth`` each way.

    What always holds: a row is written, or read, or neither; a transfer has its slot to itself.
    """

    def __init__(self, tier: Tier, record_bytes: int, rows: int, depth: int, stop: threading.Event | None) -> None:
        self._name = tier.name
        self._record_bytes, self._rows, self._depth = record_bytes, rows, depth
        self._stop = stop
        self._slots = {_Way.WRITE: list(range(depth)), _Way.READ: list(range(depth, 2 * depth))}
        self._crc: dict[int, int] = {}  # of each row that was written
        self._turn = {_Way.WRITE: 0, _Way.READ: rows // 2}  # where to look for the next row
        self._open: dict[int, _Transfer] = {}  # by token
        self._tokens = itertools.count()
        self._backend: Backend | None = None
        self._engine = native.Engine(1)
        try:
            self._engine.add_slots(2 * depth, record_bytes)
            for slot in range(depth):
                _fill(self._engine.slot_view(slot, record_bytes), slot)
            self._check_stop()
            self._backend = make_backend(tier, self._engine)
            self._backend.add_array(_ARRAY, rows, record_bytes)
        except BaseException:
            self.close()
            raise

    def prepare(self, seconds: float, report: Callable[[float], None]) -> None:
        """Writes the rows once; on a slow tier only as many as are needed."""
        self._run([_Way.WRITE], seconds, 2 * self._depth, self._rows, report)
        self._rows = len(self._crc)

    def bandwidths(self, ways: Sequence[_Way], seconds: float, report: Callable[[float], None]) -> dict[_Way, float]:
        """Bytes/s each way; two ways move as many records each."""
        durations = self._run(ways, seconds, self._depth, None, report)
        return {way: self._bandwidth_bps(durations[way]) for way in ways}

    def latency_s(self, way: _Way, seconds: float, report: Callable[[float], None]) -> float:
        """The median of how long one request takes, alone."""
        ends = self._run([way], seconds, _LATENCY_LEAST, _LATENCY_MOST, report)[way]
        return statistics.median(end_s - begin_s for begin_s, end_s in ends)

    def _bandwidth_bps(self, durations: list[tuple[float, float]]) -> float:
        # Counted from one end to the last. ``depth`` requests may well end together, so only every depth-th end is
        # a fair beginning: from another, more bytes would be counted than were moved in the time.
        begin_s, ends = durations[0][0], [end_s for _, end_s in durations]
        starts = range(self._depth - 1, len(ends) - self._depth, self._depth)
        start = next((start for start in starts if ends[start] >= begin_s + _SETTLE_S), None)
        if start is None:  # over too soon for that
            return len(ends) * self._record_bytes / max(ends[-1] - begin_s, 1e-9)
        return (len(ends) - start - 1) * self._record_bytes / max(ends[-1] - ends[start], 1e-9)

    def _run(
        self, ways: Sequence[_Way], seconds: float, least: int, most: int | None, report: Callable[[float], None]
    ) -> _Durations:
        """Starts transfers for so long, at least and at most so many each way, and waits for the last to end."""
        durations: _Durations = {way: [] for way in ways}
        started = dict.fromkeys(ways, 0)
        begin_s = heard_s = native.now_s()
        while True:
            elapsed_s = native.now_s() - begin_s
            for way in ways:
                # neither way gets far ahead of the other: 1:1
                ahead = min(len(durations[other]) for other in ways) + 2 * self._depth if len(ways) > 1 else None
                while self._slots[way] and (elapsed_s < seconds or started[way] < least):
                    if started[way] in (most, ahead):
                        break
                    self._start(way)
                    started[way] += 1
            if not self._open:
                report(1.0)
                return durations
            report(min(elapsed_s / seconds, 1.0))
            if self._take_ends(durations):
                heard_s = native.now_s()
            elif native.now_s() - heard_s > _SILENCE_S:
                raise errors.DeadlineError(f"tier {self._name!r} did not end a transfer within {_SILENCE_S:g} s")

    def _start(self, way: _Way) -> None:
        assert self._backend is not None
        row, slot, token = self._next_row(way), self._slots[way].pop(), next(self._tokens)
        place = Place(_ARRAY, row, self._record_bytes)
        self._open[token] = _Transfer(way, row, slot, native.now_s())
        try:
            if way is _Way.READ:
                self._backend.read(place, slot, self._crc[row], token)
            else:
                self._backend.write(place, slot, token)
        except OSError as error:
            raise errors.TierError(f"tier {self._name!r}: {error}") from error

    def _next_row(self, way: _Way) -> int:
        # there are 2 * depth rows or more, and fewer transfers under way, so one is free
        busy = {transfer.row for transfer in self._open.values()}
        rows = ((self._turn[way] + i) % self._rows for i in range(self._rows))
        row = next(row for row in rows if row not in busy)
        self._turn[way] = (row + 1) % self._rows
        return row

    def _take_ends(self, durations: _Durations) -> bool:
        """Waits a little for transfers to end; whether one has."""
        self._check_stop()
        ends = [event for event in self._engine.wait(_WAIT_S, 256) if native.KINDS[event[0]] in ("read", "written")]
        for _, token, message, error_number, crc, _, _, end_s, *_ in ends:
            transfer = self._open.pop(token)
            if message:
                raise errors.of_transfer(f"tier {self._name!r}: {message}", error_number)
            self._slots[transfer.way].append(transfer.slot)
            if transfer.way is _Way.WRITE:
                self._crc[transfer.row] = crc
            durations[transfer.way].append((transfer.begin_s, end_s))
        return bool(ends)

    def _check_stop(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise ProbeStoppedError(f"the probe of tier {self._name!r} was stopped")

    def close(self) -> None:
        """Ends what is under way and removes what was stored.

        Raises:
          errors.DeadlineError: if storage does not let go of a transfer.
        """

        def stop() -> None:  # on a thread of its own: it may hang in a system call, and keeps what that needs
            if self._backend is not None:
                self._backend.stop()
            self._engine.close()

        closing = threading.Thread(target=stop, name="jmo-probe-close", daemon=True)
        closing.start()
        try:
            closing.join(_CLOSE_S)
        finally:
            if self._backend is not None:
                self._backend.close()
        if closing.is_alive():
            raise errors.DeadlineError(f"tier {self._name!r} did not end a transfer within {_CLOSE_S:g} s")


def _check_arguments(record_bytes: int, seconds: float) -> None:
    if isinstance(record_bytes, bool) or not isinstance(record_bytes, int) or record_bytes < 1:
        raise ValueError(f"record_bytes={record_bytes!r} must be a whole number of at least 1")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"seconds={seconds!r} must be a positive number")


def _depth(tier: Tier) -> int:
    return _REMOTE_DEPTH if isinstance(tier, Remote) else _FILE_DEPTH


def _fit(tier: Tier, record_bytes: int, depth: int) -> tuple[int, int]:
    """Bytes of a record and number of rows, so that they fit what is free there."""
    wanted_bytes = record_bytes = -(-record_bytes // PAGE_BYTES) * PAGE_BYTES
    free = [] if (capacity := tier.number("capacity")) is None else [capacity]
    if isinstance(tier, File):
        found_bytes = free_bytes_at(nearest_parent(tier))
        free += [] if found_bytes is None else [int(found_bytes * _USABLE)]
    free_bytes = min(free, default=_ROWS * record_bytes)
    least_rows = 2 * depth
    if free_bytes < least_rows * record_bytes:
        record_bytes = free_bytes // least_rows // PAGE_BYTES * PAGE_BYTES
        if not record_bytes:
            needed = format_bytes(least_rows * PAGE_BYTES)
            raise OSError(
                errno.ENOSPC,
                f"tier {tier.name!r} cannot be measured: of the {needed} that takes, {format_bytes(free_bytes)} are free",
            )
        _log.warning(
            "tier %r has room for %s only: it is measured with records of %s instead of %s",
            tier.name,
            format_bytes(free_bytes),
            format_bytes(record_bytes),
            format_bytes(wanted_bytes),
        )
    return record_bytes, max(least_rows, min(_ROWS, free_bytes // record_bytes))


@contextlib.contextmanager
def _left_as_found(tier: Tier) -> Iterator[None]:
    """Removes the tier's directory if it was made meanwhile."""
    made = isinstance(tier, File) and not os.path.lexists(tier.path)
    try:
        yield
    finally:
        if made and isinstance(tier, File):
            with contextlib.suppress(OSError):  # others use it by now, or it could not be made
                os.rmdir(tier.path)


def _fill(slot: np.ndarray[tuple[int], np.dtype[np.uint8]], seed: int) -> None:
    """Bytes that no storage can compress or has already, without a second slot's worth of memory."""
    rng = np.random.default_rng([seed, int.from_bytes(os.urandom(8))])
    for begin in range(0, slot.size, 2**20):
        part = slot[begin : begin + 2**20]
        part[:] = np.frombuffer(rng.bytes(part.size), np.uint8)


def _reporter(progress: Progress) -> Callable[[Phase], Callable[[float], None]]:
    """For each phase what takes its share, and tells ``progress`` that of the whole."""
    phases = list(Phase)
    return lambda phase: lambda share: progress(phase, (phases.index(phase) + share) / len(phases))


def _ignore(*_: object) -> None:
    """Nobody wants to know."""
