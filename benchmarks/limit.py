"""The least time that an update, or an iteration, can take: what every benchmark prints beside its own figure.

1. Of N records K fit in memory, so in each step from the second on N - K are read and as many are written.
2. A tier's *sustained* bandwidth is its bytes/s each way while it reads and writes 1:1. What was written to a tier in a
   step is what is read from it in the next, so reads and writes share one split, and bandwidths of tiers add up.
3. Transfers overlap with the kernel, so an update takes the longer of the two.

Pure; times in seconds, sizes in bytes, bandwidths in bytes/s.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class Overlap(enum.Enum):
    """What of an iteration runs at the same time as the update."""

    GIVEN = "gradients are given: the update alone"
    BARRIER = "the update begins when backward has ended"
    BACKWARD = "the update of a layer begins when its gradient is there"


@dataclasses.dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a tier's device can do, in bytes/s; not ``duplex``: one budget serves both directions."""

    read_bps: float
    write_bps: float
    duplex: bool = True

    @property
    def sustained_bps(self) -> float:
        """Bytes/s each way while it reads and writes 1:1.

        Raises:
          ValueError: if a direction has no bandwidth.
        """
        if self.read_bps <= 0 or self.write_bps <= 0:
            raise ValueError(f"{self}: bandwidths must be more than 0")
        if self.duplex:
            return min(self.read_bps, self.write_bps)
        return 1 / (1 / self.read_bps + 1 / self.write_bps)


@dataclasses.dataclass(frozen=True, slots=True)
class UpdateLimit:
    """Least bytes and seconds of one update."""

    moved_bytes: int  # each way
    io_s: float
    kernel_s: float

    @property
    def update_s(self) -> float:
        """Seconds of the update."""
        return max(self.io_s, self.kernel_s)


def moved_bytes(record_bytes: Sequence[int], slots: int) -> int:
    """Bytes that are read, and written, in each step: all records but the ``slots`` largest."""
    if slots < 0:
        raise ValueError(f"slots={slots} must not be negative")
    return sum(sorted(record_bytes, reverse=True)[slots:])


def update_limit(
    record_bytes: Sequence[int], slots: int, bandwidths: Sequence[Bandwidth], kernel_s: float
) -> UpdateLimit:
    """The limit of one update.

    Args:
      record_bytes: size of every record of this process.
      slots: how many of them fit in memory.
      bandwidths: one a tier; tiers on one device share one.
      kernel_s: seconds of the kernel over all records, in memory.

    Raises:
      ValueError: if records do not fit and there is no tier.
    """
    moved = moved_bytes(record_bytes, slots)
    if moved and not bandwidths:
        raise ValueError(f"{moved} bytes do not fit in {slots} slots, and there is no tier")
    total_bps = sum(bandwidth.sustained_bps for bandwidth in bandwidths)
    return UpdateLimit(moved, moved / total_bps if moved else 0.0, kernel_s)


def iteration_limit(overlap: Overlap, update_s: float, passes_s: float = 0.0, first_gradient_s: float = 0.0) -> float:
    """The limit of one iteration, in seconds.

    Args:
      overlap: see :class:`Overlap`.
      update_s: limit of the update.
      passes_s: seconds of forward and backward alone.
      first_gradient_s: from the start of the iteration until the update gets its first gradient.
    """
    if overlap is Overlap.GIVEN:
        return update_s
    if overlap is Overlap.BARRIER:
        return passes_s + update_s
    return max(passes_s, first_gradient_s + update_s)


def ideal_shares(bandwidths: Sequence[Bandwidth]) -> list[float]:
    """The part of the bytes that each tier should get."""
    speeds = [bandwidth.sustained_bps for bandwidth in bandwidths]
    return [speed / sum(speeds) for speed in speeds]
