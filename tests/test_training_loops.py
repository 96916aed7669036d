"""Offloaded optimizers in Flax's train states, in JAX's own ways to run a step, and with skipped steps."""

from __future__ import annotations

import flax.linen
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_mlp_offload as jmo
from tests.support import (
    BF16,
    SMALL_SHAPES,
    advance,
    assert_bits_equal,
    assert_close,
    assert_used_tiers,
    make_params,
    make_step,
    record_gradients,
    run,
    run_reference,
    tiered,
)

STEPS = 5


def reference(every):
    """Plain optax, accumulating where the offloaded one does."""
    plain = optax.adamw(1e-2)
    return optax.MultiSteps(plain, every) if every else plain


# -- Flax


class Perceptron(flax.linen.Module):
    dtype: object

    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.Dense(64, param_dtype=self.dtype)(x)
        return flax.linen.Dense(16, param_dtype=self.dtype)(jax.nn.gelu(x))


def loss_of(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1.0))


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_linen_train_state_with_donation(dtype, every, two_tiers):
    model = Perceptron(dtype)
    x = jax.random.normal(jax.random.key(0), (8, 128), jnp.float32)
    params = model.init(jax.random.key(1), x)

    def train(tx, params):
        @jax.jit
        def gradients(params):
            return jax.grad(lambda p: loss_of(model.apply(p, x)))(params)

        step = jax.jit(lambda train, grads: train.apply_gradients(grads=grads), donate_argnums=0)
        train = TrainState.create(apply_fn=model.apply, params=jax.tree.map(jnp.copy, params), tx=tx)
        recorded = []
        for _ in range(STEPS):
            grads = gradients(train.params)
            recorded.append(grads)
            train = step(train, grads)
        return train, recorded

    with tiered(two_tiers, host_memory="95KB") as store:
        state, recorded = train(jmo.adamw(1e-2, store=store, accumulate_steps=every), params)
        assert int(state.step) == STEPS
        masters, expected = run_reference(reference(every), params, recorded)
        assert_close(jmo.read_masters(state.opt_state, state.params), masters)
        assert_close(jmo.read_state(state.opt_state), expected)
        assert_used_tiers(store)


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_nnx_optimizer(dtype, every, two_tiers):
    """Key paths end in ``.value`` at init and not at update: it is one optimizer all the same."""
    x = jax.random.normal(jax.random.key(0), (8, 128), jnp.float32)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(128, 64, param_dtype=dtype, rngs=rngs)
            self.two = nnx.Linear(64, 16, param_dtype=dtype, rngs=rngs)

        def __call__(self, x):
            return self.two(jax.nn.gelu(self.one(x)))

    def train(tx):
        model = Model(nnx.Rngs(0))
        first = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def gradients(model):
            return nnx.grad(lambda model: loss_of(model(x)))(model)

        @nnx.jit
        def step(model, optimizer, grads):
            optimizer.update(model, grads)

        recorded = []
        for _ in range(STEPS):
            grads = gradients(model)
            recorded.append(jax.tree.map(jnp.copy, nnx.to_pure_dict(grads)))
            step(model, optimizer, grads)
        return first, nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer, recorded

    with tiered(two_tiers, host_memory="95KB") as store:
        first, new, optimizer, recorded = train(jmo.adamw(1e-2, store=store, accumulate_steps=every))
        assert int(optimizer.step[...]) == STEPS
        masters, moments = run_reference(reference(every), first, recorded)
        assert_close(jmo.read_masters(optimizer.opt_state, new), masters)
        assert_close(jmo.read_state(optimizer.opt_state), moments)
        stats = store.stats()
        assert stats["steps"] == STEPS // (every or 1)
        assert len(stats["optimizers"]) == 1
        assert stats["adopted_steps"] == 0
        assert_used_tiers(store)


