"""Directories, by the native engine's I/O threads (O_DIRECT where the file system has it)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_mlp_offload import native
from jax_mlp_offload.backends.base import Backend, Place
from jax_mlp_offload.backends.folder import Folder
from jax_mlp_offload.exclusive import Sharing
from jax_mlp_offload.tiers import File

IO_THREADS = 2  # a tier and direction
IO_BLOCK_BYTES = 4 * 2**20


class DirectBackend(Backend):
    """A directory, by the native engine's I/O threads.

    Args:
      tier: the directory.
      engine: the native engine.
      sharing: how the store shares its devices with others.

    Raises:
      OSError: naming the path, if it cannot be made or written.
    """

    def __init__(self, tier: File, engine: Any, sharing: Sharing) -> None:
        self.tier = tier
        self._engine = engine
        self._folder = Folder(tier)
        self.lies_on(self._folder.device)
        self._turns = sharing.turns(self._folder.device)
        read_bps, write_bps = tier.number("read_limit") or 0, tier.number("write_limit") or 0
        self.number: int = engine.add_tier(True, read_bps, write_bps, IO_THREADS, IO_BLOCK_BYTES, self._turns.path)
        self._in_turns = self._turns.on
        engine.set_exclusive(self.number, self._in_turns)

    def free_bytes(self) -> int | None:
        """See :class:`Backend`."""
        return self._folder.free_bytes()

    def phase_begins(self, now_s: float) -> None:
        """See :class:`Backend`."""
        if self._turns.phase(now_s) != self._in_turns:
            self._in_turns = self._turns.on
            self._engine.set_exclusive(self.number, self._in_turns)

    def renew(self) -> None:
        """See :class:`Backend`."""
        self._folder.renew()

    def moved(self, size_bytes: int) -> None:
        """See :class:`Backend`."""
        self._turns.moved(size_bytes)

    def facts(self) -> dict[str, Any]:
        """See :class:`Backend`."""
        return {"exclusive": self._turns.facts() | self._engine.turns(self.number)}

    def add_array(self, array: str, records: int, record_bytes: int) -> None:
        """See :class:`Backend`."""
        self._folder.add_array(array, records, record_bytes)

    def read(self, place: Place, slot: int, crc: int, token: int) -> None:
        """See :class:`Backend`."""
        path = self._folder.path_to_read(place.array, place.index)
        self._engine.read(self.number, path, slot, place.size_bytes, crc, token)

    def write(self, place: Place, slot: int, token: int) -> None:
        """See :class:`Backend`."""
        path = self._folder.path_to_write(place.array, place.index, place.size_bytes)
        self._engine.write(self.number, path, slot, place.size_bytes, token)

    def moved_on(self, place: Place) -> None:
        """See :class:`Backend`."""
        self._folder.moved_on(place.array, place.index, place.size_bytes)

    def read_now(self, place: Place, target: np.ndarray[Any, Any], crc: int) -> None:
        """See :class:`Backend`."""
        path = self._folder.path_to_read(place.array, place.index)
        native.read_file(path, target, crc, self._engine.direct_in_use(self.number))

    def keep(self, place: Place, number: int) -> str | None:
        """See :class:`Backend`: a hard link."""
        return self._folder.keep(place.array, place.index, number)

    def path_to_keep(self, place: Place, number: int) -> str | None:
        """See :class:`Backend`: not where bandwidth or space are limited, since these files are counted in neither."""
        limited = any(self.tier.number(name) for name in ("read_limit", "write_limit", "capacity"))
        return None if limited else self._folder.path_to_keep(place.array, place.index, number)

    def let_go(self, number: int) -> None:
        """See :class:`Backend`."""
        self._folder.let_go(number)

    def forked(self) -> None:
        """See :class:`Backend`."""
        self._folder.forked()
        self._turns.close()

    def close(self) -> None:
        """See :class:`Backend`."""
        self._folder.close()
        self._turns.close()
