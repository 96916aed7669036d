"""Key-value stores and directories, through TensorStore: object stores, memory, and whatever else it opens.

1. Each bucket of each device is a Zarr v3 array of uint8 ``[subgroups, record_bytes]``, uncompressed. In a directory a
   record is one chunk, as for the native engine, so either reads what the other wrote; in a store it is one or more
   *objects* of the same length, moved in parallel (rows are less than a page an object longer for that).
2. The driver hands a transfer to an event loop's thread and goes on. There it is one coroutine, with one request an
   object; it ends as an event of the native engine.
3. TensorStore reads straight into the slot. In a directory it also writes straight from it. What goes to a remote store
   it copies first, an object a connection: a request that never ends then holds no slot, and another tier takes over.
4. A record that has moved on is deleted behind the scenes. A later write to its place waits for that: a delete that
   overtook it would take the new record with it (``deletions.py``).

What always holds: a transfer ends only when TensorStore touches its slot no more (``requests.py``), so one that never
lets go never ends, and whoever waits for it gives it up by a deadline. A write and a delete of one place, or writes of
two records, are never under way at once; what may be at once are attempts of one request, which do the same. What may
still be carried out when the store is closed leaves the lease behind, so that the next start finds it. Thread contract:
as :class:`Backend`, and ``read_now`` and the end wait for the loop no longer than is said; everything with an underscore
runs on the loop's thread, but for what says otherwise.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import errno
import functools
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorstore as ts

from jax_mlp_offload import native
from jax_mlp_offload.backends.answers import Answer, RequestError, Verdict, classify, scrubber
from jax_mlp_offload.backends.arrays import Arrays, filled_up
from jax_mlp_offload.backends.base import Backend, Place
from jax_mlp_offload.backends.deletions import Deletions
from jax_mlp_offload.backends.home import FolderHome, Home, PrefixHome
from jax_mlp_offload.backends.loop import Loop
from jax_mlp_offload.backends.requests import Begun, Held, Limit, Requests, Silence, StillHeldError, all_of
from jax_mlp_offload.placement import QUEUE
from jax_mlp_offload.tiers import File, Remote

_log = logging.getLogger("jax_mlp_offload")
_FILE_CONNECTIONS = 8
_CONNECTIONS_A_RECORD = 4
_LONGEST_STOP_S = 10.0  # that transfers get to let go of their slots
_LET_GO_S = 1.0  # and those that do not, to end without that; and that requests get to be carried out
_LONGEST_REMOVAL_S = 300.0
_LONGEST_READ_NOW_S = 600.0


@dataclasses.dataclass(eq=False, slots=True)
class _Watch:
    """When storage began with a transfer: its first request got a connection. Before that it was queued."""

    begin_s: float | None = None

    def begins(self) -> None:
        self.begin_s = native.now_s() if self.begin_s is None else self.begin_s


class KvStoreBackend(Backend):
    """A tier, through TensorStore; see the module's text.

    Args:
      tier: the directory or store.
      engine: the native engine.

    Raises:
      OSError: naming the tier, if it cannot be used; within its ``request_timeout_s``, and nothing is left there.
      ValueError: if TensorStore knows no such store.
    """

    def __init__(self, tier: File | Remote, engine: Any) -> None:
        self.tier: File | Remote = tier
        self._engine = engine
        self._scrub = scrubber(tier)
        self._timeout_s = tier.request_timeout_s if isinstance(tier, Remote) else None
        self._requests = (
            Requests(tier.connections, self._timeout_s, tier.retries, self._scrub)
            if isinstance(tier, Remote)
            else Requests(_FILE_CONNECTIONS, None, 0, self._scrub)
        )
        if isinstance(tier, Remote):
            self.queue = max(QUEUE, tier.connections // _CONNECTIONS_A_RECORD)  # a small record is one object
        self._limits = {True: Limit(tier.number("write_limit")), False: Limit(tier.number("read_limit"))}
        self._stored: set[Place] = set()  # places that hold something, or may; the driver's
        self._spares: Counter[int] = Counter()  # by size: files that placement writes over, though they are deleted
        self._lock = threading.Lock()  # of the end
        self._stopped = self._closed = False
        self._left_behind = 0  # requests that may be carried out yet
        self._home: Home
        if isinstance(tier, Remote):
            self._open_remote(tier)
        else:
            self._open_folder(tier)
        self._arrays = Arrays(
            self._kv, self._spec, self._context, self._home, self._requests, self._loop, tier.number("object_bytes")
        )
        self._deletions = Deletions(tier, self._kv, self._home, self._arrays, self._requests, self._loop)
        self._loop.spawn(self._home.keep)

    # -- start (the caller's thread)

    def _open_folder(self, tier: File) -> None:
        home = FolderHome(tier)
        self._home, self._spec = home, home.spec
        self.lies_on(home.folder.device)
        self._loop = Loop("jmo-tensorstore")
        try:
            for mode in ("direct", "default"):  # not every file system has O_DIRECT
                self._context = ts.Context(_context(_FILE_CONNECTIONS) | {"file_io_mode": {"mode": mode}})
                self._kv = ts.KvStore.open(self._spec, context=self._context).result()
                try:
                    self._loop.run(home.probe(self._kv, self._requests))
                    break
                except RequestError as error:
                    if error.answer.error_number != errno.EINVAL or mode == "default":
                        raise OSError(
                            error.answer.error_number or errno.EIO, f"tier {tier.name!r} cannot be used: {error}"
                        ) from None
        except BaseException:
            self._loop.close()
            home.close()
            raise

    def _open_remote(self, tier: Remote) -> None:
        try:
            given = dict(tier.kvstore) if not isinstance(tier.kvstore, str) else tier.kvstore
            spec = ts.KvStore.Spec(given).to_json()
            self._spec = {key: value for key, value in spec.items() if key != "path"}
            path = str(spec.get("path", ""))
            self._context = ts.Context(_context(tier.connections))
            self._kv = ts.KvStore.open(self._spec, context=self._context).result(tier.request_timeout_s)
        except Exception as error:
            text = classify(error, self._scrub).text
            raise ValueError(f"tier {tier.name!r}: TensorStore opens no such store: {text}") from None
        self._home = home = PrefixHome(tier.name, self._kv, path.rstrip("/") + "/" if path else "", self._requests)
        self._loop = Loop("jmo-remote")
        try:
            self._loop.run(home.claim(tier.request_timeout_s))
        except BaseException:
            self._loop.close()
            raise

    # -- the driver's

    def add_array(self, array: str, records: int, record_bytes: int) -> None:
        """See :class:`Backend`."""
        self._arrays.add(array, records, record_bytes)
        self._home.expect(record_bytes)

    def read(self, place: Place, slot: int, crc: int, token: int) -> None:
        """See :class:`Backend`."""
        self._loop.spawn(self._transfer, False, place, slot, crc, token)

    def write(self, place: Place, slot: int, token: int) -> None:
        """See :class:`Backend`."""
        if place not in self._stored and self._spares[place.size_bytes]:
            self._spares[place.size_bytes] -= 1
        self._stored.add(place)
        self._loop.spawn(self._transfer, True, place, slot, 0, token)

    def moved_on(self, place: Place) -> None:
        """See :class:`Backend`."""
        if place in self._stored:
            self._stored.discard(place)
            self._spares[place.size_bytes] += 1
            self._loop.call(self._deletions.begin, place)

    def read_now(self, place: Place, target: np.ndarray[Any, Any], crc: int) -> None:
        """See :class:`Backend`."""
        try:
            self._loop.run(self._load(place, target, crc, _Watch()), _LONGEST_READ_NOW_S)
        except RequestError as error:
            raise RuntimeError(str(error)) from None
        except TimeoutError:
            what = self._what(False, place)
            raise RuntimeError(f"{what}: not done within {_LONGEST_READ_NOW_S:g} s") from None
        except (concurrent.futures.CancelledError, StillHeldError):
            raise RuntimeError(f"{self._what(False, place)}: the store was closed") from None

    def free_bytes(self) -> int | None:
        """See :class:`Backend`. Without the room of spares, which placement gives out on its own account."""
        free_bytes = self._home.free_bytes()
        if free_bytes is None:
            return None
        return max(0, free_bytes - sum(size_bytes * count for size_bytes, count in self._spares.items()))

    def facts(self) -> dict[str, Any]:
        """See :class:`Backend`: requests, and how often and how long they were tried again."""
        facts = {**self._requests.facts(), "deletes_failed": self._deletions.failed}
        if isinstance(self.tier, File):
            facts["exclusive"] = {"on": False, "why": f"io={self.tier.io!r} takes no turns"}
        return facts

    # -- transfers

    async def _transfer(self, is_write: bool, place: Place, slot: int, crc: int, token: int) -> None:
        """Moves a record, and posts how that ended."""
        watch = _Watch()
        text, number = "", 0
        try:
            view = self._engine.slot_view(slot, place.size_bytes)
            crc = await (self._save(place, view, watch) if is_write else self._load(place, view, crc, watch))
        except StillHeldError:
            return  # the slot is not free, so there is no end to tell of
        except asyncio.CancelledError:
            text, number = f"{self._what(is_write, place)}: the store was closed", errno.ECANCELED
        except RequestError as error:
            text, number = str(error), error.answer.error_number
            if is_write and not number:
                number = errno.EIO
        except Exception as error:  # one of ours; whoever waits has to hear of it
            reason = f"internal error {type(error).__name__}: {classify(error, self._scrub).text}"
            text, number = self._scrub(f"{self._what(is_write, place)}: {reason}"), errno.EIO
            where = "".join(traceback.format_tb(error.__traceback__))  # without its text, which may hold secrets
            _log.error("tier %r: %s\n%s", self.name, text, where)
        end_s = native.now_s()
        begin_s = end_s if watch.begin_s is None else watch.begin_s
        self._engine.post(is_write, token, text, number, crc, place.size_bytes, begin_s, end_s)

    async def _save(self, place: Place, view: np.ndarray[Any, Any], watch: _Watch) -> int:
        """Writes a record; returns its CRC32C."""
        await self._deletions.let_write(place)
        await self._arrays.make(place.array)
        crc: int = await self._loop.aside(native.crc32c, view)
        object_bytes = self._arrays.object_size(place.size_bytes)
        tail = await self._loop.aside(filled_up, view, object_bytes)
        refer = isinstance(self.tier, File)

        def begin(array: Any, start: int, end: int) -> Begun:
            if tail is not None and end - start < object_bytes:
                target = array[place.index, start : start + object_bytes]
                return Begun(target.write(tail, can_reference_source_data_indefinitely=True).commit)
            part = view[start:end]
            written = array[place.index, start:end].write(part, can_reference_source_data_indefinitely=refer)
            return Begun(written.commit, Held(part))

        await self._move_objects(True, place, begin, watch)
        return crc

    async def _load(self, place: Place, view: np.ndarray[Any, Any], crc: int, watch: _Watch) -> int:
        """Reads a record, compares its CRC32C and returns it."""
        await self._arrays.make(place.array)

        def begin(array: Any, start: int, end: int) -> Begun:
            part = view[start:end]
            return Begun(ts.array(part).write(array[place.index, start:end]).commit, Held(part))

        await self._move_objects(False, place, begin, watch)
        found: int = await self._loop.aside(native.crc32c, view)
        if found != crc:
            raise RequestError(
                Answer(Verdict.WRONG, 0, f"CRC32C is 0x{found:08x}, expected 0x{crc:08x}"),
                f"{self._what(False, place)} ({place.size_bytes} bytes)",
            )
        return found

    async def _move_objects(
        self, is_write: bool, place: Place, begin: Callable[[Any, int, int], Begun], watch: _Watch
    ) -> None:
        object_bytes = self._arrays.object_size(place.size_bytes)

        async def move(number: int, start: int) -> None:
            end = min(start + object_bytes, place.size_bytes)
            used: Any = None

            def begin_one() -> Begun:
                nonlocal used
                watch.begins()
                used = self._arrays.get(place.array, used)
                return begin(used, start, end)

            await self._requests.run(
                f"{self._what(is_write, place)}/{number}",
                begin_one,
                silence=Silence.LINGER if is_write else Silence.CANCEL,
                place=place,
                pay=functools.partial(self._limits[is_write].paid, end - start),
            )

        starts = range(0, place.size_bytes, object_bytes)
        await all_of([move(number, start) for number, start in enumerate(starts)])

    def _what(self, is_write: bool, place: Place) -> str:
        return self._home.what("write" if is_write else "read", place)

    # -- the end (the caller's thread)

    def forked(self) -> None:
        """See :class:`Backend`. The event loop's descriptors are the parent's too: they are not touched."""
        self._stopped = self._closed = True
        self._home.forked()

    def stop(self) -> None:
        """See :class:`Backend`. What does not let go of its slot is left behind, and keeps the slots' memory alive."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._loop.run(self._end_tasks())

    async def _end_tasks(self) -> None:
        longest_s = min(self._timeout_s or _LONGEST_STOP_S, _LONGEST_STOP_S)
        held = await self._loop.cancel(longest_s)
        if held:
            self._requests.abandoning = True
            await self._loop.cancel(_LET_GO_S)
            text = "tier %r: %d transfers have not let go of their slots; the slots' memory stays until they do"
            _log.warning(text, self.name, held)
        self._left_behind = held + await self._requests.end_lingering(_LET_GO_S)

    def close(self) -> None:
        """See :class:`Backend`."""
        self.stop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._loop.run(self._home.remove(in_use=self._left_behind > 0), _LONGEST_REMOVAL_S)
            except (RequestError, TimeoutError) as error:
                reason = str(error) or f"what was stored was not removed within {_LONGEST_REMOVAL_S:g} s"
                _log.warning("tier %r: %s; the next start removes what is left there", self.name, reason)
            finally:
                self._loop.close()
                self._home.close()


def _context(connections: int) -> dict[str, Any]:
    """TensorStore's settings: nothing is tried again there (that is done, and counted, here)."""
    return {
        "s3_request_concurrency": {"limit": connections},
        "gcs_request_concurrency": {"limit": connections},
        "s3_request_retries": {"max_retries": 0},
        "gcs_request_retries": {"max_retries": 0},
        "file_io_concurrency": {"limit": connections},
        "file_io_sync": False,  # tiers are scratch
    }
