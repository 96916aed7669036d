"""How a snapshot's folder comes to be whole or not at all.

1. It is made as ``.new-<name>-<random>`` beside its place, with a ``lock`` in it on which an flock lies as long as its
   process lives; so what a killed process left behind is told from what is being written, and removed by the next one.
2. Once everything in it is durable it is renamed, and the folder that it is in is made durable.
3. One that is to be removed is renamed first (``.old-...``), so that nobody sees a part of it.

Thread contract: any thread; an object is one thread's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import secrets
import shutil
import time

from jax_mlp_offload import native
from jax_mlp_offload.snapshots.manifest import FILE

_LOCK = "lock"
_NEW, _OLD = ".new-", ".old-"
_UNBORN_S = 60.0  # a folder that was not locked within this time never will be
_locks: set[int] = set()  # descriptors


class NewFolder:
    """The folder of a snapshot that is being written.

    Args:
      place: where it will be; what is there is replaced only by ``commit(replaces=True)``.

    Raises:
      OSError: if it cannot be made.
    """

    def __init__(self, place: pathlib.Path) -> None:
        self._place = place
        place.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(place.parent, place.name)
        self.path = place.parent / f"{_NEW}{place.name}-{secrets.token_hex(8)}"
        self.path.mkdir(mode=0o700)
        try:
            self._lock = lock(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def commit(self, replaces: bool) -> None:
        """Puts it in its place; all that is in it is durable but for its own entries.

        Raises:
          OSError: if there is something else, or the file system refuses.
        """
        _sync_folder(self.path)
        old = _retire(self._place) if replaces and self._place.exists() else None
        self.path.rename(self._place)
        (self._place / _LOCK).unlink()
        _sync_folder(self._place.parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Removes it, unless it is in its place. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            unlock(self._lock)
            self._lock = -1


def lock(folder: pathlib.Path) -> int:
    """Locks a folder until ``unlock``, or until this process ends.

    Raises:
      BlockingIOError: if somebody else has.
      OSError: if there are no locks.
    """
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    _locks.add(descriptor)
    return descriptor


def unlock(descriptor: int) -> None:
    """Frees a lock."""
    _locks.discard(descriptor)
    os.close(descriptor)


def _after_fork_in_child() -> None:
    """The locks are to die with the parent."""
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def make_durable(folder: pathlib.Path) -> None:
    """Makes all that was written to a folder durable.

    Raises:
      OSError: if some of it could not be written.
    """
    native.sync_file_system(str(folder))


def remove(snapshot: pathlib.Path) -> None:
    """Removes a snapshot; nobody sees a part of it.

    Raises:
      OSError: if it cannot be renamed.
    """
    shutil.rmtree(_retire(snapshot), ignore_errors=True)


def _retire(snapshot: pathlib.Path) -> pathlib.Path:
    """Takes a snapshot out of its place; returns where it is now."""
    return snapshot.rename(snapshot.with_name(f"{_OLD}{snapshot.name}-{secrets.token_hex(8)}"))


def remove_leftovers(parent: pathlib.Path, name: str) -> None:
    """Removes what dead processes left of snapshots whose name is this, or fits this pattern."""
    for folder in parent.glob(f"{_NEW}{name}-*"):
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            if _age_s(folder) > _UNBORN_S:
                shutil.rmtree(folder, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):  # it lives
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
    for folder in parent.glob(f"{_OLD}{name}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def whole(parent: pathlib.Path) -> list[pathlib.Path]:
    """The snapshots ``step-*`` in a folder, the newest first."""
    found = []
    for folder in parent.glob("step-*"):
        with contextlib.suppress(OSError):  # not whole, or removed meanwhile
            found.append(((folder / FILE).stat().st_mtime_ns, folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def _sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _age_s(folder: pathlib.Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # in its place by now
