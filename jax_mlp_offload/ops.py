"""The ops of an update in JAX programs: one a bucket, inside a fully manual ``shard_map`` where there is a mesh.

On the CPU that is ``jmo_update``. On accelerators it comes in two halves (``calls.py``): ``jmo_push`` hands gradients and
params over and returns at once; when all buckets of a device have been pushed, ``jmo_pull`` waits for the results.

What always holds: every call of one step gets the same ticket and returns one; they are joined with ``max``, poison
being the largest; where a mesh spans processes, over all of them, once a step.
Nothing here holds a device pointer or a step number: calls carry the store's, the optimizer's and the bucket's small
numbers, so that compilation caches hit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mlp_offload.calls import TICKET, Operands, run_split, run_whole
from jax_mlp_offload.plan import Plan
from jax_mlp_offload.replicas import Part
from jax_mlp_offload.shardings import Layout, explicit_part

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Program:
    """What one optimizer's ops need to know.

    Attributes:
      store: number of the store.
      instance: number of the optimizer in it.
      plan: of one device.
      parts: what the plan counts as leaves.
      reads_params: by bucket, whether its op gets the params.
      layout: where the leaves lie.
      split: whether the devices are accelerators.
    """

    store: int
    instance: int
    plan: Plan
    parts: tuple[Part, ...]
    reads_params: tuple[bool, ...]
    layout: Layout
    split: bool = False

    def make(self) -> Callable[[Array, Array, list[Array], list[Array]], tuple[Array, list[Array | None]]]:
        """A jitted function (ticket, hyper, grads, params) -> (ticket, results).

        Results are optax's updates (float32) for float32 params, and the new params for 16-bit ones; leaves in no
        bucket have none (``None``). ``params`` may hold None for leaves whose op does not read them.
        """
        return jax.jit(self._run)

    def _run(
        self, ticket: Array, hyper: Array, grads: list[Array], params: list[Array]
    ) -> tuple[Array, list[Array | None]]:
        if self.split and getattr(jax.config, "jax_disable_jit", False):
            raise ValueError(
                "jax_mlp_offload: on a GPU an update is two calls of one program; take it out of jax.disable_jit()"
            )
        used = self._leaves([True] * len(self.plan.buckets))
        read = self._leaves(self.reads_params)
        body: Callable[..., tuple[Array, dict[int, Array]]] = self._on_device
        wrapped = self.layout.wrapped
        if wrapped:
            spec = {leaf: self.layout.spec(leaf) for leaf in used}
            grads = [self._place(leaf, spec.get(i)) for i, leaf in enumerate(grads)]
            params = [self._place(leaf, spec.get(i)) for i, leaf in enumerate(params)]
            body = jax.shard_map(
                body,
                mesh=jax.sharding.get_abstract_mesh() if self.layout.manual else self.layout.mesh,
                axis_names=set(wrapped),
                in_specs=(PartitionSpec(), PartitionSpec(), spec, {leaf: spec[leaf] for leaf in read}),
                out_specs=(PartitionSpec(), spec),
                check_vma=False,
            )
        elif self.layout.mesh is None and not self.layout.manual:
            ticket = one_device_p.bind(ticket, platform=self.layout.platform)
        new_ticket, outs = body(ticket, hyper, {i: grads[i] for i in used}, {i: params[i] for i in read})
        return new_ticket, [outs.get(leaf) for leaf in range(len(grads))]

    def _leaves(self, wanted: Sequence[bool]) -> list[int]:
        """The leaves of those buckets."""
        buckets = [bucket for bucket, want in zip(self.plan.buckets, wanted, strict=True) if want]
        return [leaf for bucket in buckets for part in bucket.leaves for leaf in self.parts[part].leaves]

    def _place(self, leaf: Array, spec: PartitionSpec | None) -> Array:
        """On Explicit axes a gradient may be typed otherwise than its param: it is resharded, as optax's ops would."""
        mesh = self.layout.mesh
        assert mesh is not None
        if leaf is None or spec is None or AxisType.Explicit not in mesh.axis_types:
            return leaf
        where = jax.sharding.get_abstract_mesh() if self.layout.manual else mesh
        placed: Array = jax.sharding.reshard(leaf, NamedSharding(where, explicit_part(spec, mesh)))
        return placed

    def _on_device(
        self, ticket: Array, hyper: Array, grads: dict[int, Array], params: dict[int, Array]
    ) -> tuple[Array, dict[int, Array]]:
        """All buckets of one device; the arrays are its shards, by leaf."""
        results: dict[int, Array] = {}
        operands = []
        for bucket, reads in zip(self.plan.buckets, self.reads_params, strict=True):
            parts = [self.parts[part] for part in bucket.leaves]
            mine = [part.cut([grads[leaf] for leaf in part.leaves]) for part in parts]
            mine_params = [part.cut([params[leaf] for leaf in part.leaves]) for part in parts] if reads else []
            dtype = jnp.dtype(self.plan.leaves[bucket.leaves[0]].dtype)
            cut = [leaf for leaf, part in enumerate(parts) if reads and part.axes]
            operands.append(Operands(mine, mine_params, dtype, cut))
        run = run_split if self.split else run_whole
        tickets, outs = run(self.store, self.instance, ticket, hyper, operands)
        for bucket, out in zip(self.plan.buckets, outs, strict=True):
            for part, result in zip((self.parts[part] for part in bucket.leaves), out, strict=True):
                shards = part.join(result, [grads[leaf].shape for leaf in part.leaves])
                results.update(zip(part.leaves, shards, strict=True))
        joined = functools.reduce(jnp.maximum, tickets)
        return self._agree(joined) if self.layout.spans else joined, results

    def _agree(self, ticket: Array) -> Array:
        """The largest ticket of all processes, which this one's engine is told."""
        axes = self.layout.manual if self.layout.mesh is None else self.layout.mesh.axis_names
        agreed = jax.lax.pmax(ticket, axes)
        call = jax.ffi.ffi_call("jmo_agree", TICKET, has_side_effect=True, input_output_aliases={1: 0})
        told: Array = call(ticket, agreed, store=np.int64(self.store), instance=np.int64(self.instance))
        return told


def _one_device_lowering(ctx: Any, ticket: Any, *, platform: str) -> list[Any]:
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices and devices > 1:
        raise ValueError(
            f"jax_mlp_offload: this program runs on {devices} devices, but the optimizer does not know how the params are "
            "sharded over them; pass mesh= and param_specs= (a tree of PartitionSpec or NamedSharding) to it"
        )
    platforms = ctx.module_context.platforms
    if ("cpu" in platforms) != (platform == "cpu"):
        raise ValueError(
            f"jax_mlp_offload: this program is for {', '.join(platforms)}, but the optimizer's params are taken to be on "
            f"{platform}; call init with params that are where the step runs"
        )
    return [ticket]


# Identity on the ticket. At lowering, where the devices are known, it refuses a program on several devices whose
# shardings were not given (XLA would say only "Side-effect HLO must have sharding"), and one on another platform.
one_device_p = Primitive("jmo_one_device")
one_device_p.def_impl(lambda ticket, platform: ticket)
one_device_p.def_abstract_eval(lambda ticket, platform: ticket)
mlir.register_lowering(one_device_p, _one_device_lowering)
