"""``accumulate_steps`` on meshes: accumulators lie where the params do, and nothing more is communicated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_mlp_offload as jmo
from tests.meshes import collectives, mesh_of, shard
from tests.support import (
    BF16,
    assert_bits_equal,
    assert_close,
    make_params,
    make_step,
    record_gradients,
    run_reference,
)
from tests.test_accumulate import ADAMW, STEPS, conditional_holds_all_calls

P = PartitionSpec


SHAPES = {"norm": (48,), "rows": (1024, 48)}, {"columns": (48, 1024), "scale": ()}
SPECS = {"full": {"norm": P(), "rows": P("fsdp", None)}, "low": {"columns": P(None, "fsdp"), "scale": P()}}
SGD_WITHOUT_MOMENTUM = (jmo.sgd, optax.sgd, {"learning_rate": 0.125})
OPTIONS = {"learning_rate": 1e-2, "weight_decay": 0.1}


def make_mixed_params():
    full, low = SHAPES
    return {"full": make_params(full), "low": make_params(low, BF16)}


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(explicit, two_tiers):
    """Accumulators lie where the params do, from init on, and are never gathered; MultiSteps' numbers on that mesh."""
    params = make_mixed_params()
    grads = record_gradients(params, STEPS)
    mesh = mesh_of(explicit, fsdp=8)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)

    def train(tx, params, grads):
        step = make_step(tx, donate=True)
        params = shard(params, mesh, SPECS)
        state = tx.init(params)
        program = step.lower(params, state, shard(params, mesh, SPECS)).compile()
        for grad in grads:
            for leaf, sharding in zip(jax.tree.leaves(state.acc_grads), jax.tree.leaves(placed), strict=True):
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            params, state = step(params, state, shard(grad, mesh, SPECS))
        return jax.block_until_ready(params), state, program

    with jax.set_mesh(mesh), jmo.Store(*two_tiers, host_memory=800_000, subgroup_elements=4096) as store:
        tx = jmo.adamw(**OPTIONS, store=store, accumulate_steps=3)
        new, state, program = train(tx, params, grads)
        assert conditional_holds_all_calls(program.as_text())
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, grads))
        masters, expected, _ = train(optax.MultiSteps(optax.adamw(**OPTIONS), 3), *wide)
        assert_bits_equal(state.acc_grads, expected.acc_grads)
        assert_close(jmo.read_masters(state, new), masters)
        assert_close(jmo.read_state(state), expected)
        assert store.stats()["misses"] > 0
    with jax.set_mesh(mesh), jmo.Store() as store:
        _, _, plain = train(jmo.adamw(**OPTIONS, store=store), params, [])
        assert collectives(program) == collectives(plain)


@pytest.mark.parametrize(
    ("factory", "replicated", "eager"),
    [
        (ADAMW, "gradients", False),
        (ADAMW, "accumulators", True),
        (SGD_WITHOUT_MOMENTUM, "gradients", True),
        (SGD_WITHOUT_MOMENTUM, "accumulators", False),
    ],
)
def test_explicit_axes_with_accumulators_sharded_otherwise(factory, replicated, eager):
    """Types may differ between gradients, accumulators and params; the state keeps those it came with."""
    offloaded, plain, options = factory
    params = make_params({"w": (64, 16)})
    grads = record_gradients(params, 3)
    mesh = mesh_of(explicit=True, fsdp=8)
    rows, everywhere = NamedSharding(mesh, P("fsdp", None)), NamedSharding(mesh, P(None, None))
    with jax.set_mesh(mesh), jmo.Store() as store:
        tx = offloaded(**options, store=store, accumulate_steps=2)
        update = tx.update if eager else jax.jit(tx.update)
        new = jax.device_put(params, rows)
        state = tx.init(new)
        if replicated == "accumulators":
            state = state._replace(acc_grads=jax.device_put(state.acc_grads, everywhere))
        given = state.acc_grads["w"].sharding
        for grad in grads:
            grad = jax.device_put(grad, everywhere if replicated == "gradients" else rows)
            updates, state = update(grad, state, new)
            new = optax.apply_updates(new, updates)
            assert state.acc_grads["w"].sharding == given
        expected, accumulated = run_reference(optax.MultiSteps(plain(**options), 2), params, grads)
        assert_close(new, expected)
        assert_close(state.acc_grads, accumulated.acc_grads)


def test_inside_a_manual_shard_map():
    mesh = mesh_of(fsdp=2)
    params, specs = make_params(SHAPES[0]), SPECS["full"]
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, accumulate_steps=2)
        of_state = optax.MultiStepsState(P(), P(), jmo.OffloadState(P(), P()), specs)

        def mapped(function, out_specs, *in_specs):
            mapping = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
            return jax.jit(mapping)

        step = mapped(make_step(tx), (specs, of_state), specs, of_state, specs)
        p = shard(params, mesh, specs)
        state = mapped(tx.init, of_state, specs)(p)
        for grad in grads:
            p, state = step(p, state, shard(grad, mesh, specs))
        expected, _ = run_reference(optax.MultiSteps(optax.adamw(1e-2), 2), params, grads)
        assert_close(p, expected)
