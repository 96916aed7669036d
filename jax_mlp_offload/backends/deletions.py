"""Deletes of records that have moved on, behind the scenes, and what writes wait for because of them.

1. A delete begins once no earlier write of its place may be carried out any more: that would bring the record back.
2. A later write to the place calls off a delete that has not begun, and waits for one that has, and for every request of
   the place that was given up but may be carried out yet.
3. In a directory a write calls nothing off and waits for every delete: TensorStore writes a file anew and renames it, so
   a spare file is room only once it is gone.

Thread contract: the event loop's thread, but for ``failed`` (any).
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
from typing import Any

from jax_mlp_offload.backends.answers import Answer, RequestError, Verdict
from jax_mlp_offload.backends.arrays import Arrays
from jax_mlp_offload.backends.base import Place
from jax_mlp_offload.backends.home import Home
from jax_mlp_offload.backends.loop import Loop
from jax_mlp_offload.backends.requests import Begun, Requests, Silence, all_of
from jax_mlp_offload.tiers import File, Remote

_log = logging.getLogger("jax_mlp_offload")


@dataclasses.dataclass(eq=False, slots=True)
class _Deletion:
    """Of one record."""

    task: asyncio.Task[None] | None = None
    begun: bool = False  # a request is on its way: it can no longer be called off
    called_off: bool = False


class Deletions:
    """All deletes of one tier; see the module's text.

    Args:
      tier: the tier.
      kv: the store, a TensorStore ``KvStore``.
      home: where in it the records are.
      arrays: how they are cut into objects.
      requests: how to reach it.
      loop: where this is used.
    """

    def __init__(
        self, tier: File | Remote, kv: Any, home: Home, arrays: Arrays, requests: Requests, loop: Loop
    ) -> None:
        self._kv, self._home, self._arrays, self._requests, self._loop = kv, home, arrays, requests, loop
        self._name = tier.name
        self._writes_anew = isinstance(tier, File)
        self._timeout_s = tier.request_timeout_s if isinstance(tier, Remote) else None
        self._under_way: dict[Place, _Deletion] = {}
        self.failed = 0

    def begin(self, place: Place) -> None:
        """Begins to delete a record."""
        deletion = self._under_way[place] = _Deletion()
        deletion.task = self._loop.start(self._delete(place, deletion))

        def forget(_: Any) -> None:
            if self._under_way.get(place) is deletion:
                del self._under_way[place]

        deletion.task.add_done_callback(forget)

    async def _delete(self, place: Place, deletion: _Deletion) -> None:
        objects = range(-(-place.size_bytes // self._arrays.object_size(place.size_bytes)))
        if lingering := self._requests.lingering(place):
            await asyncio.wait(lingering)

        async def delete(number: int) -> None:
            key = f"{self._home.prefix}{place.array}/c/{place.index}/{number}"

            def begin() -> Begun:
                if deletion.called_off:  # the task is told by and by
                    raise asyncio.CancelledError
                deletion.begun = True
                return Begun(self._kv.write(key, None))

            # as housekeeping: each attempt that has no answer takes a connection from transfers
            what = self._home.what("delete", place)
            await self._requests.run(what, begin, housekeeping=True, silence=Silence.LINGER, place=place)

        try:
            await all_of([delete(number) for number in objects])
        except RequestError as error:
            level = logging.DEBUG if self.failed else logging.WARNING
            self.failed += 1
            _log.log(level, "tier %r: %s; it takes up space until the store is closed", self._name, error)

    async def let_write(self, place: Place) -> None:
        """Waits until nothing else changes what is about to be written, nor takes up room that was given out.

        Raises:
          RequestError: if that takes longer than one request may.
        """
        if self._writes_anew:
            if tasks := [deletion.task for deletion in self._under_way.values() if deletion.task is not None]:
                await asyncio.wait(tasks)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                while tasks := self._others(place):  # a delete may end and leave a request that lingers
                    await asyncio.wait(tasks)
        except TimeoutError:
            text = f"an earlier request for the same place has had no answer within {self._timeout_s:g} s"
            what = self._home.what("write", place)
            raise RequestError(Answer(Verdict.NO_ANSWER, errno.ETIMEDOUT, text), what) from None

    def _others(self, place: Place) -> list[asyncio.Task[None]]:
        tasks = self._requests.lingering(place)
        deletion = self._under_way.get(place)
        if deletion is not None and deletion.task is not None:
            if not deletion.begun:
                deletion.called_off = True  # what is there will be written over
                deletion.task.cancel()
            tasks.append(deletion.task)
        return tasks
