"""Tiers as users name them: directories, and key-value stores that TensorStore opens.

Tiers are scratch: what survives a crash is the checkpoint. Plain data; imports nothing of jax, tensorstore or the
extension.
"""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from jax_mlp_offload.sizes import parse_bytes

_IO = ("native", "tensorstore")
_READ_ONLY = ("http", "https")
_SIZES = ("capacity", "read_limit", "write_limit", "endurance", "object_bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A directory on a local or parallel file system.

    Args:
      path: an existing directory, or one whose parent exists.
      capacity: most bytes to keep there, such as ``"200GiB"``; None: as much as fits.
      io: ``"native"`` (O_DIRECT, the default), or ``"tensorstore"``: TensorStore's file driver. Both leave the same
        Zarr v3 arrays.
      read_limit: most bytes/s to read, such as ``"400MB"``; None: no limit. To be a good neighbour on a shared system.
      write_limit: most bytes/s to write.
      endurance: bytes that the drive is rated for over its life (TBW), such as ``"600TB"``; ``Store.stats`` then says
        how much of it this run has used.

    Raises:
      ValueError: if an argument makes no sense; the message names it.
      TypeError: if it has the wrong type.
    """

    path: str | os.PathLike[str]
    capacity: int | str | None = None
    io: str = "native"
    read_limit: float | str | None = None
    write_limit: float | str | None = None
    endurance: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise TypeError(f"a tier's path is {self.path!r}; give a directory")
        if self.io not in _IO:
            raise ValueError(f"File(io={self.io!r}) is unknown; use {' or '.join(map(repr, _IO))}")
        if self.io == "tensorstore" and "\\" in os.fspath(self.path):
            raise ValueError(
                f"File({os.fspath(self.path)!r}): TensorStore takes a backslash for a slash; use io='native'"
            )
        _check_sizes(self, f"File({os.fspath(self.path)!r}, ")

    @property
    def name(self) -> str:
        """The tier's name in messages and statistics: its path."""
        return os.fspath(self.path)

    def number(self, field: str) -> int | None:
        """A size of this tier as a number of bytes (a second), or None."""
        return _number(self, field)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Remote:
    """A key-value store that TensorStore opens: an object store, or any other.

    Credentials come from the provider's standard chain (environment, configuration files, instance metadata), never
    from here; they appear in no message.

    Args:
      kvstore: a URL (``s3://bucket/path``, ``gs://bucket/path``, ``memory://path``) or a TensorStore kvstore spec, such
        as ``{"driver": "s3", "bucket": "b", "path": "run7/", "endpoint": "http://minio:9000", "aws_region": "x"}``.
      capacity: most bytes to keep there; None: no limit.
      read_limit: most bytes/s to read; None: no limit.
      write_limit: most bytes/s to write.
      connections: most requests under way at once.
      request_timeout_s: how long one request may take, in seconds. It is then given up, and tried again twice at most.
      retries: how often a request is tried again after an answer that says so (429, 5xx) or a lost connection, with
        growing and random pauses in between.
      object_bytes: size of an object; a larger record is several objects, moved in parallel.

    Raises:
      ValueError: if an argument makes no sense; the message names it.
      TypeError: if it has the wrong type.
    """

    kvstore: str | Mapping[str, Any]
    capacity: int | str | None = None
    read_limit: float | str | None = None
    write_limit: float | str | None = None
    connections: int = 16
    request_timeout_s: float = 60.0
    retries: int = 8
    object_bytes: int | str = "8MiB"

    def __post_init__(self) -> None:
        if isinstance(self.kvstore, Mapping):
            if not isinstance(self.kvstore.get("driver"), str):
                raise ValueError(
                    f"Remote(...): a kvstore spec needs a 'driver', such as 's3'; this has {sorted(map(str, self.kvstore))}"
                )
        elif not isinstance(self.kvstore, str):
            raise TypeError(f"Remote(<{type(self.kvstore).__name__}>): give a URL or a TensorStore kvstore spec")
        elif not _is_url(self.kvstore):
            shown = self.kvstore.rpartition("@")[2]
            raise ValueError(f"Remote({shown!r}) is no URL; give a directory as a path, or as jmo.File(...)")
        if self._driver in _READ_ONLY:
            raise ValueError(
                f"tier {self.name!r}: TensorStore only reads over plain {self._driver}; give a store that takes writes"
            )
        _check_sizes(self, f"Remote({self.name!r}, ")
        for name, least in (("connections", 1), ("retries", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Remote({self.name!r}, {name}={value!r}) must be a whole number of at least {least}")
        if not isinstance(self.request_timeout_s, (int, float)) or not 0 < self.request_timeout_s < float("inf"):
            raise ValueError(
                f"Remote({self.name!r}, request_timeout_s={self.request_timeout_s!r}) must be a positive number of seconds"
            )

    def __repr__(self) -> str:  # without what may be secret
        return f"Remote({self.name!r})"

    @property
    def is_directory(self) -> bool:
        """Whether it is one on this machine; ``Store`` takes it for ``File(path, io="tensorstore")``."""
        return self._driver == "file"

    @property
    def _driver(self) -> str:
        return self.kvstore["driver"] if isinstance(self.kvstore, Mapping) else self.kvstore.partition("://")[0]

    @property
    def name(self) -> str:
        """The tier's name in messages and statistics: a URL without user, password and query."""
        if isinstance(self.kvstore, Mapping):
            parts = (str(self.kvstore.get(key, "")).rstrip("/") for key in ("bucket", "path"))
            scheme = "gs" if self._driver == "gcs" else self._driver
            return f"{scheme}://" + "/".join(part for part in parts if part)
        url = urllib.parse.urlsplit(self.kvstore)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"

    def number(self, field: str) -> int | None:
        """A size of this tier as a number of bytes (a second), or None."""
        return _number(self, field)


Tier = File | Remote
TierLike = str | os.PathLike[str] | File | Remote | Mapping[str, Any]


def as_tiers(tiers: Sequence[TierLike]) -> list[Tier]:
    """Tiers as given to ``Store``, each as a :class:`File` or :class:`Remote`.

    Raises:
      ValueError: for a tier given twice, or a URL that cannot be one.
      TypeError: for anything else.
    """
    result: list[Tier] = []
    seen: dict[tuple[str, ...], str] = {}
    for given in tiers:
        tier = _as_tier(given)
        real = _place(tier)
        if real in seen:
            what = "directory" if isinstance(tier, File) else "place"
            raise ValueError(f"tier {tier.name!r} is the same {what} as {seen[real]!r}; give each {what} once")
        seen[real] = tier.name
        result.append(tier)
    return result


def _place(tier: Tier) -> tuple[str, ...]:
    """What two tiers have in common that are one place."""
    if isinstance(tier, File):
        return (os.path.realpath(tier.path),)
    spec = tier.kvstore if isinstance(tier.kvstore, Mapping) else {}
    others = (f"{key}={value!r}" for key, value in sorted(spec.items()) if key not in ("driver", "bucket", "path"))
    return (tier.name.rstrip("/"), *others)


def _as_tier(given: Any) -> Tier:
    if isinstance(given, File):
        return given
    if (isinstance(given, str) and _is_url(given)) or (isinstance(given, Mapping) and "driver" in given):
        given = Remote(given)
    if isinstance(given, Remote):
        return _directory(given) if given.is_directory else given
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"tier {given!r} is no path, no URL, no kvstore spec, and neither jmo.File(...) nor jmo.Remote(...)"
        )
    return File(given)


def _directory(remote: Remote) -> File:
    """A directory that was named as a key-value store: it has locks, which other stores lack."""
    if isinstance(remote.kvstore, Mapping):
        path = str(remote.kvstore.get("path", ""))
    else:
        url = urllib.parse.urlsplit(remote.kvstore)
        if url.netloc not in ("", "localhost"):
            raise ValueError(f"tier {remote.kvstore!r} names the host {url.netloc!r}; a directory is file:///path")
        path = urllib.parse.unquote(url.path)
    if not path:
        raise ValueError(f"tier {remote.name!r} has no path; give that of a directory")
    return File(path, remote.capacity, "tensorstore", remote.read_limit, remote.write_limit)


def _is_url(text: str) -> bool:
    return "://" in text and bool(urllib.parse.urlsplit(text).scheme)


def _number(tier: Tier, field: str) -> int | None:
    value = getattr(tier, field, None)
    return None if value is None else parse_bytes(value, field)


def _check_sizes(tier: Tier, before: str) -> None:
    for name in _SIZES:
        value = getattr(tier, name, None)
        if value is not None and parse_bytes(value, f"{before}{name})") <= 0:
            raise ValueError(f"{before}{name}={value!r}) must be more than 0")
