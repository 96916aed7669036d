"""Offloaded optimizers inside optax's wrappers, against plain optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jax_mlp_offload as jmo
from tests.support import (
    BF16,
    SMALL_SHAPES,
    advance,
    assert_bits_equal,
    assert_close,
    assert_used_tiers,
    check_against_optax,
    make_params,
    make_step,
    record_gradients,
    run,
    run_reference,
    tiered,
)

STEPS = 5


# -- chains


def clipped(kind, **more):
    return optax.chain(optax.clip_by_global_norm(1.0), kind.adamw(1e-2, weight_decay=0.1, **more))


def decayed_in_front(kind, **more):
    return optax.chain(optax.add_decayed_weights(0.1), kind.adam(1e-2, **more))


def injected_schedule(kind, **more):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 12)
    return optax.inject_hyperparams(kind.adamw, hyperparam_dtype=jnp.float32)(schedule, weight_decay=0.1, **more)


def masked(kind, **more):
    return optax.masked(kind.adamw(1e-2, **more), {"bias": False, "embed": True, "scalar": True, "wide": True})


def finite_only(kind, **more):
    return optax.apply_if_finite(kind.adamw(1e-2, **more), 3)


def clipped_and_injected(kind, **more):
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(kind.adam, hyperparam_dtype=jnp.float32)(1e-2, **more),
    )


def accumulated(kind, learning_rate=1e-2, **more):
    """AdamW on the mean of two micro-gradients."""
    if kind is optax:
        return optax.MultiSteps(optax.adamw(learning_rate, weight_decay=0.1), 2).gradient_transformation()
    return kind.adamw(learning_rate, weight_decay=0.1, accumulate_steps=2, **more)


def clipped_and_accumulated(kind, **more):
    return optax.chain(optax.clip_by_global_norm(1.0), accumulated(kind, **more))


def masked_and_accumulated(kind, **more):
    return optax.masked(accumulated(kind, **more), {"bias": False, "embed": True, "scalar": True, "wide": True})


def injected_and_accumulated(kind, **more):
    """The injected schedule goes on at every call."""
    schedule = optax.linear_schedule(0.0, 1e-2, STEPS)
    return optax.inject_hyperparams(lambda learning_rate: accumulated(kind, learning_rate, **more))(schedule)


def finite_only_and_accumulated(kind, **more):
    return optax.apply_if_finite(accumulated(kind, **more), 3)


WITH_ANY_PARAMS = (clipped, decayed_in_front, masked, clipped_and_accumulated, masked_and_accumulated)
WITH_FLOAT32 = (injected_schedule, injected_and_accumulated, finite_only, finite_only_and_accumulated)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(make, jnp.float32) for make in (*WITH_ANY_PARAMS, *WITH_FLOAT32)]
    + [(make, BF16) for make in (*WITH_ANY_PARAMS, clipped_and_injected)],
)
def test_wrapped_equals_wrapped_optax(make, dtype, two_tiers):
    params = make_params(SMALL_SHAPES, dtype)
    # float32 gradients: clipping rounds its results to the gradients' dtype, the reference has none but float32
    grads = record_gradients(params, STEPS, dtype=jnp.float32)
    with tiered(two_tiers) as store:
        if make in (masked, masked_and_accumulated):
            # what the mask leaves out is passed through: gradients are added, in the params' dtype
            params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            params = {**params, "embed": params["embed"].astype(dtype), "wide": params["wide"].astype(dtype)}
        if make is decayed_in_front and dtype == BF16:
            # the decay in front sees the rounded params, where the reference sees masters
            new, _ = run(make(jmo, store=store), params, grads)
            expected, _ = run_reference(make(optax), params, grads)
            assert_close(new, expected, 0.02)
        else:
            check_against_optax(make(jmo, store=store), make(optax), params, grads)
        assert store.stats()["adopted_steps"] == 0
        assert_used_tiers(store)


def test_a_transform_behind_is_exact_for_float32(two_tiers):
    """X9, first half."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, STEPS)
    with tiered(two_tiers) as store:
        offloaded = optax.chain(jmo.adamw(1e-2, weight_decay=0.1, store=store), optax.scale(0.5), optax.clip(1e-3))
        plain = optax.chain(optax.adamw(1e-2, weight_decay=0.1), optax.scale(0.5), optax.clip(1e-3))
        check_against_optax(offloaded, plain, params, grads)
        assert_used_tiers(store)


# -- inject_hyperparams


def test_injected_learning_rate_counts_from_zero():
    """D11: lr = 0.1 * count and gradient .5 give 0, -.05, -.1."""
    with jmo.Store() as store:
        tx = optax.inject_hyperparams(jmo.sgd)(lambda count: 0.1 * count, store=store)
        params = {"w": jnp.ones((3,), jnp.float32)}
        state, step = tx.init(params), jax.jit(tx.update)
        for expected in (0.0, -0.05, -0.1):
            updates, state = step({"w": jnp.full((3,), 0.5)}, state, params)
            np.testing.assert_allclose(updates["w"], expected, atol=1e-8)