# -- JAX's own ways to run a step


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_donation_changes_no_bit(dtype, every, two_tiers):
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, STEPS)
    with tiered(two_tiers) as store:
        kept, donated = (
            jmo.adamw(1e-2, store=store, accumulate_steps=every, name=name) for name in ("kept", "donated")
        )
        expected, expected_state = run(kept, params, grads)
        new, state = run(donated, params, grads, donate=True)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), jmo.read_state(expected_state))
        assert_used_tiers(store)


def test_compiled_ahead_of_time():
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 2)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        state = tx.init(params)
        compiled = make_step(tx).lower(params, state, grads[0]).compile()
        assert store.stats()["steps"] == 0
        new = params
        for grad in grads:
            new, state = compiled(new, state, grad)
        expected, _ = run_reference(optax.adamw(1e-2), params, grads)
        assert_close(new, expected)
        assert store.stats()["steps"] == 2


def test_eval_shape_of_an_update_runs_nothing():
    params = make_params(SMALL_SHAPES, BF16)
    with jmo.Store() as store:
        tx = optax.chain(optax.clip_by_global_norm(1.0), jmo.adamw(1e-2, store=store))
        state = tx.init(params)
        updates, after = jax.eval_shape(tx.update, params, state, params)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        assert store.stats()["steps"] == 0


@pytest.mark.parametrize("every", [None, 2])
def test_strict_promotion_and_weak_types(every):
    params = make_params(SMALL_SHAPES, BF16)
    grads = record_gradients(params, 3)
    with jmo.Store() as store, jax.numpy_dtype_promotion("strict"):
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store, accumulate_steps=every)
        new, state = run(tx, params, grads, apply=jmo.apply_updates)
    with jmo.Store() as store:
        expected, _ = run(jmo.adamw(1e-2, weight_decay=0.1, store=store, accumulate_steps=every), params, grads)
    assert_bits_equal(new, expected)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


def test_vmap_and_grad_through_an_update_are_refused_by_jax():
    params = make_params({"w": (4, 8)})
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store)
        state = tx.init(params)
        with pytest.raises(NotImplementedError):
            jax.vmap(lambda g: tx.update({"w": g}, state, params))(jnp.ones((3, 4, 8)))


# -- skip_nonfinite


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_skip_nonfinite(dtype, first, two_tiers):
    """Params, moments and count as they were; counted, warned of; and the steps after are those of a clean run."""
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 4)
    bad = jax.tree.map(jnp.copy, grads[0])
    bad["scalar"] = jnp.asarray(jnp.inf, dtype)
    with tiered(two_tiers) as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store, skip_nonfinite=True)
        good = [] if first else grads[:2]
        step = make_step(tx)
        before, state = advance(step, params, tx.init(params), good)
        moments = None if first else jmo.read_state(state)
        with pytest.warns(jmo.SkippedStepWarning, match="not finite"):
            same, state = advance(step, before, state, [bad], store)
        assert_bits_equal(same, before)
        assert int(state.count) == len(good)
        if moments is not None:
            assert_bits_equal(jmo.read_state(state), moments)
        assert store.stats()["skipped_steps"] == 1
        new, state = advance(step, same, state, grads[len(good) :])
        assert int(state.count) == 4
        last = jmo.read_state(state)
        assert store.stats()["adopted_steps"] == 0
        assert_used_tiers(store)
    with jmo.Store() as store:
        expected, state = run(jmo.adamw(1e-2, weight_decay=0.1, store=store), params, grads)
        assert_bits_equal(new, expected)
        assert_bits_equal(last, jmo.read_state(state))


def test_skip_nonfinite_of_leaves_without_a_record():
    """sgd without momentum keeps nothing for float32 params; they are skipped too."""
    params = make_params({"w": (5,)})
    with jmo.Store() as store:
        tx = jmo.sgd(0.1, store=store, skip_nonfinite=True)  # in no op, so nothing counts it
        new, state = run(tx, params, [{"w": jnp.full((5,), jnp.nan)}])
        assert_bits_equal(new, params)
        assert int(state.count) == 0
