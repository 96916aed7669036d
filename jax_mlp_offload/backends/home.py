"""Where in a store this process keeps its records, and how it tells what the dead have left there.

A directory has a folder with a lock (``folder.py``). A remote store has no locks, so there it is:

1. ``<path>/jmo-<random>/`` is this process's own. ``<path>/jmo-leases/<random>`` is its lease, written before anything
   else and removed last: the boot, the pid namespace, the pid, when that process began, and when the lease was renewed.
2. The lease is renewed every hour.
3. At start-up every lease is read. One of this boot and pid namespace whose process is gone, and any that was not
   renewed for a day, are of the dead: what they own is removed. Whatever else is there is left alone.

What always holds: only keys under a prefix of ours are ever deleted, and each is compared with it before; and nothing
that goes wrong with the leases of others keeps this process from renewing its own. Thread contract: the event loop's
thread, but for ``what`` (any), ``expect`` (any, one at a time), ``free_bytes`` (the driver's, and the caller's at the
start), ``forked`` (a child that has only one), and the constructor and ``close`` (the caller's).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import secrets
import time
from typing import Any

import numpy as np
import tensorstore as ts

from jax_mlp_offload.backends.answers import Answer, RequestError, Verdict
from jax_mlp_offload.backends.base import Place
from jax_mlp_offload.backends.folder import Folder, boot_id
from jax_mlp_offload.backends.requests import Begun, Requests, all_of
from jax_mlp_offload.placement import QUEUE
from jax_mlp_offload.tiers import File

_log = logging.getLogger("jax_mlp_offload")
_RENEW_S = 3600.0
_RENEW_AGAIN_S = 300.0  # where that failed
_EXPIRED_S = 24 * 3600.0
_TIDY_S = 1.0  # for a lease that nobody will need
_PROBE_BYTES = 4096
_PIDS = 2**31


_REMEDIES = {
    Verdict.REFUSED: "they have to be allowed to list, read, write and delete there",
    Verdict.ABSENT: "make the bucket, or correct the tier's URL",
    Verdict.AGAIN: "check the tier's endpoint and region, and the network",
    Verdict.NO_ANSWER: "check the tier's endpoint and region, and the network, or raise request_timeout_s",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who owns a prefix, and when that was last said. A pid means something within one boot and pid namespace only."""

    boot: str
    pid_namespace: str
    pid: int
    began_ticks: int
    renewed_s: float

    @classmethod
    def mine(cls) -> Lease:
        """This process's, as of now."""
        pid = os.getpid()
        return cls(*_machine(), pid, _began_ticks(pid) or 0, time.time())

    @classmethod
    def parse(cls, text: bytes) -> Lease | None:
        """A lease, or None for what is none."""
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        texts, numbers = (found.boot, found.pid_namespace), (found.began_ticks, found.renewed_s)
        right = all(isinstance(text, str) for text in texts) and all(isinstance(n, (int, float)) for n in numbers)
        return found if right and isinstance(found.pid, int) and 0 < found.pid < _PIDS else None

    def is_dead(self) -> bool:
        """Whether its process is known to be gone, or has not been heard of for a day."""
        if time.time() - self.renewed_s > _EXPIRED_S:
            return True
        return (self.boot, self.pid_namespace) == _machine() and _is_gone(self.pid, self.began_ticks)

    def text(self) -> bytes:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self)).encode()


def _machine() -> tuple[str, str]:
    return boot_id(), os.readlink("/proc/self/ns/pid")


