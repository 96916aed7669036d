"""Every optimizer against plain optax under jit, on host memory and on tiers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_mlp_offload as jmo
from tests.support import (
    BF16,
    assert_bits_equal,
    check_against_optax,
    make_params,
    make_step,
    record_gradients,
    run,
    run_reference,
)

SHAPES = {"embed": (301, 64), "bias": (7,), "scalar": (), "wide": (64, 1000), "tail": (1031,)}
STEPS = 20

OPTIMIZERS = {
    "adamw": ((1e-2,), {"weight_decay": 0.1}),
    "adamw-schedule": ((optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20),), {}),
    "adamw-mask": ((1e-2,), {"weight_decay": 0.1, "mask": {k: len(s) > 1 for k, s in SHAPES.items()}}),
    "adamw-nesterov": ((1e-2, 0.8, 0.99), {"nesterov": True}),
    "adamw-decay-schedule": ((1e-2,), {"weight_decay": optax.linear_schedule(0.1, 0.0, 10)}),
    "adam": ((1e-2,), {}),
    "adam-eps-root": ((1e-2, 0.9, 0.95, 1e-6, 1e-10), {}),
    "adam-bf16-mu": ((1e-2,), {"mu_dtype": jnp.bfloat16}),
    "sgd": ((1e-2,), {}),
    "sgd-momentum": ((1e-2, 0.9), {}),
    "sgd-nesterov": ((1e-2, 0.9, True), {}),
}


def pair(name, store, **more):
    """The offloaded and the plain optimizer of that name."""
    args, kwargs = OPTIMIZERS[name]
    kind = name.split("-")[0]
    return getattr(jmo, kind)(*args, **kwargs, store=store, **more), getattr(optax, kind)(*args, **kwargs)


def tiered(two_tiers, **more):
    """A store in which about a third of the state of SHAPES fits."""
    return jmo.Store(*two_tiers, host_memory=more.pop("host_memory", "300KB"), subgroup_elements=8192, **more)


def tolerance_of(name):
    # bf16 moments: one rounding in 2**8 may fall the other way
    return 1e-2 if "bf16" in name else 1e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_params_equal_optax_and_tiers_change_no_bit(name, two_tiers):
    params = make_params(SHAPES)
    grads = record_gradients(params, STEPS)
    with jmo.Store() as store:
        offloaded, plain = pair(name, store)
        host_params, host_state = check_against_optax(offloaded, plain, params, grads, tolerance_of(name))
        host = jmo.read_state(host_state)
    with tiered(two_tiers) as store:
        tier_params, tier_state = run(pair(name, store)[0], params, grads)
        assert_bits_equal(tier_params, host_params)
        assert_bits_equal(jmo.read_state(tier_state), host)
        stats = store.stats()
        if "sgd" not in name:
            assert all(tier["bytes_read"] > 0 for tier in stats["tiers"]), stats


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["adamw", "adam", "adamw-nesterov", "sgd", "sgd-momentum"])
def test_16_bit_params_equal_float32_masters(name, dtype, two_tiers):
    params = make_params(SHAPES, dtype)
    grads = record_gradients(params, STEPS)
    with jmo.Store() as store:
        offloaded, plain = pair(name, store)
        host_params, host_state = check_against_optax(offloaded, plain, params, grads)
        host_masters = jmo.read_masters(host_state, host_params)
        assert store.stats()["adopted_steps"] == 0
    with tiered(two_tiers) as store:
        tier_params, tier_state = run(pair(name, store)[0], params, grads, donate=True, apply=jmo.apply_updates)
        assert_bits_equal(tier_params, host_params)
        assert_bits_equal(jmo.read_masters(tier_state, tier_params), host_masters)
        assert store.stats()["adopted_steps"] == 0


@pytest.mark.parametrize("grad_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_dtypes(grad_dtype, dtype):
    params = make_params(SHAPES, dtype)
    grads = record_gradients(params, 5, dtype=grad_dtype)
    with jmo.Store() as store:
        check_against_optax(*pair("adamw", store), params, grads)


def test_nu_dtype_keeps_half_the_bytes():
    params = make_params(SHAPES)
    grads = record_gradients(params, 5)
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, nu_dtype=jnp.bfloat16, mu_dtype=jnp.bfloat16, store=store)
        _, state = run(tx, params, grads)
        inner = jmo.read_state(state)[0]
        assert {leaf.dtype for leaf in jax.tree.leaves((inner.mu, inner.nu))} == {jnp.dtype(BF16)}
        elements = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert store.stats()["record_bytes_total"] < 4 * elements + 64 * 1024


def test_update_without_params_where_none_are_needed():
    params = make_params(SHAPES)
    grads = record_gradients(params, 3)
    with jmo.Store() as store:
        tx, plain = pair("adam", store)
        state, reference = tx.init(params), plain.init(params)
        for grad in grads:
            updates, state = jax.jit(tx.update)(grad, state)
            expected, reference = jax.jit(plain.update)(grad, reference)
        check = jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), updates, expected)
        assert jax.tree.structure(check)
        decays = jmo.adamw(1e-2, store=store, name="decays")
        with pytest.raises(ValueError, match="needs the params"):
            decays.update(grads[0], decays.init(params))


def test_eager_equals_jit():
    params = make_params(SHAPES)
    grads = record_gradients(params, 3)
    with jmo.Store() as store:
        expected, _ = run(jmo.adamw(1e-2, store=store, name="jit"), params, grads)
        tx = jmo.adamw(1e-2, store=store, name="eager")
        state = tx.init(params)
        for grad in grads:
            updates, state = tx.update(grad, state, params)
            params = optax.apply_updates(params, updates)
        assert int(state.count) == 3
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), params, expected)


def test_init_is_abstract_and_lazy(two_tiers):
    params = make_params(SHAPES)
    with tiered(two_tiers) as store:
        tx = jmo.adamw(1e-2, store=store)
        for state in (jax.eval_shape(tx.init, params), jax.jit(tx.init)(params)):
            assert state.count.shape == ()
            assert state.ticket.shape == (1,)
        shaped = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        assert int(tx.init(shaped).ticket[0]) == 0
        assert store.stats()["slots"] == 0


def test_one_trace_for_a_schedule():
    params = make_params({"w": (64, 8)})
    traces = []
    with jmo.Store() as store:
        tx = jmo.adamw(optax.linear_schedule(1e-2, 0.0, 50), store=store)

        def step(params, state, grads):
            traces.append(1)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        step, state = jax.jit(step), tx.init(params)
        for grad in record_gradients(params, 5):
            params, state = step(params, state, grad)
        jax.block_until_ready(params)
    assert len(traces) == 1


def test_scan_over_steps():
    params = make_params(SHAPES)
    grads = record_gradients(params, 6)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store)

        @jax.jit
        def train(params, state, stacked):
            def body(carry, grad):
                updates, state = tx.update(grad, carry[1], carry[0])
                return (optax.apply_updates(carry[0], updates), state), None

            return jax.lax.scan(body, (params, state), stacked)[0]

        new, state = train(params, tx.init(params), stacked)
        expected, _ = run_reference(optax.adamw(1e-2, weight_decay=0.1), params, grads)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), new, expected)
        assert int(state.count) == 6


def test_constant_gradient_moves_all_elements_alike(two_tiers):
    """One leaf over several subgroups: all its elements see the same count."""
    params = {"big": jnp.ones(30000), "a": jnp.ones(10), "b": jnp.ones(3)}
    grads = [jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)] * 20
    with tiered(two_tiers) as store:
        new, state = run(jmo.adam(1e-2, store=store), params, grads)
        assert len(np.unique(np.asarray(new["big"]).view(np.uint32))) == 1
        assert int(state.count) == 20


def test_bf16_master_moves_where_bf16_alone_would_not():
    params = {"w": jnp.ones(100, BF16)}
    grads = [{"w": jnp.ones(100, BF16)}] * 300
    with jmo.Store() as store:
        new, _ = run(jmo.adam(1e-3, store=store), params, grads)
    assert abs(float(new["w"][0]) - 0.7) < 0.01


def test_strict_promotion():
    params = make_params(SHAPES, BF16)
    grads = record_gradients(params, 2)
    with jmo.Store() as store, jax.numpy_dtype_promotion("strict"):
        tx = jmo.adamw(1e-2, store=store)
        run(tx, params, grads, apply=jmo.apply_updates)


def test_hyperparameters_in_jit_of_several_optimizers():
    """Two optimizers with equal leaves share a store under their names."""
    params = make_params({"w": (100, 10)})
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        one, two = jmo.adam(1e-2, store=store, name="one"), jmo.adam(1e-1, store=store, name="two")
        step_one, step_two = make_step(one), make_step(two)
        a, b = params, params
        state_a, state_b = one.init(a), two.init(b)
        for index, grad in enumerate(grads):
            a, state_a = step_one(a, state_a, grad)
            b, state_b = step_two(b, state_b, grad)
            if index == 1:
                state_b = two.init(b)  # starts afresh in mid-run
        jax.block_until_ready((a, b))
        expected, _ = run_reference(optax.adam(1e-2), params, grads)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8), a, expected)
        half, _ = run_reference(optax.adam(1e-1), params, grads[:2])
        expected, _ = run_reference(optax.adam(1e-1), half, grads[2:])
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8), b, expected)


def test_state_can_be_read_before_the_first_update():
    """What init gives is optax's: a template for a checkpoint, or a checkpoint of step 0."""
    params = make_params(SHAPES)
    with jmo.Store() as store:
        state = jmo.adamw(1e-2, store=store).init(params)
        assert_bits_equal(jmo.read_state(state), optax.adamw(1e-2).init(params))
        jmo.sgd(1e-2, store=store).init(params)
        with pytest.raises(ValueError, match="cannot be told"):
            jmo.read_state(state)


def test_leaving_the_store_waits_for_dispatched_steps():
    params = {"w": jnp.ones((2048, 512))}
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        step, state, new = make_step(tx), tx.init(params), params
        for _ in range(10):
            new, state = step(new, state, params)
    assert np.isfinite(np.asarray(new["w"])).all()
    assert int(state.count) == 10
