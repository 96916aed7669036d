"""Who updates what where params are replicated: each replica its share, once (ZeRO stage 1, Rajbhandari et al. 2020).

1. A leaf that is sharded over every axis of the mesh is an operand of its own, as it is.
2. A leaf that is replicated along some axes is taken flat and cut into one share for each replica; what the shares
   become is gathered along those axes.
3. Small leaves with the same axes, dtype and decay are packed: cut as if they were one leaf, so that a scalar is
   updated once and a hundred norms are gathered by one collective. Packs come last: they wait for all their gradients.

What always holds: all shares of a part have one size; what is missing at the end is filled with NaN, which stays NaN
whatever an update does to it, so that no hash of it changes. ``cut`` and ``join`` run inside a shard_map over all axes;
only ``join`` communicates. Pure functions, safe from any thread.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jax_mlp_offload.plan import LeafSpec

Array = jax.Array
PACKED_BELOW = 2**16  # elements of a device's shard
_NAMES_SHOWN = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One operand of an op: some leaves of a device, and the axes along which its replicas share them.

    Attributes:
      leaves: indices in tree order.
      sizes: elements of each leaf's shard.
      axes: mesh axes along which they are replicated; empty: there are no replicas.
      replicas: how many there are.
    """

    leaves: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[str, ...] = ()
    replicas: int = 1

    @property
    def share(self) -> int:
        """Elements of the operand."""
        return -(-sum(self.sizes) // self.replicas)

    def cut(self, shards: Sequence[Array]) -> Array:
        """This replica's share of the leaves' shards, [share]; a leaf without replicas as it is."""
        if not self.axes:
            return shards[0]
        dtypes = {shard.dtype for shard in shards}
        if len(dtypes) > 1:  # gradients may differ where params do not; all float formats fit into float32
            shards = [shard.astype(jnp.float32) for shard in shards]
        flat = [shard.reshape(-1) for shard in shards]
        missing = self.share * self.replicas - sum(self.sizes)
        if missing:
            flat.append(jnp.full((missing,), jnp.nan, flat[-1].dtype))
        whole = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
        begin = jax.lax.axis_index(self.axes) * self.share
        return jax.lax.dynamic_slice_in_dim(whole, begin, self.share)

    def join(self, share: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """The leaves' shards, from every replica's share."""
        if not self.axes:
            return [share.reshape(shapes[0])]
        # as bits: some backends gather 16-bit floats as float32, twice the bytes
        bits = jax.lax.bitcast_convert_type(share, jnp.uint16) if share.dtype.itemsize == 2 else share
        whole = jax.lax.all_gather(bits, self.axes, tiled=True)
        whole = jax.lax.bitcast_convert_type(whole, share.dtype) if bits is not share else whole
        begins = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return [
            whole[begin : begin + size].reshape(shape)
            for begin, size, shape in zip(begins, self.sizes, shapes, strict=True)
        ]


def make_parts(
    leaves: Sequence[LeafSpec], axes: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> list[tuple[Part, LeafSpec]]:
    """Divides leaves among replicas.

    Args:
      leaves: one device's shards, in tree order; those without elements take no part.
      axes: by leaf, the mesh axes along which it is replicated.
      sizes: of the mesh's axes.

    Returns:
      The parts in the order in which they make up buckets, each with what it is to the plan.
    """
    alone: list[tuple[Part, LeafSpec]] = []
    packs: dict[tuple[tuple[str, ...], str, bool], list[int]] = {}
    for index, leaf in enumerate(leaves):
        along = tuple(axis for axis in axes[index] if sizes[axis] > 1)
        if not leaf.elements:
            continue
        if along and leaf.elements < PACKED_BELOW:
            packs.setdefault((along, leaf.dtype, leaf.decay), []).append(index)
        else:
            alone.append(_part([index], leaves, along, sizes))
    return alone + [_part(members, leaves, along, sizes) for (along, _, _), members in packs.items()]


def _part(
    members: Sequence[int], leaves: Sequence[LeafSpec], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[Part, LeafSpec]:
    replicas = math.prod(sizes[axis] for axis in axes)
    part = Part(tuple(members), tuple(leaves[i].elements for i in members), axes, replicas)
    names = [leaves[i].path for i in members]
    more = [f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    first = leaves[members[0]]
    return part, LeafSpec(", ".join(names[:_NAMES_SHOWN] + more), part.share, first.dtype, first.decay)
