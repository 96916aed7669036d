"""Putting a state that comes from outside in the place of an optimizer's own.

To the scheduler a load is a step that starts afresh (ticket 0), and whose kernel is the caller: each record gets a slot, is
filled in there, and is evicted to the tiers where others need the slot. So memory stays within the slots, and the serial
of that step is the ticket of the new state. A load that fails half-way leaves the optimizer broken, by name.

Thread contract: ``run`` on a thread of the user's; what the driver calls (``update``, ``complete``, ``fail``) on its own.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jax_mlp_offload import errors, native
from jax_mlp_offload.capture import Key
from jax_mlp_offload.driver import Driver
from jax_mlp_offload.scheduler import Scheduler
from jax_mlp_offload.types import POISON, Record

Fill = Callable[[Key, np.ndarray[Any, Any]], None]
"""Fills in a record, uint8 [record_bytes], in place; called on several threads."""

_requests = itertools.count(-1, -1)  # below zero: XLA's are not
_CALL_TIMEOUT_S = 60.0
_THREADS = 2


class Load:
    """See the module's text.

    Args:
      number: of the optimizer.
      driver: of its store.
      scheduler: of its store.
      engine: the native one.
    """

    def __init__(self, number: int, driver: Driver, scheduler: Scheduler, engine: Any) -> None:
        self._number = number
        self._driver, self._scheduler, self._engine = driver, scheduler, engine
        self._updates: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None: it is over
        self._open: set[int] = set()  # requests
        self._ticket = 0
        self._error: errors.OffloadError | None = None

    def run(self, fill: Fill) -> int:
        """Fills in every record; returns the ticket of the state.

        Raises:
          errors.OffloadError: if a record could not be stored, or the store is closed meanwhile.
          Exception: what ``fill`` raised; the optimizer is broken then, until it starts afresh or is loaded again.
        """
        self._driver.call(self._begin, _CALL_TIMEOUT_S)
        filling: list[Future[None]] = []
        with ThreadPoolExecutor(_THREADS, "jmo-load") as threads:
            try:
                while (record := self._updates.get()) is not None:
                    filling.append(threads.submit(self._fill, record, fill))
            except BaseException as error:  # such as Ctrl-C: whoever waits for the records must not wait for ever
                cause = errors.OffloadError(f"its state was not loaded: {type(error).__name__} {error}")
                self._driver.call(lambda: self._break(cause), _CALL_TIMEOUT_S)
                while (record := self._updates.get()) is not None:
                    self._done(record)
                raise
        for each in filling:
            each.result()
        if self._ticket == POISON:
            raise self._error or errors.OffloadError("the state could not be stored")
        return self._ticket

    def _fill(self, record: Record, fill: Fill) -> None:
        try:
            if self._error is None:
                view = self._engine.slot_view(record.slot, record.size_bytes)
                fill(Key(record.bucket, record.device, record.subgroup), view)
        except BaseException as error:
            cause = errors.OffloadError(f"{self._scheduler.describe(record)}: its state was not loaded: {error}")
            self._driver.call(lambda: self._break(cause), _CALL_TIMEOUT_S)
            raise
        finally:
            self._done(record)

    def _done(self, record: Record) -> None:
        self._driver.call(lambda: self._scheduler.update_done(record, (), native.now_s()), _CALL_TIMEOUT_S)

    # -- the driver's thread

    def _begin(self) -> None:
        owner = self._scheduler.instances[self._number]
        run_id = next(_requests)
        for _ in owner.records:
            request = next(_requests)
            self._open.add(request)
            self._driver.loads[request] = self
        if not self._open:
            self._updates.put(None)
        for request, (bucket, device) in zip(sorted(self._open, reverse=True), owner.records, strict=True):
            now_s = native.now_s()
            self._scheduler.arrived(request, self._number, bucket, device, run_id, 0, False, now_s, loads=True)

    def _break(self, cause: errors.OffloadError) -> None:
        if self._error is None:
            self._error = cause
            self._scheduler.fail(self._number, cause, native.now_s())

    def update(self, record: Record) -> None:
        """The record has a slot."""
        self._updates.put(record)

    def complete(self, request: int, ticket: int) -> None:
        """One bucket of one device is over."""
        self._ticket = max(self._ticket, ticket)
        if ticket == POISON and self._error is None:
            self._error = self._scheduler.instances[self._number].error
        self._end(request)

    def fail(self, request: int, message: str) -> None:
        """One bucket of one device was refused."""
        self._ticket = POISON
        self._error = self._error or errors.OffloadError(message)
        self._end(request)

    def abort(self, error: errors.OffloadError) -> None:
        """The driver has ended: nothing more will come."""
        self._ticket, self._error = POISON, error
        self._updates.put(None)

    def _end(self, request: int) -> None:
        self._open.discard(request)
        del self._driver.loads[request]
        if not self._open:
            self._updates.put(None)
