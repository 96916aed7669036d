"""This process's own folder in a directory that is a tier.

It is laid out so:

1. ``<path>/jmo-<boot>-<random>/`` is this process's own (mode 0700). It holds ``lock``, on which an flock lies as long as
   the process lives; the kernel frees it however the process ends. ``<boot>`` tells the machine since it was started.
2. At start-up folders whose lock is free are leftovers of dead processes and are removed. One of another machine (or of
   this one before it was started anew) also has to be a day old: on some parallel file systems a lock is seen on its own
   machine only. The living renew their lock's time.
3. ``<folder>/<optimizer>/b<bucket>.d<device>/`` is a Zarr v3 array of uint8 ``[subgroups, record_bytes]`` with one
   uncompressed chunk a subgroup: the chunk file ``c/<subgroup>/0`` is the record, byte for byte.
4. A record that is written to a tier takes over the file of a record of the same size that has moved on, if there is
   one: blocks are not allocated anew, and a tier holds no more files than it ever held records at once.
5. A file that has another link (in ``kept/<number>/``, or in a snapshot) is somebody else's too: it is never written
   over. Its record gets a new file, and the old one goes with its last link.

Thread contract: a folder is used by one thread at a time, but for ``add_array``, which any thread may call before
others use that array.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import pathlib
import secrets
import shutil
import time

from jax_mlp_offload.backends.zarr import metadata
from jax_mlp_offload.tiers import File

_log = logging.getLogger("jax_mlp_offload")
_PREFIX = "jmo-"
_UNBORN_S = 60.0  # a folder that was not locked within this time never will be
_EXPIRED_S = 86400.0


class Folder:
    """This process's folder in a file tier; see the module's text.

    Raises:
      OSError: (of the fitting subclass) naming the path, if it cannot be made or written.
    """

    def __init__(self, tier: File) -> None:
        self.tier = tier
        self._lock = -1
        new: pathlib.Path | None = None  # until it is whole
        root = pathlib.Path(os.path.realpath(tier.path))  # a link may be turned elsewhere later
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            _remove_leftovers(root)
            # under another name until it is locked: else a process that starts now would take it for a leftover
            new = root / f".new-{_PREFIX}{_boot()}-{secrets.token_hex(8)}"
            new.mkdir(mode=0o700)
            self._lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = new.rename(root / new.name.removeprefix(".new-"))
        except OSError as error:
            if new is not None:
                shutil.rmtree(new, ignore_errors=True)
            if self._lock >= 0:
                os.close(self._lock)
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise type(error)(
                error.errno or errno.EIO,
                f"tier {tier.name!r} cannot be used: {reason}; give a directory that this user can write, "
                "on a file system that has locks",
                str(root),
            ) from error
        self._owner: dict[tuple[str, int], pathlib.Path] = {}
        self._spare: dict[int, dict[pathlib.Path, None]] = {}  # by size; ordered sets
        self._unmade: dict[str, tuple[int, int]] = {}  # arrays that could not be made yet

    def renew(self) -> None:
        """Says that its process lives; to be called at least every hour."""
        try:
            if self._lock >= 0:
                os.utime(self._lock)
        except OSError as error:  # the next time may do; its transfers tell if it is gone for good
            _log.warning("tier %r: the time of its lock was not renewed: %s", self.tier.name, error)

    @property
    def device(self) -> int:
        """The number of the device that it lies on."""
        return os.stat(self.path).st_dev

    def free_bytes(self) -> int | None:
        """Bytes of the file system that this user may still take; None: it does not count its space."""
        return free_bytes_at(self.path)

    def add_array(self, name: str, records: int, record_bytes: int) -> None:
        """Makes the Zarr array of one bucket on one device.

        A tier that cannot take it now (it is full) is no reason to refuse the optimizer: the first write tries again,
        and fails as any write does, so that another tier takes over.
        """
        try:
            self._make_array(name, records, record_bytes)
        except OSError:
            self._unmade[name] = records, record_bytes

    def _make_array(self, name: str, records: int, record_bytes: int) -> None:
        array = self.path / name
        if not self.path.is_dir():  # gone, or no longer mounted: nothing is made in its stead
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        (array / "c").mkdir(parents=True, exist_ok=True, mode=0o700)
        meta = metadata(records, record_bytes, record_bytes)
        for index in range(records):
            (array / "c" / str(index)).mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(array / "zarr.json", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=2)

    def path_to_write(self, name: str, index: int, record_bytes: int) -> str:
        """The file for a record, which may take over that of one that has moved on.

        Raises:
          OSError: if the tier does not take it.
        """
        if name in self._unmade:
            self._make_array(name, *self._unmade[name])
            del self._unmade[name]
        key = (name, index)
        target = self.path / name / "c" / str(index) / "0"
        if key not in self._owner:
            spare = self._spare.get(record_bytes, {})
            if target in spare:
                del spare[target]  # its own file of before: else a rename would put another over it
            elif spare:
                os.rename(spare.popitem()[0], target)
            self._owner[key] = target
        if _links(target) > 1:
            os.unlink(target)
        return str(target)

    def path_to_read(self, name: str, index: int) -> str:
        """The file that holds a record."""
        return str(self._owner[name, index])

    def moved_on(self, name: str, index: int, record_bytes: int) -> None:
        """The record lives elsewhere now: its file may be taken over."""
        target = self._owner.pop((name, index), None)
        links = 0 if target is None else _links(target)
        if target is not None and links == 1:
            self._spare.setdefault(record_bytes, {})[target] = None
        elif target is not None and links > 1:
            try:
                os.unlink(target)
            except OSError as error:  # its next write finds it, and tries again
                _log.warning("tier %r: %s", self.tier.name, error)

    def keep(self, name: str, index: int, number: int) -> str | None:
        """Links a record's file into ``kept/<number>/``; returns the link's path, None if the file system has no links."""
        try:
            path = self.path_to_keep(name, index, number)
            os.link(self._owner[name, index], path)
        except OSError as error:
            _log.info("tier %r: a file was not linked: %s", self.tier.name, error)
            return None
        return path

    def path_to_keep(self, name: str, index: int, number: int) -> str:
        """Where in ``kept/<number>/`` a record is to be; on any thread."""
        kept = self.path / "kept" / str(number)
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(kept / f"{name.replace('/', '.')}.{index}")

    def let_go(self, number: int) -> None:
        """Removes ``kept/<number>/``."""
        shutil.rmtree(self.path / "kept" / str(number), ignore_errors=True)

    def forked(self) -> None:
        """This is a forked child: the folder stays the parent's, and its lock is to die with the parent."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def close(self) -> None:
        """Removes the folder and frees its lock. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def free_bytes_at(path: str | os.PathLike[str]) -> int | None:
    """Bytes that this user may still take on a path's file system; None: it does not count its space."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _links(path: pathlib.Path) -> int:
    """How many names a file has; 0: there is none (or it cannot be looked at)."""
    try:
        return os.stat(path).st_nlink
    except OSError:
        return 0


def _remove_leftovers(root: pathlib.Path) -> None:
    """Removes folders of ours whose process is gone: their lock is free."""
    unborn = [new for new in root.glob(f".new-{_PREFIX}*") if _age_s(new) > _UNBORN_S]
    for folder in [*root.glob(f"{_PREFIX}*"), *unborn]:
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not ours to judge: another user's, or just being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # in use
        else:
            if _is_over(folder, lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _is_over(folder: pathlib.Path, lock: int) -> bool:
    """Whether a folder whose lock is free here is nobody's."""
    return f"{_PREFIX}{_boot()}-" in folder.name or time.time() - os.fstat(lock).st_mtime > _EXPIRED_S


def boot_id() -> str:
    """Tells this machine, since it was started, from all others."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _boot() -> str:
    return boot_id().partition("-")[0]


def _age_s(folder: pathlib.Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # it is locked by now, and has its name
