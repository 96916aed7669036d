"""The op ``jmo_update`` in JAX programs: one call a bucket, inside a fully manual ``shard_map`` where there is a mesh.

What always holds: every call of one step gets the same ticket and returns one; they are joined with ``max``, poison
being the largest. Nothing here holds a device pointer or a step number: calls carry the store's, the optimizer's and the
bucket's small numbers, so that compilation caches hit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_mlp_offload.plan import Plan

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
    """What one optimizer's ops need to know."""

    store: int
    instance: int
    plan: Plan
    reads_params: tuple[bool, ...]  # by bucket
    mesh: Mesh | None  # None: one device, or inside a manual shard_map already
    specs: tuple[PartitionSpec, ...]  # by leaf, where there is a mesh

    def make(self) -> Callable[[Array, Array, list[Array], list[Array]], tuple[Array, list[Array | None]]]:
        """A jitted function (ticket, hyper, grads, params) -> (ticket, results).

        Results are optax's updates (float32) for float32 params, and the new params for 16-bit ones; leaves in no
        bucket have none (``None``). ``params`` may hold None for leaves whose op does not read them.
        """
        return jax.jit(self._run)

    def _run(
        self, ticket: Array, hyper: Array, grads: list[Array], params: list[Array]
    ) -> tuple[Array, list[Array | None]]:
        used = [leaf for bucket in self.plan.buckets for leaf in bucket.leaves]
        read = [
            leaf
            for bucket, reads in zip(self.plan.buckets, self.reads_params, strict=True)
            if reads
            for leaf in bucket.leaves
        ]
        body = self._on_device
        if self.mesh is not None:
            spec = self.specs
            grads = [self._place(leaf, i) for i, leaf in enumerate(grads)]
            params = [self._place(leaf, i) for i, leaf in enumerate(params)]
            body = jax.shard_map(
                body,
                mesh=self.mesh,
                in_specs=(PartitionSpec(), PartitionSpec(), [spec[i] for i in used], [spec[i] for i in read]),
                out_specs=(PartitionSpec(), [spec[i] for i in used]),
                check_vma=False,
            )
        else:
            ticket = one_device_p.bind(ticket)
        new_ticket, outs = body(ticket, hyper, [grads[i] for i in used], [params[i] for i in read])
        results: list[Array | None] = [None] * len(grads)
        for leaf, out in zip(used, outs, strict=True):
            results[leaf] = out
        return new_ticket, results

    def _place(self, leaf: Array, index: int) -> Array:
        """On Explicit axes a gradient may be typed otherwise than its param: it is resharded, as optax's ops would."""
        assert self.mesh is not None
        if leaf is None or any(kind != AxisType.Explicit for kind in self.mesh.axis_types):
            return leaf
        placed: Array = jax.sharding.reshard(leaf, NamedSharding(self.mesh, self.specs[index]))
        return placed

    def _on_device(
        self, ticket: Array, hyper: Array, grads: Sequence[Array], params: Sequence[Array]
    ) -> tuple[Array, list[Array]]:
        """All buckets of one device; the arrays are its shards."""
        tickets, outs = [], []
        grads, params = list(grads), list(params)
        for index, (bucket, reads) in enumerate(zip(self.plan.buckets, self.reads_params, strict=True)):
            count = len(bucket.leaves)
            mine, grads = grads[:count], grads[count:]
            mine_params: list[Array] = []
            if reads:
                mine_params, params = params[:count], params[count:]
            dtype = jnp.dtype(self.plan.leaves[bucket.leaves[0]].dtype)
            call = jax.ffi.ffi_call(
                "jmo_update",
                [jax.ShapeDtypeStruct((1,), jnp.uint32), *(jax.ShapeDtypeStruct(g.shape, dtype) for g in mine)],
                has_side_effect=True,
            )
            new_ticket, *results = call(
                ticket,
                hyper,
                *mine,
                *mine_params,
                store=np.int64(self.store),
                instance=np.int64(self.instance),
                bucket=np.int64(index),
            )
            tickets.append(new_ticket)
            outs.extend(results)
        joined = tickets[0]
        for other in tickets[1:]:
            joined = jnp.maximum(joined, other)
        return joined, outs


def _one_device_lowering(ctx: Any, ticket: Any) -> list[Any]:
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices and devices > 1:
        raise ValueError(
            f"jax_mlp_offload: this program runs on {devices} devices, but the optimizer does not know how the params are "
            "sharded over them; pass mesh= and param_specs= (a tree of PartitionSpec or NamedSharding) to it"
        )
    return [ticket]


# Identity on the ticket. At lowering, where the number of devices is known, it refuses a program on several devices
# whose shardings were not given: XLA would say only "Side-effect HLO must have sharding".
one_device_p = Primitive("jmo_one_device")
one_device_p.def_impl(lambda ticket: ticket)
one_device_p.def_abstract_eval(lambda ticket: ticket)
mlir.register_lowering(one_device_p, _one_device_lowering)