@pytest.mark.parametrize("wrap", ["alone", "chain"])
def test_learning_rate_set_to_zero_in_the_state(wrap, two_tiers):
    """D11: update 0, the count still rises, moments still move, and nothing is traced again."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 4)
    traces = []
    with tiered(two_tiers) as store:
        inject = optax.inject_hyperparams(jmo.adam)(1e-2, store=store)
        tx = inject if wrap == "alone" else optax.chain(optax.clip(1e3), inject)

        @jax.jit
        def step(train, grad):
            traces.append(1)
            return train.apply_gradients(grads=grad)

        train = TrainState.create(apply_fn=None, params=params, tx=tx)
        train = step(step(train, grads[0]), grads[1])
        before = train
        where = train.opt_state if wrap == "alone" else train.opt_state[1]
        where.hyperparams["learning_rate"] = jnp.zeros_like(where.hyperparams["learning_rate"])
        train = step(train, grads[2])
        assert_bits_equal(train.params, before.params)
        inner = (train.opt_state if wrap == "alone" else train.opt_state[1]).inner_state
        assert int(inner.count) == 3
        moments = jmo.read_state(inner)
        _, plain = run_reference(optax.inject_hyperparams(optax.adam)(1e-2), params, grads[:3])
        assert_close(moments[0], plain.inner_state[0])
        after = step(train, grads[3])
        assert_bits_equal(after.params, train.params)
        assert len(traces) == 1
        assert_used_tiers(store)


# -- partition


LABELS = {"a": "fast", "b": "slow", "c": "frozen", "d": "fast", "e": "slow", "none": None}
PARTED = {"a": (64, 70), "b": (9000,), "c": (30000,), "d": (5,), "e": (33, 40)}


def partition(kind, **more):
    def named(name):
        return {**more, "name": name} if more else {}

    return optax.partition(
        {
            "fast": kind.adamw(1e-2, weight_decay=0.1, **named("fast")),
            "slow": kind.adamw(1e-3, weight_decay=0.01, **named("slow")),
            "frozen": optax.set_to_zero(),
        },
        LABELS,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_partition(dtype, two_tiers):
    """D10: two groups interleaved by leaf, frozen leaves, None leaves, and a step with zero gradients."""
    params = {**make_params(PARTED, dtype), "none": None}
    grads = record_gradients(params, STEPS)
    grads[3] = jax.tree.map(jnp.zeros_like, grads[3])
    with tiered(two_tiers) as store:
        new, state = run(partition(jmo, store=store), params, grads)
        expected, plain = run_reference(partition(optax), params, grads)
        assert_bits_equal(new["c"], params["c"])
        assert_close(jmo.read_masters(state, new), expected)
        assert_close(jmo.read_state(state), plain)
        stats = store.stats()
        kept = sum(int(np.prod(shape)) for name, shape in PARTED.items() if name != "c")
        # nothing is stored for frozen leaves (records are padded to pages)
        assert kept * 8 <= stats["record_bytes_total"] < (kept + 30000) * 8
        assert set(stats["optimizers"]) == {"fast", "slow"}
        assert_used_tiers(store)


def test_partition_without_names_tells_groups_by_their_leaves():
    params = make_params({"a": (50,), "b": (60,)})
    grads = record_gradients(params, 3)

    def make(kind, **more):
        return optax.partition({"x": kind.adam(1e-2, **more), "y": kind.adam(1e-1, **more)}, {"a": "x", "b": "y"})

    with jmo.Store() as store:
        check_against_optax(make(jmo, store=store), make(optax), params, grads)


def test_read_state_where_groups_keep_nothing():
    """sgd without momentum has no record and no ticket for float32 params; Adam beside it has."""
    params = make_params({"a": (50,), "b": (60,), "c": (3,)})
    grads = record_gradients(params, 3)

    def make(kind, **more):
        groups = {"x": kind.adam(1e-2, **more), "y": kind.sgd(1e-1, **more), "z": kind.sgd(1e-2, **more)}
        return optax.partition(groups, {"a": "x", "b": "y", "c": "z"})

    with jmo.Store() as store:
        check_against_optax(make(jmo, store=store), make(optax), params, grads)


def test_masters_of_float16_after_a_skipped_first_step():
    params = make_params({"w": (30,)}, jnp.float16)
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store, skip_nonfinite=True)
        state = tx.init(params)
        widened = {"w": params["w"].astype(jnp.float32)}
        assert_bits_equal(jmo.read_masters(state, params), widened)
        with pytest.warns(jmo.SkippedStepWarning):
            new, state = advance(make_step(tx), params, state, [{"w": params["w"] * jnp.nan}], store)
        assert_bits_equal(jmo.read_masters(state, new), widened)


# -- conditions


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_apply_if_finite_leaves_everything_as_it_was(dtype, two_tiers):
    params = make_params(SMALL_SHAPES, dtype)
    # its cond wants the dtypes of gradients and updates to be the same, and ours are float32
    grads = record_gradients(params, STEPS, dtype=jnp.float32)
    bad = jax.tree.map(jnp.copy, grads[2])
    bad["embed"] = bad["embed"].at[3, 3].set(jnp.nan)
    with tiered(two_tiers) as store:
        tx = optax.apply_if_finite(jmo.adamw(1e-2, store=store), 5)
        step = make_step(tx)
        half, state = advance(step, params, tx.init(params), grads[:2])
        before = jmo.read_state(state.inner_state)
        same, state = advance(step, half, state, [bad])
        assert_bits_equal(same, half)
        assert_bits_equal(jmo.read_state(state.inner_state), before)
        assert int(state.inner_state.count) == 2
        new, _ = advance(step, same, state, grads[2:])
    with jmo.Store() as store:
        expected, _ = run(jmo.adamw(1e-2, store=store), params, grads)
        assert_bits_equal(new, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_updates_skipped_by_cond(dtype, two_tiers):
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, STEPS)
    with tiered(two_tiers) as store:
        tx = jmo.adamw(1e-2, store=store)

        @jax.jit
        def step(params, state, grad, wanted):
            def real(params, state):
                updates, state = tx.update(grad, state, params)
                return optax.apply_updates(params, updates), state

            return jax.lax.cond(wanted, real, lambda params, state: (params, state), params, state)

        new, state = params, tx.init(params)
        for index, grad in enumerate(grads):
            new, state = step(new, state, grad, index % 2 == 0)
        masters, _ = run_reference(optax.adamw(1e-2), params, grads[::2])
        assert int(state.count) == len(grads[::2])
        assert_close(jmo.read_masters(state, new), masters)


def test_accumulation_in_the_loop():
    """By hand, as ``accumulate_steps`` does it: a cond around the update."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 6)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)

        @jax.jit
        def step(params, state, total, grad, index):
            total = jax.tree.map(lambda a, b: a + b / 3, total, grad)

            def real(params, state, total):
                updates, state = tx.update(total, state, params)
                return optax.apply_updates(params, updates), state, jax.tree.map(jnp.zeros_like, total)

            return jax.lax.cond(index % 3 == 2, real, lambda *same: same, params, state, total)

        new, state, total = params, tx.init(params), jax.tree.map(jnp.zeros_like, params)
        for index, grad in enumerate(grads):
            previous = new
            new, state, total = step(new, state, total, grad, index)
            assert int(state.count) == (index + 1) // 3
            if index % 3 != 2:
                assert_bits_equal(new, previous)
        expected, _ = run_reference(optax.MultiSteps(optax.adamw(1e-2), 3), params, grads)
        assert_close(new, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_multi_steps_is_refused_with_the_remedy(dtype):
    """It evaluates the inner update at every micro-step, and goes on from the state before."""
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        tx = optax.MultiSteps(jmo.adamw(1e-2, store=store), 2)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)ticket.*MultiSteps.*accumulate_steps"):
            run(tx, params, grads)
        store.flush()
        run(jmo.adamw(1e-2, store=store, name="other"), params, grads)  # the store is none the worse for it


