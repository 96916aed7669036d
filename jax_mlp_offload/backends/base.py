"""How records get to a tier and back: what the driver asks of each.

Thread contract: a backend is used by the driver's thread only, but for ``add_array``, which any thread may call before
others use that array; ``stop`` and ``close``, which come when the driver has ended or is given up; and ``forked``.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np

from jax_mlp_offload.placement import QUEUE, TierSpec
from jax_mlp_offload.tiers import Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A record in a tier: row ``index`` of the array ``array``."""

    array: str
    index: int
    size_bytes: int


class Backend(abc.ABC):
    """One tier's mechanism. Transfers end as events ``read`` and ``written`` of the native engine, with their token.

    What always holds: a transfer that began ends with one event, and touches its slot no more after that. (One that
    storage never lets go of has none, also at the end.)
    """

    tier: Tier
    device: int | None = None  # number of the storage device, where the tier has all of its bandwidth
    file_system: int | None = None  # number of the file system that it shares; None: one of its own
    queue: int = QUEUE  # requests under way each way

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    def spec(self) -> TierSpec:
        """What placement is told of the tier beforehand."""
        size = self.tier.number
        return TierSpec(
            self.name,
            size("capacity"),
            size("read_limit"),
            size("write_limit"),
            device=self.device,
            queue=self.queue,
            free_bytes=self.free_bytes(),
            file_system=self.file_system,
        )

    def lies_on(self, file_system: int) -> None:
        """The tier is a directory there; without limits it has the bandwidth of that device."""
        self.file_system = file_system
        limits = self.tier.number("read_limit"), self.tier.number("write_limit")
        self.device = file_system if limits == (None, None) else None

    def free_bytes(self) -> int | None:
        """Bytes that are free there now; None: unknown, or without end."""
        return None

    def phase_begins(self, now_s: float) -> None:  # noqa: B027 (most have nothing to do here)
        """An update phase begins."""

    def renew(self) -> None:  # noqa: B027
        """Its process lives; called every few minutes."""

    def moved(self, size_bytes: int) -> None:  # noqa: B027
        """A transfer ended well."""

    @abc.abstractmethod
    def add_array(self, array: str, records: int, record_bytes: int) -> None:
        """Prepares for the records of one bucket on one device. A tier that cannot take it now fails its first write."""

    @abc.abstractmethod
    def read(self, place: Place, slot: int, crc: int, token: int) -> None:
        """Begins to fill a slot with what was last written to this place; compares the CRC32C."""

    @abc.abstractmethod
    def write(self, place: Place, slot: int, token: int) -> None:
        """Begins to write a slot.

        Raises:
          OSError: if the tier does not take it; there is no event then.
        """

    @abc.abstractmethod
    def moved_on(self, place: Place) -> None:
        """The record lives elsewhere now. Of no effect where this tier does not have it."""

    @abc.abstractmethod
    def read_now(self, place: Place, target: np.ndarray[Any, Any], crc: int) -> None:
        """Reads a record into uint8 ``[size_bytes]``, outside of a step.

        Raises:
          RuntimeError: if it cannot be read, or its CRC32C is wrong.
        """

    def keep(self, place: Place, number: int) -> str | None:
        """Makes what is stored there outlive the record's next write; returns the path of a file that holds it.

        Args:
          place: a record that is stored here.
          number: of whoever keeps it, for ``let_go``.

        Returns:
          None where this tier cannot do that without copying.
        """
        return None

    def path_to_keep(self, place: Place, number: int) -> str | None:
        """Where a record that is in memory may be written for whoever keeps it; on any thread.

        Returns:
          None where such a file would cost the tier what its owner does not want to give.
        """
        return None

    def let_go(self, number: int) -> None:  # noqa: B027
        """Removes what was kept under this number."""

    def facts(self) -> dict[str, Any]:
        """What this mechanism adds to the tier's statistics."""
        return {}

    def forked(self) -> None:  # noqa: B027
        """This is a forked child, which must not hold the parent's locks: lets go of them, and of nothing else."""

    def stop(self) -> None:  # noqa: B027 (most have nothing to do here)
        """Ends what is under way, with events. The native engine closes next."""

    @abc.abstractmethod
    def close(self) -> None:
        """Removes what was stored. Idempotent."""
