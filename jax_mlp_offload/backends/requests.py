"""Requests to a key-value store: so many at once, so fast, so often again.

1. A request waits for one of the tier's connections and begins.
2. It ends when TensorStore has an answer *and* uses the request's memory no more. What happens to one that has no answer
   in time, or is cancelled, is the caller's choice (:class:`Silence`).
3. A request that failed for a passing reason is tried again after a random pause, which grows.

What always holds: ``run`` returns, or raises anything but :class:`StillHeldError`, only when TensorStore touches the
request's memory no more. A request that may still be carried out keeps its connection until ``end_lingering``, so a
store never sees more than it should; and where all connections are taken so, whoever waits for one is told. Thread
contract: the event loop's thread, but for ``facts``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import errno
import functools
import os
import queue
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from typing import Any

import numpy as np

from jax_mlp_offload import native
from jax_mlp_offload.backends.answers import Answer, RequestError, Verdict, classify

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_HOUSEKEEPING_RETRIES = 2
_SILENT_RETRIES = 2  # a store that says nothing is dead sooner than one that says it is busy
_BURST_S = 0.002  # as ffi/core/token_bucket.h


class Silence(enum.Enum):
    """What happens to a request that is cancelled, or has no answer in time and so is tried again."""

    CANCEL = "cancel"
    """It is cancelled. A read lets go of its memory at once then; a write only when its HTTP request is over, which is
    waited for, however long it takes."""

    LINGER = "linger"
    """It goes on: for a write or a delete, which may be carried out yet, and must not meet a later one."""


class StillHeldError(Exception):
    """The request was left behind: TensorStore may still touch its memory."""


class _Messenger:
    """A thread that tells event loops of memory that TensorStore has let go of; one a process, which no store ends."""

    def __init__(self) -> None:
        self._gone: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()
        self.put = self._gone.put  # C all through
        threading.Thread(target=self._tell, name="jax_mlp_offload-messenger", daemon=True).start()

    def _tell(self) -> None:
        while True:
            loop, gone = self._gone.get()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(gone.set)


@functools.cache
def _messenger() -> _Messenger:
    return _Messenger()


os.register_at_fork(after_in_child=_messenger.cache_clear)  # its thread is the parent's


class Held:
    """The bytes of one request, and when TensorStore has let go of them.

    TensorStore keeps a reference to the array that it was given until it is done with the memory. So ``part`` must be an
    object of its own that nobody else refers to.
    """

    def __init__(self, part: np.ndarray[Any, Any]) -> None:
        self._gone = asyncio.Event()
        # no weakref.finalize: that goes silent as soon as the interpreter ends, when stores are still to be closed.
        # No function of Python's either: TensorStore may drop the reference with a lock of its own that another thread
        # wants, and that one may be given the interpreter as soon as any bytecode runs here
        told = functools.partial(_messenger().put, (asyncio.get_running_loop(), self._gone))
        self._part = weakref.ref(part, told)

    async def let_go(self) -> None:
        """Waits until the memory is free."""
        await self._gone.wait()


@dataclasses.dataclass(slots=True)
class Begun:
    """A request that is under way."""

    future: Any  # TensorStore's
    held: Held | None = None


class Limit:
    """A smooth bandwidth limit, as a device of that bandwidth would give it; see ``ffi/core/token_bucket.h``.

    Args:
      rate_bps: bytes/s; None: no limit.
    """

    def __init__(self, rate_bps: float | None) -> None:
        self._rate_bps = rate_bps
        self._free_s = 0.0  # the imagined device is booked up to here

    @contextlib.asynccontextmanager
    async def paid(self, size_bytes: int) -> AsyncIterator[None]:
        """Books the bytes, waits for their time, and after the transfer until that time is over.

        One that failed has used its bandwidth all the same: another attempt books anew.
        """
        if self._rate_bps is None:
            yield
            return
        begin_s = max(self._free_s, native.now_s() - _BURST_S)
        end_s = self._free_s = begin_s + size_bytes / self._rate_bps
        await asyncio.sleep(max(0.0, begin_s - native.now_s()))
        yield
        await asyncio.sleep(max(0.0, end_s - native.now_s()))


class Requests:
    """All requests of one tier; see the module's text.

    Args:
      connections: most requests under way at once.
      timeout_s: how long one may take; None: as long as it takes.
      retries: how often one is tried again.
      scrub: takes secrets out of a text.
    """

    def __init__(self, connections: int, timeout_s: float | None, retries: int, scrub: Callable[[str], str]) -> None:
        self.most = connections
        self._connections = asyncio.Semaphore(connections)
        self._timeout_s = timeout_s
        self._retries = retries
        self._scrub = scrub
        self._lingering: dict[asyncio.Task[None], Hashable] = {}  # and which place each concerns
        self.abandoning = False  # memory that is not let go of is waited for no longer
        self.begun = 0
        self.retried = 0
        self.timed_out = 0
        self.paused_s = 0.0

    def facts(self) -> dict[str, Any]:
        """Counts so far. Any thread."""
        return {
            "requests": self.begun,
            "retries": self.retried,
            "timeouts": self.timed_out,
            "retry_wait_s": self.paused_s,
        }

    def lingering(self, place: Hashable) -> list[asyncio.Task[None]]:
        """Requests of a place that were given up, but may be carried out yet; each task ends when its request does."""
        return [task for task, concerned in self._lingering.items() if concerned == place]

    async def end_lingering(self, timeout_s: float) -> int:
        """Waits so long for all of them, and then no longer; returns how many may be carried out yet."""
        if not self._lingering:
            return 0
        _, pending = await asyncio.wait(list(self._lingering), timeout=timeout_s)
        for task in pending:
            task.cancel()
        return len(pending)

    async def run(
        self,
        what: str,
        begin: Callable[[], Begun],
        *,
        housekeeping: bool = False,
        silence: Silence = Silence.CANCEL,
        place: Hashable = None,
        pay: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> Any:
        """Sends a request until it succeeds.

        Args:
          what: ``"read of s3://..."``, for messages.
          begin: starts one attempt.
          housekeeping: nobody needs the result much: try again a few times at most, and never what had no answer.
          silence: what happens to an attempt that has no answer in time.
          place: that the request concerns, for ``lingering``.
          pay: is entered for each attempt; see :meth:`Limit.paid`.

        Returns:
          What TensorStore's future holds.

        Raises:
          RequestError: if it failed for good.
          StillHeldError: if it was left behind.
        """
        most = min(self._retries, _HOUSEKEEPING_RETRIES) if housekeeping else self._retries
        left = {Verdict.AGAIN: most, Verdict.NO_ANSWER: 0 if housekeeping else min(most, _SILENT_RETRIES)}
        tries = 0
        while True:
            tries += 1
            try:
                async with pay():
                    return await self._connect_and_send(begin, silence, place)
            except RequestError as error:
                answer = error.answer
            if left.get(answer.verdict, 0) == 0:
                told = f"; tried {tries} times" if tries > 1 else ""
                raise RequestError(dataclasses.replace(answer, text=answer.text + told), what)
            left[answer.verdict] -= 1
            pause_s = random.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (tries - 1)))
            self.retried += 1
            self.paused_s += pause_s
            await asyncio.sleep(pause_s)

    async def _connect_and_send(self, begin: Callable[[], Begun], silence: Silence, place: Hashable) -> Any:
        await self._connect()
        lingers = False
        try:
            self.begun += 1
            begun = self._begin(begin)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await _answered(begun.future)
            except TimeoutError:
                self.timed_out += 1
                raise self._silent(f"no answer within {self._timeout_s:g} s") from None
            finally:  # whatever happened, the memory comes first
                if not begun.future.done():
                    if silence is Silence.LINGER:
                        lingers = True
                        self._linger(begun.future, place)
                    else:
                        begun.future.cancel()
                failure, result = (None, None) if lingers else _outcome(begun.future)
                begun.future = None  # it may refer to the memory
                await self._let_go(begun.held)
            if failure is not None:
                raise RequestError(classify(failure, self._scrub), "")
            return result
        finally:
            if not lingers:
                self._connections.release()

    async def _connect(self) -> None:
        """Waits for a connection, but not for ever where none of them has an answer."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._connections.acquire()
                return
            except TimeoutError:
                if len(self._lingering) >= self.most:
                    raise self._silent(f"none of {self.most} connections has an answer") from None

    def _silent(self, text: str) -> RequestError:
        return RequestError(Answer(Verdict.NO_ANSWER, errno.ETIMEDOUT, text), "")

    def _begin(self, begin: Callable[[], Begun]) -> Begun:
        try:
            return begin()
        except Exception as error:  # TensorStore refuses the request itself
            raise RequestError(classify(error, self._scrub), "") from None

    def _linger(self, future: Any, place: Hashable) -> None:
        """Keeps the connection until the request is over."""

        async def wait() -> None:
            try:
                await _answered(future)
            finally:
                future.cancel()

        def over(task: asyncio.Task[None]) -> None:
            del self._lingering[task]
            self._connections.release()

        task = asyncio.ensure_future(wait())
        self._lingering[task] = place
        task.add_done_callback(over)

    async def _let_go(self, held: Held | None) -> None:
        """Waits until TensorStore uses the memory no more; a cancellation has to wait too."""
        if held is None:
            return
        cancelled = False
        while True:
            try:
                await held.let_go()
                break
            except asyncio.CancelledError:
                if self.abandoning:
                    raise StillHeldError from None
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError


async def _answered(future: Any) -> None:
    """Waits for a future of TensorStore, which ends on a thread of its own. Cancelling the wait leaves it alone."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()


def _outcome(future: Any) -> tuple[BaseException | None, Any]:
    """Why a future has failed, or None and its result; (None, None) for one that is not done."""
    if not future.done():
        return None, None
    try:
        return None, future.result()
    except BaseException as error:  # CancelledError too, which here is none of this task
        return error.with_traceback(None), None


async def all_of(parts: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Runs coroutines at once, and ends when all of them have: memory is free only then.

    Raises:
      StillHeldError: if one was left behind; else the first error; else CancelledError, if this was cancelled.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    cancelled = False
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            cancelled = True
            for task in tasks:
                task.cancel()
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    errors.sort(key=lambda error: not isinstance(error, StillHeldError))
    if errors:
        raise errors[0]
    if cancelled or any(task.cancelled() for task in tasks):
        raise asyncio.CancelledError
