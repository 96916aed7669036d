"""How a leaf of an offloaded state is written into a checkpoint: as plain optax's array would be.

A leaf is one zarr array. Where a shard of it is small, its chunks are those that Orbax itself would choose, so that the
metadata is the same; a larger one has smaller chunks, each of which is a run of the flat shard, and can be written with
little memory. Pure functions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jax_mlp_offload.division import Box, Shard, box_of, chunk_ranges, chunk_shape

if TYPE_CHECKING:
    from jax_mlp_offload.orbax.saving import Job, Saved

CHUNK_ELEMENTS = 4 * 2**20  # 16 MiB of float32: most elements that are put together at once


@dataclasses.dataclass(frozen=True, eq=False)
class OffloadedLeaf:
    """Stands in a tree where plain optax has an array.

    Attributes:
      shape: of the whole leaf.
      dtype: of the array in the checkpoint.
      sharding: as a param's.
      job: the checkpoint that it is for.
      saved: the state that it is of; None: it is zero.
      leaf: its index in that.
      section: ``"mu"`` or ``"nu"``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding
    job: Job
    saved: Saved | None = None
    leaf: int = 0
    section: str = ""

    @property
    def ndim(self) -> int:
        """Its dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in the checkpoint, before compression."""
        return self.size * self.dtype.itemsize


def shards_of(leaf: OffloadedLeaf, process: int) -> list[Shard]:
    """The shards that this process writes: those whose first device is its own. Nothing is said of where they lie."""
    owners: dict[Box, int] = {}
    indices: Any = leaf.sharding.devices_indices_map(leaf.shape)
    for device, index in indices.items():
        owners.setdefault(box_of(index, leaf.shape), device.process_index)
    return [Shard(leaf.leaf, box, ()) for box, owner in owners.items() if owner == process]


def written_shape(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, replica_parallel: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(Orbax's write shape, shape of chunks) of a leaf.

    Args:
      shape: of the whole leaf.
      sharding: of the leaf.
      replica_parallel: whether Orbax has each replica write a part.
    """
    local = sharding.shard_shape(shape)
    if math.prod(local) > CHUNK_ELEMENTS:
        chunk = chunk_shape(local, shape, CHUNK_ELEMENTS)
        return chunk, chunk
    boxes = {str(index) for index in sharding.devices_indices_map(shape).values()}
    replicas = len(sharding.device_set) // len(boxes)
    if replica_parallel and replicas > 1:
        axis = next((i for i, size in enumerate(local) if size % replicas == 0), None)
        if axis is not None:
            local = tuple(size // replicas if i == axis else size for i, size in enumerate(local))
    return local, local


def ranges_of(shard: Shard, whole: tuple[int, ...]) -> list[tuple[int, int]]:
    """The runs of a flat shard that are written at once, the same for all sections."""
    return list(chunk_ranges(shard.shape, chunk_shape(shard.shape, whole, CHUNK_ELEMENTS)))
