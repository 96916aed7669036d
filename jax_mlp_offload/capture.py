"""The records of optimizers as they were at one moment, while training goes on.

1. A capture begins between two steps: no operation is open, nothing is in flight.
2. A record on a tier that has hard links is *linked*: what is read later is that file, whatever the record does.
3. Every other record that has something is *held* by the scheduler: an update of it waits until the capture lets it go.
   So whoever reads takes held records first, and lets go of them as soon as he has what he needs.
   Or he has them *set down*: written to files beside the links, at the speed of the tiers.
4. A record that is held and still wanted by an update after the store's deadline is let go: the capture is over, and
   says so to whoever reads on. Training goes on.

What always holds: what ``read`` returns is the record of that moment, checked against its CRC32C if it comes from a tier.
Thread contract: ``begin``, ``check`` and ``end`` on the driver's thread; the rest on any other.
"""

from __future__ import annotations

import itertools
import logging
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
from jax_mlp_offload.types import Life, Record

_log = logging.getLogger("jax_mlp_offload")
_numbers = itertools.count()
_CALL_TIMEOUT_S = 60.0
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
                self._scheduler.placement.tiers[record.tier].files.keep(record.index)
                return
        self.held[key] = record
        self._scheduler.hold(record)

    def check(self, now_s: float) -> None:
        """Lets go of everything if an update has waited for too long."""
        if now_s < self._check_s:
            return
        self._check_s = now_s + _CHECK_S
        if not any(record.wanted_by is not None for record in self.held.values()):
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > self._deadline_s:
            self._lost = errors.DeadlineError(
                f"optimizer {self.name!r}: an update waited for {self._deadline_s:g} s for records that a checkpoint had "
                "not copied yet; the checkpoint was given up. Is its storage slow, or does it hang?"
            )
            self._let_go(list(self.held))

    def _let_go(self, keys: Iterable[Key]) -> None:
        records = [record for key in keys if (record := self.held.pop(key, None)) is not None]
        if records:
            self._scheduler.let_go(records, native.now_s())

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
        if (linked := self.linked.get(key)) is not None:
            self._checked(key, lambda: native.read_file(linked.path, target, linked.crc, self._direct(linked.tier)))
            return
        failed: Place | None = None
        while True:
            place, tier, crc = self._driver.call(lambda: self._copy_or_locate(key, target), _CALL_TIMEOUT_S)
            if place is None:
                return
            if tier is None:
                time.sleep(_RETRY_S)
                continue
            try:
                self._backends[tier].read_now(place, target, crc)
            except RuntimeError as error:
                if failed == place:
                    raise errors.CorruptRecordError(f"{error}; {self._describe(key)}") from error
                failed = place  # it may have been on its way into a slot just then
            else:
                return

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
        return self._scheduler.describe(self._instance.records[key.bucket, key.device][key.subgroup])

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
        free_bytes = backend.free_bytes()
        needed_bytes = sum(record.size_bytes for record in list(self.held.values()))
        retired = self._scheduler.placement.tiers[number].retired
        return not retired and free_bytes is not None and free_bytes > 2 * needed_bytes

    def _set_down(self, tier: int, keys: Sequence[Key]) -> None:
        buffer = np.empty(0, np.uint8)
        for key in keys:
            record = self._instance.records[key.bucket, key.device][key.subgroup]
            path = self._backends[tier].path_to_keep(self._place(record), self._number)
            if path is None:
                return
            if buffer.size != record.size_bytes:
                buffer = native.aligned(record.size_bytes)
            self.read(key, buffer)
            try:
                crc = native.write_file(path, buffer, self._direct(tier))
            except OSError as error:  # whoever reads takes the rest from where they are
                _log.warning("a record was not set down for a checkpoint, an update may wait for it: %s", error)
                return
            self.linked[key] = Linked(path, tier, crc)
            self._written.add(key)
            self.let_go([key])

    def let_go(self, keys: Iterable[Key]) -> None:
        """These records are needed no longer."""
        wanted = [key for key in keys if key in self.held]
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
        self._let_go(list(self.held))
        self._driver.captures.discard(self)
        for tier in {linked.tier for linked in self.linked.values()}:
            self._backends[tier].let_go(self._number)
        for key, linked in self.linked.items():
            if not kept and key not in self._written:
                record = self._instance.records[key.bucket, key.device][key.subgroup]
                self._scheduler.placement.tiers[linked.tier].files.let_go(record.index)
        self.linked.clear()

    def wait(self, timeout_s: float) -> None:
        """Waits until it is closed, so long at most."""
        self._closed.wait(timeout_s)
