"""Meshes of 1, 2, 4 and 8 CPU devices: the same numbers as plain optax on the same mesh, nothing gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_mlp_offload as jmo
from tests.support import assert_bits_equal, assert_close, make_params, make_step, record_gradients, run_reference

P = PartitionSpec
SHAPES = {"embed": (1024, 48), "norm": (48,), "out": (48, 512), "scale": ()}
SPECS = {"embed": P("fsdp", None), "norm": P(), "out": P(None, "fsdp"), "scale": P()}


def make_mesh(devices, explicit=False):
    if explicit:
        return jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    return Mesh(np.array(jax.devices()[:devices]), ("fsdp",))


def shard(tree, mesh, specs=SPECS):
    return jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), NamedSharding(mesh, s)), tree, specs)


def train(tx, params, grads, mesh):
    """Runs steps over sharded params; returns them whole, and the state."""
    step = make_step(tx, donate=True)
    params = shard(params, mesh)
    state = jax.device_put(tx.init(params), NamedSharding(mesh, P()))
    for grad in grads:
        params, state = step(params, state, shard(grad, mesh))
    return jax.block_until_ready(params), state


@pytest.mark.parametrize("explicit", [False, True])
def test_specs_are_taken_from_the_params(explicit):
    """Concrete params at init, or the types of an Explicit mesh: no param_specs needed."""
    params = make_params(SHAPES)
    grads = record_gradients(params, 3)
    mesh = make_mesh(8, explicit)
    with jax.set_mesh(mesh), jmo.Store() as store:
        new, state = train(jmo.adamw(1e-2, store=store), params, grads, mesh)
        elements = sum(leaf.size for leaf in params.values())
        assert store.stats()["record_bytes_total"] <= 1.02 * 8 * elements + 8 * 4096 * 2  # each once, in whole pages
        expected, _ = run_reference(optax.adamw(1e-2), params, grads)
        assert_close(new, expected)
        assert int(state.count) == 3


def test_two_axes_and_leaves_sharded_over_both(two_tiers):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "fsdp"))
    specs = {"embed": P(("fsdp", "data"), None), "norm": P("fsdp"), "out": P("data", "fsdp"), "scale": P()}
    params = make_params(SHAPES)
    grads = record_gradients(params, 4)
    with jmo.Store(*two_tiers, host_memory="2MB", subgroup_elements=4096) as store:
        tx = jmo.adam(1e-2, store=store, mesh=mesh, param_specs=specs)
        step = make_step(tx)
        p, state = shard(params, mesh, specs), tx.init(params)
        for grad in grads:
            p, state = step(p, state, shard(grad, mesh, specs))
        expected, _ = run_reference(optax.adam(1e-2), params, grads)
        assert_close(p, expected)


def test_large_buffers_with_backward_and_collectives(two_tiers):
    """Gradients from a sharded model whose backward pass has collectives; ops run while it goes on."""
    mesh = make_mesh(2)
    rng = np.random.default_rng(0)
    params = {f"w{i}": jnp.asarray(rng.normal(size=(512, 512)) / 22, jnp.float32) for i in range(6)}
    specs = dict.fromkeys(params, P("fsdp", None))
    x = jnp.asarray(rng.normal(size=(64, 512)), jnp.float32)

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def make(tx):
        def step(params, state, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return jax.jit(step)

    def go(tx):
        p, state, step = shard(params, mesh, specs), tx.init(params), make(tx)
        batch = jax.device_put(x, NamedSharding(mesh, P("fsdp", None)))
        for _ in range(10):
            p, state, value = step(p, state, batch)
        return jax.block_until_ready(p), float(value)

    with jmo.Store(*two_tiers, host_memory="4MB", subgroup_elements=65536) as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
        new, value = go(tx)
        assert store.stats()["misses"] > 0
    expected, expected_value = go(optax.adamw(1e-2))
    assert abs(value - expected_value) < 1e-4 * abs(expected_value)
    assert_close(new, expected, 1e-3)


def test_inside_a_manual_shard_map():
    mesh = make_mesh(4)
    params = make_params(SHAPES)
    grads = record_gradients(params, 2)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh)

        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        local = {"embed": (256, 48), "norm": (48,), "out": (48, 128), "scale": ()}
        state = tx.init({k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in local.items()})
        step = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(SPECS, P(), SPECS), out_specs=(SPECS, P()), check_vma=False)
        )
        p = shard(params, mesh)
        for grad in grads:
            p, state = step(p, state, shard(grad, mesh))
        expected, _ = run_reference(optax.adamw(1e-2), params, grads)
        assert_close(p, expected)


def test_mesh_without_specs_is_refused():
    params = make_params(SHAPES)
    mesh = make_mesh(2)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh)
        with pytest.raises(ValueError, match="param_specs"):
            tx.init(params)
        state = jax.eval_shape(tx.init, params)
        with pytest.raises(ValueError, match="param_specs"):
            jax.eval_shape(tx.update, params, state, params)


def test_sharded_program_without_mesh_is_refused():
    """Abstract init, Auto axes: nothing tells the shardings until the program is lowered."""
    params = make_params(SHAPES)
    mesh = make_mesh(2)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        state = jax.eval_shape(tx.init, params)
        state = jax.tree.map(lambda s: jax.device_put(jnp.zeros(s.shape, s.dtype), NamedSharding(mesh, P())), state)
        sharded = shard(params, mesh)
        with pytest.raises(ValueError, match="param_specs"):
            make_step(tx)(sharded, state, sharded)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({**SPECS, "embed": P(None, "fsdp", None)}, "more entries"),
        ({**SPECS, "out": P(None, "tensor")}, "'tensor'"),
        ({**SPECS, "norm": 3}, "PartitionSpec"),
        ({"embed": P()}, "does not fit"),
    ],
)
def test_bad_specs_are_named(specs, message):
    mesh = make_mesh(5)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
        with pytest.raises((ValueError, TypeError), match=message):
            tx.init(make_params({**SHAPES, "embed": (1025, 50), "out": (48, 515)}))


def test_explicit_axis_types_are_explicit():
    assert make_mesh(2, explicit=True).axis_types == (AxisType.Explicit,)


def test_host_only_and_tiers_agree_bitwise_on_a_mesh(two_tiers):
    params = make_params(SHAPES, jnp.bfloat16)
    grads = record_gradients(params, 5)
    mesh = make_mesh(4)
    results = []
    for tiers, memory in (([], None), (two_tiers, "400KB")):
        with jmo.Store(*tiers, host_memory=memory, subgroup_elements=4096) as store:
            tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=SPECS)
            new, state = train(tx, params, grads, mesh)
            results.append((jax.device_get(new), jax.device_get(jmo.read_masters(state, new))))
    assert_bits_equal(results[1], results[0])


@pytest.mark.parametrize("eager", [False, True])
def test_explicit_axes_with_gradients_sharded_otherwise(eager):
    """Replicated gradients for sharded params, and params replicated without a word."""
    mesh = make_mesh(8, explicit=True)
    for spec in (P("fsdp", None), P()):
        params = {"w": np.asarray(np.random.default_rng(0).normal(size=(64, 16)), np.float32)}
        placed = jax.device_put(params, NamedSharding(mesh, spec))
        grads = jax.device_put(params, NamedSharding(mesh, P()))
        with jax.set_mesh(mesh), jmo.Store() as store:
            tx = jmo.adamw(1e-2, store=store)
            update = tx.update if eager else jax.jit(tx.update)
            state, new = tx.init(placed), placed
            for _ in range(3):
                updates, state = update(grads, state, new)
                new = optax.apply_updates(new, updates)
            jax.block_until_ready(new)
        expected, _ = run_reference(optax.adamw(1e-2), jax.tree.map(jnp.asarray, params), [params] * 3)
        assert_close(new, expected)