def _is_gone(pid: int, began_ticks: int) -> bool:
    """Whether a process is known to have ended. /proc may hide those of other users (hidepid), so it is not enough."""
    try:
        found = _began_ticks(pid)
        if found is not None:
            return found != began_ticks
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _began_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None: there is none to be seen.

    Raises:
      PermissionError: if that is kept from this user.
    """
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


class Home(abc.ABC):
    """A place of this process's own in a store.

    ``prefix`` comes before every key, ``url`` before every key in messages.
    """

    prefix: str
    url: str

    def what(self, verb: str, place: Place) -> str:
        """A request for a record, for messages: ``"read of s3://..."``."""
        return f"{verb} of {self.url}{place.array}/c/{place.index}"

    @abc.abstractmethod
    async def keep(self) -> None:
        """Removes what the dead have left, and keeps this place from being taken for such. Ends when cancelled."""

    @abc.abstractmethod
    async def remove(self, in_use: bool) -> None:
        """Removes what is stored. ``in_use``: something may yet be written there, so leave the place to be found."""

    def free_bytes(self) -> int | None:
        """Bytes that are free there; None: unknown, or without end."""
        return None

    def expect(self, record_bytes: int) -> None:  # noqa: B027 (most have nothing to do here)
        """There will be records of this size."""

    def forked(self) -> None:  # noqa: B027
        """This is a forked child: lets go of the parent's locks."""

    def close(self) -> None:  # noqa: B027
        """Ends what is left on this machine."""


class FolderHome(Home):
    """A folder with a lock.

    Args:
      tier: the directory.

    Raises:
      OSError: naming the path, if it cannot be made or written.
    """

    prefix = ""

    def __init__(self, tier: File) -> None:
        self.folder = Folder(tier)
        self.spec = {"driver": "file", "path": f"{self.folder.path}/"}
        self.url = f"{self.folder.path}/"
        self._largest_bytes = 0  # record

    async def probe(self, kv: Any, requests: Requests) -> None:
        """Writes and reads a page.

        Raises:
          RequestError: if the file system does not take it, as where it has no O_DIRECT.
        """
        page = np.zeros(_PROBE_BYTES, np.uint8).tobytes()
        await requests.run(f"write of {self.url}probe", lambda: Begun(kv.write("probe", page)))
        await requests.run(f"read of {self.url}probe", lambda: Begun(kv.read("probe")))

    async def keep(self) -> None:
        """See :class:`Home`. The lock does it; its time tells other machines."""
        while True:
            await asyncio.sleep(_RENEW_S)
            self.folder.renew()

    async def remove(self, in_use: bool) -> None:
        """See :class:`Home`. ``close`` does it, on a thread that may wait."""

    def expect(self, record_bytes: int) -> None:
        """See :class:`Home`."""
        self._largest_bytes = max(self._largest_bytes, record_bytes)

    def free_bytes(self) -> int | None:
        """See :class:`Home`.

        TensorStore writes a file anew beside the one that it takes the place of: room for as many as may be under way is
        kept back.
        """
        free_bytes = self.folder.free_bytes()
        return None if free_bytes is None else max(0, free_bytes - QUEUE * self._largest_bytes)

    def forked(self) -> None:
        """See :class:`Home`."""
        self.folder.forked()

    def close(self) -> None:
        """See :class:`Home`."""
        self.folder.close()


