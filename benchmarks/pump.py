"""Measures what tiers can do: moves records through the engine's own I/O, as many bytes out as in, and nothing else.

All tiers are pumped at once, since that is how an update uses them (and two tiers may share a device). Files are made
and written once beforehand. Thread contract: one thread; nothing else should use the tiers meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.limit import Bandwidth
from jax_mlp_offload import native
from jax_mlp_offload.backends.direct import IO_BLOCK_BYTES, IO_THREADS
from jax_mlp_offload.tiers import File

_FILES = 8  # a tier; half are being written or wait to be read
_IN_FLIGHT = 2  # a tier and direction
_WAIT_S = 60.0


@dataclasses.dataclass
class _Tier:
    """One tier's files, by what may be done with them, and the bytes moved in the window."""

    index: int
    folder: pathlib.Path
    full: collections.deque[int] = dataclasses.field(default_factory=collections.deque)  # written, to be read
    empty: collections.deque[int] = dataclasses.field(default_factory=collections.deque)  # read, to be written
    crc: dict[int, int] = dataclasses.field(default_factory=dict)
    reading: int = 0
    writing: int = 0
    moved_bytes: int = 0


def measure_tiers(tiers: Sequence[File], seconds: float = 2.0, record_bytes: int = 16 * 2**20) -> list[Bandwidth]:
    """Bandwidth of each tier, each way, while all of them read and write 1:1.

    Args:
      tiers: where to measure; their limits hold.
      seconds: how long, after the files were made.
      record_bytes: bytes of one transfer, a multiple of 4096.

    Raises:
      OSError: if a transfer fails.
    """
    with contextlib.ExitStack() as stack:
        engine = native.Engine(1)
        stack.callback(engine.close)
        engine.add_slots(_FILES * len(tiers), record_bytes)
        states = []
        for index, tier in enumerate(tiers):
            limits = (tier.number("read_limit") or 0, tier.number("write_limit") or 0)
            engine.add_tier(True, *limits, IO_THREADS, IO_BLOCK_BYTES)
            pathlib.Path(tier.path).mkdir(exist_ok=True)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pump-", dir=tier.path))
            states.append(_Tier(index, pathlib.Path(folder), empty=collections.deque(range(_FILES))))
        _fill(engine, states, record_bytes)
        begin_s = native.now_s()
        end_s = _pump(engine, states, record_bytes, begin_s + seconds)
        each_way = [state.moved_bytes / 2 / (end_s - begin_s) for state in states]
    return [Bandwidth(bps, bps) for bps in each_way]


def bandwidths(tiers: Sequence[tuple[File, Bandwidth | None]]) -> list[Bandwidth]:
    """Those given; all are measured if one is not."""
    given = [bandwidth for _, bandwidth in tiers if bandwidth is not None]
    if len(given) == len(tiers):
        return given
    measured = measure_tiers([file for file, _ in tiers])
    return [bandwidth or found for (_, bandwidth), found in zip(tiers, measured, strict=True)]


def _fill(engine: Any, states: Sequence[_Tier], record_bytes: int) -> None:
    for state in states:
        while state.empty:
            _write(engine, state, record_bytes)
    while any(state.writing for state in states):
        _take(engine, states, record_bytes)
    for state in states:
        state.moved_bytes = 0
        while len(state.empty) < _FILES // 2:
            state.empty.append(state.full.popleft())


def _pump(engine: Any, states: Sequence[_Tier], record_bytes: int, until_s: float) -> float:
    """Returns when the window ended; what was still in flight then does not count."""
    while native.now_s() < until_s:
        for state in states:
            # a file goes round between full and empty, which keeps reads and writes 1:1
            while state.full and state.reading < _IN_FLIGHT:
                file = state.full.popleft()
                state.reading += 1
                slot, crc = _slot(state, file), state.crc[file]
                engine.read(state.index, str(state.folder / str(file)), slot, record_bytes, crc, slot)
            while state.empty and state.writing < _IN_FLIGHT:
                _write(engine, state, record_bytes)
        _take(engine, states, record_bytes)
    end_s: float = native.now_s()
    moved = [state.moved_bytes for state in states]
    while any(state.reading or state.writing for state in states):
        _take(engine, states, record_bytes)
    for state, size_bytes in zip(states, moved, strict=True):
        state.moved_bytes = size_bytes
    return end_s


def _slot(state: _Tier, file: int) -> int:
    return state.index * _FILES + file


def _write(engine: Any, state: _Tier, record_bytes: int) -> None:
    file = state.empty.popleft()
    state.writing += 1
    engine.write(state.index, str(state.folder / str(file)), _slot(state, file), record_bytes, _slot(state, file))


def _take(engine: Any, states: Sequence[_Tier], record_bytes: int) -> None:
    events = engine.wait(_WAIT_S, 64)
    if not events:
        raise TimeoutError(f"storage gave no answer for {_WAIT_S:g} s")
    for kind, token, *rest in events:
        message, error_number, crc = rest[:3]
        if message:
            raise OSError(error_number, message)
        state, file = states[token // _FILES], token % _FILES
        state.moved_bytes += record_bytes
        if native.KINDS[kind] == "read":
            state.reading -= 1
            state.empty.append(file)
        else:
            state.writing -= 1
            state.crc[file] = crc
            state.full.append(file)