def test_lookahead_with_reset(two_tiers):
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 7)

    def train(fast):
        tx = optax.lookahead(fast, sync_period=3, slow_step_size=0.5, reset_state=True)
        step = make_step(tx)
        both = optax.LookaheadParams(fast=params, slow=params)
        state = tx.init(both)
        for grad in grads:
            both, state = step(both, state, grad)
        return jax.block_until_ready(both), state

    expected, plain = train(optax.adam(1e-2))
    with tiered(two_tiers) as store:
        new, state = train(jmo.adam(1e-2, store=store))
        assert int(state.fast_state.count) == 1  # reset after 3 and 6
        assert_close(new, expected)
        assert_close(jmo.read_state(state.fast_state), plain.fast_state)


@pytest.mark.parametrize("reset", [False, True])
def test_lookahead_of_bfloat16_adopts_at_each_synchronisation(reset):
    params = make_params(SMALL_SHAPES, BF16)
    grads = record_gradients(params, 7)
    with jmo.Store() as store:
        tx = optax.lookahead(jmo.adam(1e-2, store=store), sync_period=3, slow_step_size=0.5, reset_state=reset)
        both = optax.LookaheadParams(fast=params, slow=params)
        step, state = make_step(tx), tx.init(both)
        for grad in grads:
            both, state = step(both, state, grad)
        jax.block_until_ready(both)
        store.flush()
        assert store.stats()["adopted_steps"] == (0 if reset else 2)
        assert all(bool(jnp.isfinite(leaf.astype(jnp.float32)).all()) for leaf in jax.tree.leaves(both))
