"""An asyncio event loop on a thread of its own, and a thread that computes for it.

What always holds: the loop's thread waits for nothing but events; whoever hands over work is not kept, and whoever waits
in ``run`` waits no longer than until the loop is closed. The threads are daemons, and no executor is used: those refuse
work once the interpreter ends, when stores are still to be closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_STOP_S = 5.0  # until the threads have ended
_CANCEL_S = 1.0  # of that for the tasks that are left


class Loop:
    """See the module's text. Thread contract: ``spawn``, ``run`` and ``close`` from any thread but the loop's."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps none alive
        self._lock = threading.Lock()  # of the next two
        self._closed = False
        self._waited_for: set[concurrent.futures.Future[Any]] = set()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name=name, daemon=True),
            threading.Thread(target=self._compute, name=f"{name}-crc", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def spawn(self, make: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Starts ``make(*args)`` on the loop, in the order of the calls."""
        self._loop.call_soon_threadsafe(self.start, make(*args))

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """The same from the loop's thread; returns the task."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls ``function(*args)`` on the loop's thread, in the order of the calls."""
        self._loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """Runs a coroutine on the loop and returns its result.

        Raises:
          TimeoutError: if that takes longer than ``timeout_s``; the coroutine is cancelled.
          concurrent.futures.CancelledError: if it was cancelled, or the loop is closed.
          Exception: what it raises.
        """
        with self._lock:
            if self._closed:
                coroutine.close()
                raise concurrent.futures.CancelledError
            future = asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop)
            self._waited_for.add(future)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._waited_for.discard(future)

    async def _tracked(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await coroutine

    async def aside(self, function: Callable[..., _T], *args: Any) -> _T:
        """What ``function(*args)`` returns, computed on another thread, which is not told of a cancellation."""
        future: asyncio.Future[_T] = self._loop.create_future()
        self._jobs.put((functools.partial(function, *args), future))
        return await future

    async def cancel(self, timeout_s: float) -> int:
        """Cancels every task but the one that calls; returns how many have not ended within ``timeout_s``."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        return len((await asyncio.wait(tasks, timeout=timeout_s))[1]) if tasks else 0

    def close(self) -> None:
        """Cancels what is left and ends both threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._jobs.put(None)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        for thread in self._threads:
            thread.join(_STOP_S)
        with self._lock:
            waited_for = list(self._waited_for)
        for future in waited_for:  # whose coroutine does not end
            future.cancel()
        if not any(thread.is_alive() for thread in self._threads):
            self._loop.close()

    async def _end(self) -> None:
        await self.cancel(_CANCEL_S)
        self._loop.stop()

    def _compute(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future = job
            try:
                result, error = function(), None
            except Exception as caught:  # belongs to whoever asked
                result, error = None, caught
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(_end, future, result, error)
            del job, function, future, result, error  # else they would live until the next one comes


def _end(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
