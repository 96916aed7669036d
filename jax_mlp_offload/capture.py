"""The records of optimizers as they were at one moment, while training goes on.

1. A capture begins between two steps: no operation is open, nothing is in flight.
2. A record on a tier that has hard links is *linked*: what is read later is that file, whatever the record does.
3. Every other record that has something is *held* by the scheduler: an update of it waits until the capture lets it go.
   So whoever reads takes held records first, and lets go of them as soon as he has what he needs.
   Or he has them *set down*: written to files beside the links, at the speed of the tiers.
4. Where an update still waits for such a record, or for room that only links take up, after the store's deadline, all is
   let go: the capture is over, and says so to whoever reads on. Training goes on.

What always holds: what ``read`` returns is the record of that moment, checked against its CRC32C if it comes from a tier.
Thread contract: ``begin``, ``check`` and ``end`` on the driver's thread; the rest on any other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jax_mlp_offload import errors, native
from jax_mlp_offload.backends import Backend, Place
from jax_mlp_offload.driver import Driver
from jax_mlp_offload.instances import Instance
from jax_mlp_offload.scheduler import Scheduler
from jax_mlp_offload.space import Files
from jax_mlp_offload.types import Life, Record

_log = logging.getLogger("jax_mlp_offload")
_numbers = itertools.count()
_CALL_TIMEOUT_S = 60.0
UNUSED_S = 30.0  # for a checkpoint that never began to be written, since its storage failed before
_CHECK_S = 0.5  # between two looks at what waits
_RETRY_S = 0.005  # between two looks at a record that is on its way
Bytes = np.ndarray[Any, Any]


class Key(NamedTuple):
    """A record of an optimizer."""

    bucket: int
    device: int  # its ordinal
    subgroup: int


class Linked(NamedTuple):
    """A file that holds a record."""

    path: str
    tier: int
    crc: int


class Capture:
    """See the module's text.

    Args:
      instance: the optimizer.
      driver: of its store.
      scheduler: of its store.
      backends: of its store's tiers.
      engine: the native one.
      array_name: the array that holds a record, in every tier.
      deadline_s: how long an update may wait for records that are held.
    """

    def __init__(
        self,
        instance: Instance,
        driver: Driver,
        scheduler: Scheduler,
        backends: Sequence[Backend],
        engine: Any,
        array_name: Callable[[Record], str],
        deadline_s: float,
    ) -> None:
        self.name = instance.name
        self.linked: dict[Key, Linked] = {}
        self.held: dict[Key, Record] = {}
        self._number = next(_numbers)
        self._instance = instance
        self._driver, self._scheduler, self._backends, self._engine = driver, scheduler, backends, engine
        self._array_name = array_name
        self._deadline_s = deadline_s
        self._since_s: float | None = None  # when an update was first seen to wait
        self._stored: set[Key] = set()  # all that were taken hold of
        self._in_use = False  # whether anything was read
        self._check_s = 0.0  # when to look again
        self._written: set[Key] = set()  # of those linked, whose files are no links
        self._lost: errors.OffloadError | None = None
        self._closed = threading.Event()

    # -- the driver's thread

    def begin(self) -> None:
        """Takes hold of every record; the store is between two steps.

        Raises:
          errors.OffloadError: if the optimizer's last update failed.
        """
        if self._instance.error is not None:
            raise self._instance.error
        for (bucket, device), row in self._instance.records.items():
            for record in row:
                if not record.void and record.life is not Life.ABSENT:
                    self._take(Key(bucket, device, record.subgroup), record)

    def _take(self, key: Key, record: Record) -> None:
        self._stored.add(key)
        if record.life is Life.STORED:
            assert record.tier is not None
            path = self._backends[record.tier].keep(self._place(record), self._number)
            if path is not None:
                self.linked[key] = Linked(path, record.tier, record.crc)
                self._files(record.tier).keep(record.index, self._number)
                return
        self.held[key] = record
        self._scheduler.hold(record)

    def check(self, now_s: float) -> None:
        """Lets go of everything if an update has waited for too long."""
        if now_s < self._check_s:
            return
        self._check_s = now_s + _CHECK_S
        if not self._is_waited_for():
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > (longest_s := self.patience_s):
            self._lost = errors.DeadlineError(
                f"optimizer {self.name!r}: an update waited for {longest_s:g} s for records or room that a checkpoint still "
                "had; the checkpoint was given up. Is its storage slow, or does it hang?"
            )
            self._let_go([*self.held, *self.linked])
            self._driver.captures.discard(self)

    @property
    def patience_s(self) -> float:
        """How long others wait for it: not for long where nobody ever began to read."""
        return self._deadline_s if self._in_use else min(self._deadline_s, UNUSED_S)

    def suspended(self, duration_s: float) -> None:
        """The whole process stood still for so long."""
        if self._since_s is not None:
            self._since_s += duration_s

    def _is_waited_for(self) -> bool:
        """Whether an update cannot go on, and may be able to once this lets go."""
        if self.linked and self._scheduler.is_blocked:
            return True
        devices = {record.device for record in self.held.values()}
        return any(record.wanted_by is not None for record in self.held.values()) or any(
            self._scheduler.devices[device].waiting for device in devices
        )

    def _let_go(self, keys: Iterable[Key]) -> None:
        """Records are updated again, and links that were made for this are removed."""
        tiers = set()
        for key in list(keys):
            if (linked := self.linked.pop(key, None)) is None:
                continue
            tiers.add(linked.tier)
            with contextlib.suppress(FileNotFoundError):  # the tier's folder is gone, and all of it
                os.unlink(linked.path)
            if key not in self._written:
                self._files(linked.tier).let_go(self._record(key).index, self._number)
        self._release(keys)
        for tier in tiers:
            if (free_bytes := self._backends[tier].free_bytes()) is not None:
                self._scheduler.space_seen(tier, free_bytes, native.now_s())

    def _release(self, keys: Iterable[Key]) -> None:
        """Held records are updated again."""
        records = [record for key in keys if (record := self.held.pop(key, None)) is not None]
        self._scheduler.let_go(records, native.now_s())

    def _files(self, tier: int) -> Files:
        return self._scheduler.placement.tiers[tier].files

    def _record(self, key: Key) -> Record:
        return self._instance.records[key.bucket, key.device][key.subgroup]

    def _place(self, record: Record) -> Place:
        return Place(self._array_name(record), record.subgroup, record.size_bytes)

    # -- any other thread

    def has(self, key: Key) -> bool:
        """Whether anything is stored for this record (else moments and remainders are zero)."""
        return key in self._stored

    def read(self, key: Key, target: Bytes) -> None:
        """Copies a record that ``has`` something into uint8 ``[record_bytes]``.

        Raises:
          errors.CorruptRecordError: if it cannot be read as it was written.
          errors.DeadlineError: if it had to be let go before.
          errors.ClosedError: if the store was closed meanwhile.
        """
        self._in_use = True
        if (linked := self.linked.get(key)) is not None:
            self._checked(key, lambda: native.read_file(linked.path, target, linked.crc, self._direct(linked.tier)))
            return
        failed: Place | None = None
        until_s = time.monotonic() + self._deadline_s
        while time.monotonic() < until_s:
            place, tier, crc = self._driver.call(lambda: self._copy_or_locate(key, target), _CALL_TIMEOUT_S)
            if place is None:
                return
            if tier is None:
                time.sleep(_RETRY_S)
                continue
            try:
                self._backends[tier].read_now(place, target, crc)
            except (RuntimeError, KeyError) as error:
                if failed == place:
                    raise errors.CorruptRecordError(f"{error}; {self._describe(key)}") from error
                failed = place  # it may have been on its way into a slot just then
            else:
                return
        raise errors.DeadlineError(
            f"{self._describe(key)} was on its way for {self._deadline_s:g} s: its tier gives no answer"
        )

    def _checked(self, key: Key, read: Callable[[], None]) -> None:
        try:
            read()
        except RuntimeError as error:
            raise errors.CorruptRecordError(f"{error}; {self._describe(key)}") from error

    def _copy_or_locate(self, key: Key, target: Bytes) -> tuple[Place | None, int | None, int]:
        """On the driver's thread: copies a record that is in a slot; else says where it is, or (no tier) that it moves."""
        record = self.held.get(key)
        if record is None:
            raise self._lost or errors.OffloadError(f"{self._describe(key)} was let go before it was read")
        if record.life in (Life.READY, Life.DIRTY):
            self._engine.copy_slot(record.slot, target)
            return None, None, 0
        if record.life is Life.STORED:
            return self._place(record), record.tier, record.crc
        return self._place(record), None, 0

    def _direct(self, tier: int) -> bool:
        number = getattr(self._backends[tier], "number", None)
        return number is not None and bool(self._engine.direct_in_use(number))

    def _describe(self, key: Key) -> str:
        return self._scheduler.describe(self._record(key))

    def set_down(self) -> None:
        """Writes held records to a tier, as far as there is one with room, so that updates of them go on."""
        tiers = [number for number, backend in enumerate(self._backends) if self._takes(number, backend)]
        if not tiers:
            return
        queues = [list(self.held)[i :: len(tiers)] for i in range(len(tiers))]
        with ThreadPoolExecutor(len(tiers), "jmo-set-down") as threads:
            list(threads.map(self._set_down, tiers, queues))

    def _takes(self, number: int, backend: Backend) -> bool:
        """Whether a tier has room for all that is held, twice."""
        try:
            free_bytes = backend.free_bytes()
        except OSError as error:  # its next transfer fails likewise, and retires it
            _log.info("tier %r: %s", backend.name, error)
            return False
        needed_bytes = sum(record.size_bytes for record in list(self.held.values()))
        retired = self._scheduler.placement.tiers[number].retired
        return not retired and free_bytes is not None and free_bytes > 2 * needed_bytes

    def _set_down(self, tier: int, keys: Sequence[Key]) -> None:
        buffer = np.empty(0, np.uint8)
        for key in keys:
            record = self._record(key)
            if buffer.size != record.size_bytes:
                buffer = native.aligned(record.size_bytes)
            self.read(key, buffer)
            try:
                path = self._backends[tier].path_to_keep(self._place(record), self._number)
                if path is None:
                    return
                crc = native.write_file(path, buffer, self._direct(tier))
            except OSError as error:  # whoever reads takes the rest from where they are
                _log.warning("a record was not set down for a checkpoint, an update may wait for it: %s", error)
                return
            self.linked[key] = Linked(path, tier, crc)
            self._written.add(key)
            self._driver.call(functools.partial(self._release, [key]), _CALL_TIMEOUT_S)

    def let_go(self, keys: Iterable[Key]) -> None:
        """These records are needed no longer."""
        wanted = [key for key in keys if key in self.held or key in self.linked]
        if wanted:
            self._driver.call(lambda: self._let_go(wanted), _CALL_TIMEOUT_S)

    def close(self, kept: bool = False) -> None:
        """Lets go of all that is left, and removes the links. Idempotent.

        Args:
          kept: whether linked files have got links that stay.
        """
        if self._closed.is_set():
            return
        try:
            self._driver.call(lambda: self.end(kept), _CALL_TIMEOUT_S)
        finally:
            self._closed.set()

    def end(self, kept: bool = False) -> None:
        """The same on the driver's thread."""
        self._driver.captures.discard(self)
        if kept:
            for key in self.linked.keys() - self._written:
                self._files(self.linked[key].tier).stays(self._record(key).index, self._number)
            self.linked.clear()
        self._let_go([*self.held, *self.linked])
        for backend in self._backends:
            backend.let_go(self._number)

    def wait(self, timeout_s: float) -> None:
        """Waits until it is closed, so long at most."""
        self._closed.wait(min(timeout_s, self.patience_s))
