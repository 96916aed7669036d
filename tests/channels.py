"""Modelled storage devices: how long requests take, and which files there are, under the simulator's clock.

A channel serves requests of one device one after another or all at once with shared bandwidth, which may change at
given times; or as a throttle does, in slices of time. A ``Disk`` keeps the files as ``backends.folder`` does.
"""

from __future__ import annotations

import abc
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from tests.worlds import TierModel


class Clock(Protocol):
    """What a channel needs of the simulation."""

    now_s: float

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Calls ``event`` at that time."""


@dataclasses.dataclass(eq=False)
class Job:
    """Bytes that a channel moves."""

    left_bytes: float
    reading: bool
    done: Callable[[], None]


class Channel(abc.ABC):
    """A server of bytes, both ways or one."""

    def __init__(self, clock: Clock, read_bps: float, write_bps: float) -> None:
        self._clock = clock
        self._bps = {True: read_bps, False: write_bps}

    def set_bps(self, read_bps: float, write_bps: float) -> None:
        """Other bandwidths from now on."""
        self._bps = {True: read_bps, False: write_bps}

    @abc.abstractmethod
    def submit(self, size_bytes: int, reading: bool, done: Callable[[], None]) -> None:
        """Moves bytes, then calls ``done``."""


class Smooth(Channel):
    """Serves one after another (``fifo``), or all at once with shared bandwidth."""

    def __init__(self, clock: Clock, read_bps: float, write_bps: float, fifo: bool) -> None:
        super().__init__(clock, read_bps, write_bps)
        self._fifo = fifo
        self._jobs: list[Job] = []
        self._since_s = 0.0
        self._version = 0

    def set_bps(self, read_bps: float, write_bps: float) -> None:
        self._advance()
        super().set_bps(read_bps, write_bps)
        self._plan()

    def submit(self, size_bytes: int, reading: bool, done: Callable[[], None]) -> None:
        self._advance()
        self._jobs.append(Job(size_bytes, reading, done))
        self._plan()

    @property
    def _served(self) -> list[Job]:
        return self._jobs[:1] if self._fifo else self._jobs

    def _advance(self) -> None:
        served = self._served
        for job in served:
            job.left_bytes -= (self._clock.now_s - self._since_s) * self._bps[job.reading] / len(served)
        self._since_s = self._clock.now_s

    def _plan(self) -> None:
        self._version += 1
        version = self._version
        if served := self._served:
            least_s = max(0.0, min(job.left_bytes / self._bps[job.reading] for job in served))
            self._clock.at(self._clock.now_s + least_s * len(served), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        done = [job for job in self._served if job.left_bytes < 1e-3]
        self._jobs = [job for job in self._jobs if job not in done]
        self._plan()
        for job in done:
            job.done()


class Sliced(Channel):
    """Serves as blkio's throttle: what a slice of time allows passes at its start; one is free after idling as long."""

    def __init__(self, clock: Clock, read_bps: float, write_bps: float, slice_s: float) -> None:
        super().__init__(clock, read_bps, write_bps)
        self._slice_s = slice_s
        self._jobs: list[Job] = []
        self._slice_end_s = -1.0
        self._left_s = 0.0  # of the slice
        self._waiting = False

    def submit(self, size_bytes: int, reading: bool, done: Callable[[], None]) -> None:
        self._jobs.append(Job(size_bytes, reading, done))
        if not self._waiting:
            if self._clock.now_s >= self._slice_end_s:
                self._grant()
            self._serve()

    def _grant(self) -> None:
        self._slice_end_s, self._left_s = self._clock.now_s + self._slice_s, self._slice_s

    def _serve(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            passed_s = min(self._left_s, job.left_bytes / self._bps[job.reading])
            self._left_s -= passed_s
            job.left_bytes -= passed_s * self._bps[job.reading]
            if job.left_bytes >= 1e-3:
                self._waiting = True
                self._clock.at(self._slice_end_s, self._next_slice)
                return
            self._clock.at(self._clock.now_s, self._jobs.pop(0).done)

    def _next_slice(self) -> None:
        self._waiting = False
        self._grant()
        self._serve()


def make_channels(clock: Clock, model: TierModel) -> tuple[Channel, Channel]:
    """The channels that a device reads and writes through; the same one twice if one budget serves both."""

    def make() -> Channel:
        if model.slice_s:
            channel: Channel = Sliced(clock, model.read_bps, model.write_bps, model.slice_s)
        else:
            channel = Smooth(clock, model.read_bps, model.write_bps, model.fifo)
        for time_s, read_bps, write_bps in model.changes:
            clock.at(time_s, lambda read_bps=read_bps, write_bps=write_bps: channel.set_bps(read_bps, write_bps))
        return channel

    reads = make()
    return reads, make() if model.duplex else reads


class Disk:
    """A file system: what is free, and the files of its tiers. A record takes over one of its size, as a folder does."""

    def __init__(self, free_bytes: int | None) -> None:
        self.free_bytes = free_bytes
        self._owned: set[tuple[int, int]] = set()  # (tier, record)
        self._spare: Counter[tuple[int, int]] = Counter()  # by (tier, size)

    def take(self, size_bytes: int) -> None:
        """Somebody takes space (or gives it back, if negative)."""
        if self.free_bytes is not None:
            self.free_bytes = max(0, self.free_bytes - size_bytes)

    def write(self, tier: int, record: int, size_bytes: int) -> bool:
        """Makes room for a record; false if there is none."""
        if (tier, record) not in self._owned:
            if self._spare[tier, size_bytes]:
                self._spare[tier, size_bytes] -= 1
            elif self.free_bytes is not None and self.free_bytes < size_bytes:
                return False
            else:
                self.take(size_bytes)
            self._owned.add((tier, record))
        return True

    def moved_on(self, tier: int, record: int, size_bytes: int) -> None:
        """The record lives elsewhere now."""
        if (tier, record) in self._owned:
            self._owned.remove((tier, record))
            self._spare[tier, size_bytes] += 1
