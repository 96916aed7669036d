"""Tiers that users name: directories of local or parallel file systems.

A tier's folder is laid out so:

1. ``<path>/jmo-<random>/`` is this process's own (mode 0700). It holds ``lock``, on which an flock lies as long as the
   process lives; the kernel frees it however the process ends.
2. At start-up folders whose lock is free are leftovers of dead processes and are removed.
3. ``<folder>/<optimizer>/b<bucket>.d<device>/`` is a Zarr v3 array of uint8 ``[subgroups, record_bytes]`` with one
   uncompressed chunk a subgroup: the chunk file ``c/<subgroup>/0`` is the record, byte for byte.
4. A record that is written to a tier takes over the file of a record of the same size that has moved on, if there is
   one: blocks are not allocated anew, and a tier holds no more files than it ever held records at once.

Tiers are scratch: what survives a crash is the checkpoint. Thread contract: a folder is used by one thread at a time,
but for ``add_array``, which any thread may call before others use that array.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import secrets
import shutil
import time
import urllib.parse
from collections.abc import Sequence

from jax_mlp_offload.sizes import parse_bytes

_PREFIX = "jmo-"
_UNBORN_S = 60.0  # a folder that was not locked within this time never will be


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A directory on a local or parallel file system.

    Args:
      path: an existing directory, or one whose parent exists.
      capacity: most bytes to keep there, such as ``"200GiB"``; None: as much as fits.
      io: ``"native"`` (O_DIRECT, the default).
      read_limit: most bytes/s to read, such as ``"400MB"``; None: no limit. To be a good neighbour on a shared system.
      write_limit: most bytes/s to write.
    """

    path: str | os.PathLike[str]
    capacity: int | str | None = None
    io: str = "native"
    read_limit: float | str | None = None
    write_limit: float | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise TypeError(f"a tier's path is {self.path!r}; give a directory")
        if self.io != "native":
            raise ValueError(f"File(io={self.io!r}): this version has io='native' only")
        for name in ("capacity", "read_limit", "write_limit"):
            value = getattr(self, name)
            if value is not None and parse_bytes(value, f"File({os.fspath(self.path)!r}, {name})") <= 0:
                raise ValueError(f"File({os.fspath(self.path)!r}, {name}={value!r}) must be more than 0")

    @property
    def name(self) -> str:
        """The tier's name in messages and statistics: its path."""
        return os.fspath(self.path)

    def number(self, field: str) -> int | None:
        """``capacity``, ``read_limit`` or ``write_limit`` as a number of bytes (a second), or None."""
        value = getattr(self, field)
        return None if value is None else parse_bytes(value, field)


TierLike = str | os.PathLike[str] | File


def as_tiers(tiers: Sequence[TierLike]) -> list[File]:
    """Tiers as given to ``Store``, each as a :class:`File`.

    Raises:
      ValueError: for a URL (remote tiers are not in this version) or a path given twice.
      TypeError: for anything that is no path.
    """
    result: list[File] = []
    seen: dict[str, str] = {}
    for tier in tiers:
        if isinstance(tier, str) and urllib.parse.urlparse(tier).scheme and "://" in tier:
            raise ValueError(f"tier {tier!r} is a URL; this version has file tiers only, so give a mounted directory")
        if not isinstance(tier, (str, os.PathLike, File)):
            raise TypeError(f"tier {tier!r} is neither a path nor jmo.File(...)")
        file = tier if isinstance(tier, File) else File(tier)
        real = os.path.realpath(file.path)
        if real in seen:
            raise ValueError(f"tier {file.name!r} is the same directory as {seen[real]!r}; give each directory once")
        seen[real] = file.name
        result.append(file)
    return result


class Folder:
    """This process's folder in a file tier; see the module's text.

    Raises:
      OSError: (of the fitting subclass) naming the path, if it cannot be made or written.
    """

    def __init__(self, tier: File) -> None:
        self.tier = tier
        self._lock = -1
        new: pathlib.Path | None = None  # until it is whole
        root = pathlib.Path(os.path.abspath(tier.path))
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            _remove_leftovers(root)
            # under another name until it is locked: else a process that starts now would take it for a leftover
            new = root / f".new-{_PREFIX}{secrets.token_hex(8)}"
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
        (array / "c").mkdir(parents=True, exist_ok=True, mode=0o700)
        meta = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [records, record_bytes],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, record_bytes]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
            "attributes": {},
        }
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
        return str(target)

    def path_to_read(self, name: str, index: int) -> str:
        """The file that holds a record."""
        return str(self._owner[name, index])

    def moved_on(self, name: str, index: int, record_bytes: int) -> None:
        """The record lives elsewhere now: its file may be taken over."""
        target = self._owner.pop((name, index), None)
        if target is not None and target.exists():
            self._spare.setdefault(record_bytes, {})[target] = None

    def close(self) -> None:
        """Removes the folder and frees its lock. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def _remove_leftovers(root: pathlib.Path) -> None:
    """Removes folders of ours whose process is gone: their lock is free."""
    unborn = [new for new in root.glob(f".new-{_PREFIX}*") if time.time() - new.stat().st_mtime > _UNBORN_S]
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
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
