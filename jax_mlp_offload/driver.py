"""The thread between the native engine and the scheduler.

1. Waits for native events (arrivals from XLA, ends of transfers and of kernels) and takes them in batches.
2. Tells the scheduler, with the time; takes its actions; performs each through the native engine.
3. Between batches runs what other threads asked for (``call``), at once or when nothing is in flight.

What always holds: the scheduler, the backends and the records are touched by this thread only (a new optimizer's arrays
are made before it hears of them, and after it has ended the backends are closed). No JAX call is made here
(one that ran a program would deadlock with two devices). If this thread meets an error of its own, every open and
every later operation ends with it, and ``call`` raises it: nothing hangs.
Thread contract: ``call`` and ``stop`` from any thread but this one.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax_mlp_offload import errors, native
from jax_mlp_offload.backends import Backend, Place
from jax_mlp_offload.scheduler import Scheduler
from jax_mlp_offload.types import Complete, Fail, HandBack, Life, Read, Record, Update, Warn, Write

_log = logging.getLogger("jax_mlp_offload")
_BATCH = 256  # events taken at once
_LONGEST_WAIT_S = 1.0  # between two looks at the clock
_RENEWAL_S = 600.0  # between two signs of life to each tier
_SUSPENDED_S = 1.0  # a wait that took so much longer: the process was stopped meanwhile
_Call = tuple[Callable[[], Any], bool, concurrent.futures.Future[Any]]  # what to run, whether when quiescent, for whom


class Loading(Protocol):
    """Whoever hands over operations that are not XLA's: their requests are below zero."""

    def update(self, record: Record) -> None:
        """The record is to be filled in, in its slot; answered by ``update_done``."""

    def complete(self, request: int, ticket: int) -> None:
        """The operation has ended."""

    def fail(self, request: int, message: str) -> None:
        """The operation was refused."""

    def abort(self, error: errors.OffloadError) -> None:
        """The driver has ended: nothing more will come."""


class Watched(Protocol):
    """Whoever holds records and is looked after."""

    def check(self, now_s: float) -> None:
        """Time passed."""

    def suspended(self, duration_s: float) -> None:
        """The whole process stood still for so long."""

    def wait(self, timeout_s: float) -> None:
        """Waits until it is over, on another thread than the driver's."""


class _Ended(NamedTuple):
    """How a transfer ended."""

    message: str  # empty: well
    error_number: int
    crc: int
    begun_s: float
    free_bytes: int | None

    @classmethod
    def of(cls, event: tuple[Any, ...]) -> _Ended:
        """From an event: kind, token, error, errno, crc, size, start_s, end_s, free_bytes (-1: unknown)."""
        _, _, message, error_number, crc, _, begun_s, _, free_bytes = event
        return cls(message, error_number, crc, begun_s, free_bytes if free_bytes >= 0 else None)