class PrefixHome(Home):
    """A prefix with a lease.

    Args:
      name: the tier's, for messages.
      kv: the whole store, a TensorStore ``KvStore``.
      path: where in it the user wants everything; empty, or ends in ``/``.
      requests: how to reach it.
    """

    def __init__(self, name: str, kv: Any, path: str, requests: Requests) -> None:
        self._name, self._kv, self._requests = name, kv, requests
        own = secrets.token_hex(8)
        self._path = path
        self._leases = f"{path}jmo-leases/"
        self._lease_key = f"{self._leases}{own}"
        self.prefix = self._prefix_of(own)
        self.url = f"{name.rstrip('/')}/jmo-{own}/"

    def _prefix_of(self, own: str) -> str:
        return f"{self._path}jmo-{own}/"

    async def claim(self, timeout_s: float) -> None:
        """Writes the lease and reads it back.

        Raises:
          OSError: naming the tier and the remedy, if that cannot be done within ``timeout_s``; nothing is left there.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._claim()
        except TimeoutError:
            answer = Answer(Verdict.NO_ANSWER, errno.ETIMEDOUT, f"no answer within {timeout_s:g} s")
            error = RequestError(answer, f"write of {self.url}")
        except RequestError as caught:
            error = caught
        else:
            return
        number = error.answer.error_number or errno.EIO
        remedy = _REMEDIES.get(error.answer.verdict, "see what the store says to it")
        raise OSError(number, f"tier {self._name!r} cannot be used: {error}; {remedy}")

    async def _claim(self) -> None:
        text = Lease.mine().text()
        try:
            await self._write_lease(text)
            if await self._read(self._lease_key) != text:
                answer = Answer(Verdict.WRONG, errno.EIO, "what was written there does not come back")
                raise RequestError(answer, f"read of {self._called(self._lease_key)}")
        except BaseException:
            # where the write has come through after all; what went wrong says more than a failure of this would
            with contextlib.suppress(RequestError, TimeoutError):
                async with asyncio.timeout(_TIDY_S):
                    await self._delete(self._lease_key)
            raise

    def _called(self, key: str) -> str:
        """A key as messages have it."""
        return f"{self._name.rstrip('/')}/{key.removeprefix(self._path)}"

    async def _write_lease(self, text: bytes) -> None:
        what = f"write of {self._called(self._lease_key)}"
        await self._requests.run(what, lambda: Begun(self._kv.write(self._lease_key, text)), housekeeping=True)

    async def _read(self, key: str) -> bytes:
        what = f"read of {self._called(key)}"
        found = await self._requests.run(what, lambda: Begun(self._kv.read(key)), housekeeping=True)
        return bytes(found.value)

    async def keep(self) -> None:
        """See :class:`Home`."""
        await all_of([self._sweep(), self._renew()])

    async def _renew(self) -> None:
        """Whatever goes wrong: a lease that is not renewed any more costs the user's records."""
        pause_s = _RENEW_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._write_lease(Lease.mine().text())
                pause_s = _RENEW_S
            except Exception as error:
                _log.warning("tier %r: the lease was not renewed: %s", self._name, _told(error))
                pause_s = _RENEW_AGAIN_S

    async def _sweep(self) -> None:
        try:
            for key in await self._list(self._leases):
                own = key.removeprefix(self._leases)
                if key != self._lease_key and own and "/" not in own:
                    await self._remove_if_dead(key, own)
        except Exception as error:
            _log.warning("tier %r: not all leftovers of earlier runs were removed: %s", self._name, _told(error))

    async def _remove_if_dead(self, key: str, own: str) -> None:
        lease = Lease.parse(await self._read(key))
        if lease is not None and lease.is_dead():
            _log.info("tier %r: removing what process %d left in %s", self._name, lease.pid, own)
            await self._delete_all(self._prefix_of(own))
            await self._delete(key)

    async def remove(self, in_use: bool) -> None:
        """See :class:`Home`."""
        await self._delete_all(self.prefix)
        if not in_use:
            await self._delete(self._lease_key)

    async def _delete_all(self, prefix: str) -> None:
        """Goes on after a failure, but not after silence: each of many keys would be waited for as long."""
        keys = iter(await self._list(prefix))
        failed: list[RequestError] = []

        async def work() -> None:
            for key in keys:
                try:
                    await self._delete(key)
                except RequestError as error:
                    failed.append(error)
                if any(error.answer.verdict is Verdict.NO_ANSWER for error in failed):
                    break

        await all_of([work() for _ in range(self._requests.most)])
        if failed:
            raise failed[-1]

    async def _list(self, prefix: str) -> list[str]:
        """All keys that begin with ``prefix``, which ends in ``/``."""
        names = ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord("/") + 1))
        found = await self._requests.run(
            f"list of {self._name}", lambda: Begun(self._kv.list(names)), housekeeping=True
        )
        keys = (key.decode(errors="replace") for key in found)
        return [key for key in keys if key.startswith(prefix)]  # some servers do not heed the range

    async def _delete(self, key: str) -> None:
        what = f"delete of {self._called(key)}"
        await self._requests.run(what, lambda: Begun(self._kv.write(key, None)), housekeeping=True)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, RequestError) else repr(error)
