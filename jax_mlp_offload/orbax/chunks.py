"""The chunks in which a leaf is written into a checkpoint: those of plain optax's array, where they are not too large.

A leaf is one zarr array. Where a shard of it is small, its chunks are those that Orbax itself would choose, so that the
metadata is the same; a larger one has smaller chunks, each of which is a run of the flat shard, and can be written with
little memory. Pure functions.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from jax_mlp_offload.division import Box, Shard, box_of, chunk_ranges, chunk_shape

CHUNK_ELEMENTS = 4 * 2**20  # 16 MiB of float32: most elements that are put together at once


def shards_of(shape: tuple[int, ...], sharding: jax.sharding.Sharding, process: int) -> list[Shard]:
    """The shards that this process writes: those whose first device is its own. Nothing is said of where they lie."""
    owners: dict[Box, int] = {}
    indices: Any = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        owners.setdefault(box_of(index, shape), device.process_index)
    return [Shard(0, box, ()) for box, owner in owners.items() if owner == process]


def written_shape(shape: tuple[int, ...], sharding: jax.sharding.Sharding, replica_parallel: bool) -> tuple[int, ...]:
    """Orbax's write shape of a leaf, which is that of its chunks.

    Args:
      shape: of the whole leaf.
      sharding: of the leaf.
      replica_parallel: whether Orbax has each replica write a part.
    """
    local = sharding.shard_shape(shape)
    if math.prod(local) > CHUNK_ELEMENTS:
        return chunk_shape(local, shape, CHUNK_ELEMENTS)
    boxes = {str(index) for index in sharding.devices_indices_map(shape).values()}
    replicas = len(sharding.device_set) // len(boxes)
    if replica_parallel and replicas > 1:
        axis = next((i for i, size in enumerate(local) if size % replicas == 0), None)
        if axis is not None:
            local = tuple(size // replicas if i == axis else size for i, size in enumerate(local))
    return local


def ranges_of(shard: Shard, whole: tuple[int, ...]) -> list[tuple[int, int]]:
    """The runs of a flat shard that are written at once, the same for all sections."""
    return list(chunk_ranges(shard.shape, chunk_shape(shard.shape, whole, CHUNK_ELEMENTS)))
