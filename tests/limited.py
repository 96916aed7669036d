"""Tiers of a known speed without a measurement, and what the tests of probe, profiles and command line share.

Directories on one device are one path, whose bandwidth they share. One with limits is a path of its own; limits as high
as ``FAR_ABOVE`` are never felt.
"""

from __future__ import annotations

import glob
import os
import pathlib
import time
from collections.abc import Callable

import jax_mlp_offload as jmo
from jax_mlp_offload.profile import TierProfile, device_of, profile_name

FAR_ABOVE = "1TB"  # a second


def limited(path: str | os.PathLike[str], read_limit: str = FAR_ABOVE, write_limit: str = FAR_ABOVE) -> jmo.File:
    """A directory that is a path of its own."""
    return jmo.File(path, read_limit=read_limit, write_limit=write_limit)


def profile_of(tier: jmo.File | jmo.Remote, mixed_bps: float) -> TierProfile:
    """A profile that says this of a tier; by its other figures the tier is faster, and all tiers are the same."""
    return TierProfile(
        name=profile_name(tier), read_bps=4e9, write_bps=4e9, mixed_bps=mixed_bps, read_latency_s=1e-4,
        write_latency_s=2e-4, record_bytes=2**26, device=device_of(tier), measured_at="2026-01-02T03:04:05+00:00",
        hostname="node1",
    )  # fmt: skip


def probe_files(root: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The files of a probe's records in a directory; takes it well if they vanish meanwhile."""
    return [pathlib.Path(path) for path in glob.glob(f"{os.fspath(root)}/jmo-*/0-probe/*/c/*/*")]


def wait_for(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Waits until it is true."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.01)
