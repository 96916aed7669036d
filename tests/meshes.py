"""Meshes, specs and sharded trees for tests, in one process or several."""

from __future__ import annotations

import re
from collections import Counter

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_mlp_offload as jmo
from tests.support import assert_close, make_step, run_reference

P = PartitionSpec


def mesh_of(explicit=False, **axes):
    """A mesh of the first devices, such as ``mesh_of(data=2, fsdp=4)``."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))


def shard(tree, mesh, specs):
    """A tree of host arrays (the same in every process), sharded by a tree of specs."""

    def place(x, spec):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    return jax.tree.map(place, tree, specs)


def gathered(tree, mesh):
    """A tree of sharded arrays as host arrays, whole in every process."""
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), whole)


def train(tx, params, grads, mesh, specs, donate=True):
    """Sharded params and state after one step a gradient tree."""
    step = make_step(tx, donate=donate)
    params = shard(params, mesh, specs)
    state = jax.jit(tx.init)(params)
    for grad in grads:
        params, state = step(params, state, shard(grad, mesh, specs))
    return jax.block_until_ready(params), state


def collectives(compiled):
    """How often (kind, type of one result, without its layout) occurs among a compiled program's collectives."""
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|collective-broadcast"
    count = Counter()
    for results, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text()):
        count.update((kind, result) for result in re.findall(r"\w+\[[\d,]*\]", results))
    return count


def host(tree):
    """Copies that outlive donation."""
    return jax.tree.map(np.array, tree)


def check(first, recorded, new, opt_state, plain=None):
    """Masters and moments are those of plain optax on the recorded gradients."""
    masters, moments = run_reference(plain or optax.adamw(1e-2), first, recorded)
    assert_close(jmo.read_masters(opt_state, new), masters)
    assert_close(jmo.read_state(opt_state), moments)


def places(tree):
    """Of each leaf, which part of it lies on which device."""
    return [leaf.sharding.devices_indices_map(leaf.shape) for leaf in jax.tree.leaves(tree)]