class Driver:
    """Runs the scheduler against the native engine. See the module's text.

    Args:
      engine: the native engine.
      scheduler: decides; nobody else may use it from now on.
      backends: of the tiers, in the scheduler's order.
      array_name: the array that holds a record, in every tier.
    """

    def __init__(
        self,
        engine: Any,
        scheduler: Scheduler,
        backends: Sequence[Backend],
        array_name: Callable[[Record], str],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._backends = backends
        self._array_name = array_name
        self.loads: dict[int, Loading] = {}  # by request; this thread's, as the next
        self.captures: set[Watched] = set()
        self._calls: collections.deque[_Call] = collections.deque()
        self._lock = threading.Lock()
        self._stopping = False
        self._phases = 0  # that have begun
        self._renewal_s = 0.0
        self._thread = threading.Thread(target=self._main, name="jmo-driver", daemon=True)
        self._thread.start()

    # -- for other threads

    def call(self, function: Callable[[], Any], timeout_s: float, when_quiescent: bool = False) -> Any:
        """Runs ``function`` on the driver thread and returns what it returns.

        Args:
          function: what to run; it may touch scheduler, records and backends, and must not call JAX.
          timeout_s: how long to wait for it.
          when_quiescent: wait until no operation is open and nothing is in flight.

        Raises:
          errors.DeadlineError: if it could not run in time.
          errors.ClosedError: if the driver has stopped.
          errors.OffloadError: if the driver has failed.
          Exception: what ``function`` raises.
        """
        assert threading.current_thread() is not self._thread
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._stopping:
                raise errors.ClosedError("the store is closed")
            self._calls.append((function, when_quiescent, future))
        self._engine.wake()
        try:
            return future.result(min(timeout_s, threading.TIMEOUT_MAX))
        except concurrent.futures.TimeoutError:
            future.cancel()
            what = "updates and transfers to end" if when_quiescent else "the driver"
            raise errors.DeadlineError(f"waited {timeout_s:g} s for {what}; still open: {self._state()}") from None

    def stop(self) -> None:
        """Ends the thread. Calls that have not run end with ClosedError. Idempotent."""
        with self._lock:
            self._stopping = True
        self._engine.wake()
        self._thread.join()
        for _, _, future in self._calls:
            if future.set_running_or_notify_cancel():  # else its caller no longer waits
                future.set_exception(errors.ClosedError("the store is closed"))
        self._calls.clear()
        self._abort_loads(errors.ClosedError("the store is closed"))

    def _abort_loads(self, error: errors.OffloadError) -> None:
        for load in set(self.loads.values()):
            load.abort(error)
        self.loads.clear()

    def _state(self) -> str:
        # read without the driver, which gives no answer: a guess for a message
        busy = [r for r in self._scheduler.records if r.life in (Life.READING, Life.WRITING, Life.UPDATING)]
        shown = ", ".join(f"{r.life.value} {self._scheduler.describe(r)}" for r in busy[:3])
        return f"{self._engine.open_requests()} operations, {len(busy)} records" + (f" ({shown})" if shown else "")

    # -- the thread

    def _main(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except BaseException as error:
                _log.exception("the driver of jax_mlp_offload failed")
                self._break_down(error)
                return

    def _turn(self) -> None:
        now_s = native.now_s()
        next_s = self._scheduler.next_tick_s()
        timeout_s = _LONGEST_WAIT_S if next_s is None else max(0.0, min(next_s - now_s, _LONGEST_WAIT_S))
        events = self._engine.wait(timeout_s, _BATCH)
        begin_s, now_s = now_s, native.now_s()
        if now_s - begin_s > timeout_s + _SUSPENDED_S:
            stood_still_s = now_s - begin_s - timeout_s
            self._scheduler.suspended(stood_still_s)
            for capture in list(self.captures):
                capture.suspended(stood_still_s)
        for event in events:
            self._tell(event, now_s)
        next_s = self._scheduler.next_tick_s()
        if next_s is not None and next_s <= now_s:
            self._scheduler.tick(now_s)
        if self._phases != self._scheduler.placement.phases:
            self._phases = self._scheduler.placement.phases
            self._begin_phase(now_s)
        if now_s >= self._renewal_s:
            self._renewal_s = now_s + _RENEWAL_S
            for backend in self._backends:
                backend.renew()
        for capture in list(self.captures):
            capture.check(now_s)
        self._perform()
        if self._calls and len(events) < _BATCH:  # they are to see all that happened before they were made
            self._run_calls()

    def _begin_phase(self, now_s: float) -> None:
        for number, (backend, tier) in enumerate(zip(self._backends, self._scheduler.placement.tiers, strict=True)):
            backend.phase_begins(now_s)
            if tier.retired or not tier.files.bounded:
                continue
            try:  # a tier that took nothing for want of room has no transfer that tells of room there is again
                free_bytes = backend.free_bytes()
            except OSError as error:  # the next write to it fails likewise, and retires it
                _log.info("tier %r: %s", backend.name, error)
                continue
            if free_bytes is not None:
                self._scheduler.space_seen(number, free_bytes, now_s)

    def _tell(self, event: tuple[Any, ...], now_s: float) -> None:
        scheduler = self._scheduler
        match native.KINDS[event[0]]:
            case "arrived":
                _, request, instance, bucket, device, run_id, ticket, skip = event
                scheduler.arrived(request, instance, bucket, device, run_id, ticket, skip, now_s)
            case "updated":
                _, index, _, _, adopted, why = event
                self._update_done(scheduler.records[index], adopted, why, now_s)
            case "read":
                self._read_done(scheduler.records[event[1]], _Ended.of(event), now_s)
            case "written":
                self._write_done(scheduler.records[event[1]], _Ended.of(event), now_s)
            case "handed_back":
                scheduler.handed_back(event[1], now_s)
            case "agreed":
                _, mine, instance, device, ticket = event
                scheduler.agreed(instance, device, mine, ticket, now_s)
            case "lost":
                _, instance, bucket, device, run_id, why = event
                record = scheduler.instances[instance].records[bucket, device][0]
                error = errors.AcceleratorError(f"{why}; {scheduler.describe(record)}")
                scheduler.fail(instance, error, now_s, run_id)

    def _update_done(self, record: Record, adopted: list[int], why: str, now_s: float) -> None:
        error = errors.AcceleratorError(f"{why}; {self._scheduler.describe(record)}") if why else None
        self._scheduler.update_done(record, adopted, now_s, error)

    def _read_done(self, record: Record, ended: _Ended, now_s: float) -> None:
        tier = record.tier
        assert tier is not None
        error = self._error(record, ended)
        if error is None:
            self._backends[tier].moved(record.size_bytes)
            self._backends[tier].moved_on(self._place(record))
        self._scheduler.read_done(record, error, now_s, ended.begun_s, ended.free_bytes)

    def _write_done(self, record: Record, ended: _Ended, now_s: float) -> None:
        tier = record.tier
        assert tier is not None
        error = self._error(record, ended)
        if error is None:
            self._backends[tier].moved(record.size_bytes)
        self._scheduler.write_done(record, ended.crc, error, now_s, ended.begun_s, ended.free_bytes)
        if record.tier != tier:  # not there after all; it may well be on its way back from there already
            self._backends[tier].moved_on(self._place(record))

    def _error(self, record: Record, ended: _Ended) -> errors.OffloadError | None:
        if not ended.message:
            return None
        assert record.tier is not None
        name = self._backends[record.tier].name
        text = f"tier {name!r}: {ended.message}; {self._scheduler.describe(record)}"
        return errors.of_transfer(text, ended.error_number)

    def _perform(self) -> None:
        while actions := self._scheduler.take_actions():
            for action in actions:
                match action:
                    case Update(record, request, _) if request < 0:
                        self.loads[request].update(record)
                    case Complete(request, ticket) if request < 0:
                        self.loads[request].complete(request, ticket)
                    case HandBack(request) if request < 0:  # it has no results
                        self._scheduler.handed_back(request, native.now_s())
                    case Fail(request, message) if request < 0:
                        self.loads[request].fail(request, message)
                    case Update(record, request, fresh):
                        self._engine.update(request, record.subgroup, record.slot, fresh, record.index)
                    case Read(record):
                        self._read(record)
                    case Write(record):
                        self._write(record)
                    case Complete(request, ticket):
                        self._engine.complete(request, ticket)
                    case HandBack(request):
                        self._engine.hand_back(request)
                    case Fail(request, message):
                        self._engine.fail(request, f"jax_mlp_offload: {message}")
                    case Warn(category, message):
                        _warn(category, message)

    def _place(self, record: Record) -> Place:
        return Place(self._array_name(record), record.subgroup, record.size_bytes)

    def _read(self, record: Record) -> None:
        assert record.tier is not None
        assert record.slot is not None
        self._backends[record.tier].read(self._place(record), record.slot, record.crc, record.index)

    def _write(self, record: Record) -> None:
        assert record.tier is not None
        assert record.slot is not None
        place = self._place(record)
        for tier, backend in enumerate(self._backends):
            if tier != record.tier:
                backend.moved_on(place)
        try:
            self._backends[record.tier].write(place, record.slot, record.index)
        except OSError as error:
            now_s = native.now_s()
            self._write_done(record, _Ended(str(error), error.errno or 1, 0, now_s, None), now_s)

    def _take_calls(self) -> collections.deque[_Call]:
        with self._lock:
            calls, self._calls = self._calls, collections.deque()
        return calls

    def _run_calls(self) -> None:
        for function, when_quiescent, future in self._take_calls():
            if when_quiescent and not self._scheduler.quiescent:
                with self._lock:
                    self._calls.append((function, when_quiescent, future))
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
        self._perform()

    def _break_down(self, error: BaseException) -> None:
        """Goes on only to end what comes, with the error."""
        message = f"jax_mlp_offload: internal error of the driver: {error!r}; please report it with the log"
        self._engine.fail_all(message)
        self._abort_loads(errors.OffloadError(message))
        while not self._stopping:
            self._engine.wait(_LONGEST_WAIT_S, _BATCH)
            self._engine.fail_all(message)
            for _, _, future in self._take_calls():
                if future.set_running_or_notify_cancel():
                    future.set_exception(errors.OffloadError(message))


def _warn(category: type[Warning], message: str) -> None:
    _log.warning(message)
    # where the user turned warnings into errors this thread has nobody to raise to, and the log has it
    with contextlib.suppress(Warning):
        warnings.warn(message, category, stacklevel=2)
