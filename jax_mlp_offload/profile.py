"""What was measured of a tier, and the JSON file that keeps it.

The file is ``{"format": 1, "tiers": [...]}``, one entry a tier with the fields of :class:`TierProfile`. ``probe`` puts a
``tiers.json`` with its own entry into each directory, where the store finds it; a key-value store's is passed to it.

What always holds: a file is written whole or not at all; an entry that was read makes sense (every bandwidth, latency
and size is a finite number above 0). Imports nothing of jax, tensorstore or the extension. Thread contract: any thread.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jax_mlp_offload.tiers import File, Tier

_log = logging.getLogger("jax_mlp_offload")
_FORMAT = 1

FILE_NAME = "tiers.json"
"""The profile beside the data, in a tier's directory."""

_TOO_MUCH = 1e18  # of bytes, bytes a second and seconds


@dataclasses.dataclass(frozen=True, slots=True)
class TierProfile:
    """How fast a tier is.

    Args:
      name: of the tier: see :func:`profile_name`.
      read_bps: bytes/s while it only reads.
      write_bps: bytes/s while it only writes.
      mixed_bps: bytes/s each way while it reads and writes 1:1; what placement wants.
      read_latency_s: of one small read at a time, the median.
      write_latency_s: of one small write at a time, the median.
      record_bytes: size of the records that were moved.
      device: what the tier is on: tiers with the same one share its bandwidth. See :func:`device_of`.
      measured_at: ISO 8601 time, with its offset from UTC.
      hostname: where it was measured.

    Raises:
      ValueError: if a value makes no sense; the message names it.
    """

    name: str
    read_bps: float
    write_bps: float
    mixed_bps: float
    read_latency_s: float
    write_latency_s: float
    record_bytes: int
    device: str
    measured_at: str
    hostname: str

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "str":
                if not isinstance(value, str) or not value:
                    raise ValueError(f"{field.name}={value!r} must be text that is not empty")
                continue
            kinds = (int,) if field.type == "int" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < _TOO_MUCH:
                what = "whole number" if field.type == "int" else "number"
                raise ValueError(f"{field.name}={value!r:.40} must be a {what} above 0 and below {_TOO_MUCH:g}")
        try:
            datetime.datetime.fromisoformat(self.measured_at)
        except ValueError:
            raise ValueError(f"measured_at={self.measured_at!r} must be an ISO 8601 time") from None


ProfileLike = str | os.PathLike[str] | Mapping[str, Any] | Sequence[TierProfile]
"""A profile: the file's path, its content, or its entries."""


def profile_name(tier: Tier) -> str:
    """The name by which a profile knows a tier: a directory's real path, a key-value store's URL without secrets."""
    return os.path.realpath(tier.path) if isinstance(tier, File) else tier.name.rstrip("/")


def device_of(tier: Tier) -> str:
    """The device a tier is on: ``major:minor`` of a directory's, else the tier's name.

    A directory that is not there yet is on the device of its nearest parent. Partitions of one disk, subvolumes of one
    pool and buckets of one endpoint have devices of their own here: that they share a bandwidth is not to be seen.

    Raises:
      OSError: if the directory may not be looked at.
    """
    if not isinstance(tier, File):
        return profile_name(tier)
    device = os.stat(nearest_parent(tier)).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def nearest_parent(tier: File) -> str:
    """The tier's real path, or the nearest of its parents that exists."""
    path = os.path.realpath(tier.path)
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def as_json(profiles: Sequence[TierProfile]) -> dict[str, Any]:
    """The content of a profile's file."""
    return {"format": _FORMAT, "tiers": [dataclasses.asdict(profile) for profile in profiles]}


def write_profile(path: str | os.PathLike[str], profiles: Sequence[TierProfile]) -> None:
    """Writes a profile's file, mode 0644, whole or not at all.

    Raises:
      OSError: naming the path, if that is impossible; a file that was there is as it was.
    """
    path = os.path.abspath(path)
    new = f"{path}.{secrets.token_hex(4)}.new"
    try:
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o644)  # whatever the umask
                json.dump(as_json(profiles), file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.rename(new, path)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as error:
        raise type(error)(
            error.errno, f"the profile {path!r} cannot be written: {os.strerror(error.errno or 0)}"
        ) from error


def read_profile(profile: ProfileLike) -> list[TierProfile]:
    """The entries of a profile.

    Raises:
      ValueError: if it cannot be read or is no profile; the message says which and what is wrong.
      TypeError: if it is something else altogether.
    """
    if isinstance(profile, Mapping):
        return _parse(profile, "profile")
    if isinstance(profile, (str, os.PathLike)):
        return _parse(_load(profile), f"profile {os.fspath(profile)!r}")
    if isinstance(profile, (list, tuple)) and all(isinstance(entry, TierProfile) for entry in profile):
        return list(profile)
    raise TypeError(f"profile is {profile!r}; give the path of a file that `probe` wrote, its content, or TierProfiles")


def find(tier: Tier, profile: ProfileLike | None = None) -> TierProfile | None:
    """The profile of a tier: from ``profile``, else from the ``tiers.json`` in its directory; None: there is none.

    What is wrong with a file beside the data is logged, and the file ignored.

    Raises:
      ValueError: if ``profile`` cannot be read, or is none.
      TypeError: likewise.
    """
    found = None if profile is None else _entry(tier, read_profile(profile))
    if found is None and isinstance(tier, File):
        beside = os.path.join(tier.path, FILE_NAME)
        try:
            if os.path.lexists(beside):
                found = _entry(tier, read_profile(beside))
        except ValueError as error:
            _log.warning("%s; it is ignored", error)
    return found


def _entry(tier: Tier, profiles: Sequence[TierProfile]) -> TierProfile | None:
    name = profile_name(tier)

    def is_it(profile: TierProfile) -> bool:
        known = os.path.realpath(profile.name) if isinstance(tier, File) else profile.name.rstrip("/")
        return known == name

    return next(filter(is_it, profiles), None)


def _load(path: str | os.PathLike[str]) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise ValueError(f"profile {os.fspath(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"profile {os.fspath(path)!r} is no JSON: {error}") from error


def _parse(content: Any, what: str) -> list[TierProfile]:
    if not isinstance(content, Mapping) or not isinstance(content.get("tiers"), list):
        raise ValueError(f'{what} is no profile: it must be {{"format": {_FORMAT}, "tiers": [...]}}')
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{what} has format {content.get('format')!r}; this version reads {_FORMAT}: run `probe` again"
        )
    known = [field.name for field in dataclasses.fields(TierProfile)]
    result: list[TierProfile] = []
    for index, entry in enumerate(content["tiers"]):
        where = f"{what}, tier {index}"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where} is {entry!r}; it must be an object")
        missing = [name for name in known if name not in entry]
        if missing:
            raise ValueError(f"{where} has no {', '.join(missing)}")
        try:
            result.append(TierProfile(**{name: entry[name] for name in known}))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return result
