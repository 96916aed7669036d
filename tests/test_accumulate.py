"""``accumulate_steps``: the numbers and the state of ``optax.MultiSteps``, and one update in k calls, in truth."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_mlp_offload as jmo
from tests.support import (
    BF16,
    advance,
    assert_bits_equal,
    assert_close,
    assert_used_tiers,
    assert_within_ulp,
    check_against_optax,
    make_params,
    make_step,
    record_gradients,
    run,
    run_reference,
    tiered,
)

SHAPES = {"scalar": (), "wide": (90, 241)}
STEPS = 7  # micro-gradients: two updates of three, and one on the way

ADAMW = (jmo.adamw, optax.adamw, {"learning_rate": 1e-2, "weight_decay": 0.1})
ADAM = (jmo.adam, optax.adam, {"learning_rate": optax.linear_schedule(1e-2, 0.0, 3), "nesterov": True})
SGD = (jmo.sgd, optax.sgd, {"learning_rate": 0.125, "momentum": 0.9})


def make_mixed_params():
    """A float32 and a bfloat16 leaf: what holds for each dtype, in one program."""
    return {"full": make_params({"w": (61, 180)}), "low": make_params({"w": (60, 181)}, BF16)}


def zeros_like(params):
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def check(tx, plain, params, grads):
    """Runs both and compares masters, params and the whole state, its accumulators bit by bit."""
    new, state = run(tx, params, grads)
    masters, expected = run_reference(plain, params, grads)
    assert_close(jmo.read_masters(state, new), masters)
    if params["wide"].dtype != jnp.float32:
        assert_within_ulp(new, masters)
    actual = jmo.read_state(state)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_close(actual, expected)
    assert_bits_equal(state.acc_grads, expected.acc_grads)


# -- numbers


@pytest.mark.parametrize(
    ("factory", "dtype", "grad_dtype"),
    [
        (ADAMW, jnp.float32, jnp.float32),
        (ADAMW, BF16, BF16),
        (ADAM, jnp.float16, jnp.float16),
        (ADAM, jnp.float32, BF16),
        (SGD, BF16, jnp.float32),
    ],
)
def test_numbers_of_multi_steps(factory, dtype, grad_dtype, two_tiers):
    """The whole state of MultiSteps over plain optax; the accumulators bit by bit, of widened gradients."""
    offloaded, plain, options = factory
    params = make_params(SHAPES, dtype)
    grads = record_gradients(params, STEPS, dtype=grad_dtype)
    with tiered(two_tiers, host_memory="60KB" if factory is SGD else "110KB") as store:
        tx = offloaded(**options, store=store, accumulate_steps=3)
        check(tx, optax.MultiSteps(plain(**options), 3), params, grads)
        assert store.stats()["steps"] == 2
        assert store.stats()["adopted_steps"] == 0
        assert_used_tiers(store)


@pytest.mark.parametrize("factory", [ADAMW, SGD])
def test_accumulators_of_bfloat16(factory):
    """Stored so, worked out in float32. sgd's ``accumulator_dtype`` is that of its momentum too."""
    offloaded, plain, options = factory
    params = make_params(SHAPES)
    grads = record_gradients(params, STEPS + 1)
    own = {"accumulator_dtype": BF16} if plain is optax.sgd else {}
    with jmo.Store() as store:
        tx = offloaded(**options, store=store, accumulate_steps=3, accumulator_dtype=BF16)
        check(tx, optax.MultiSteps(plain(**options, **own), 3, accumulator_dtype=BF16), params, grads)


def test_a_number_of_steps_that_varies():
    """Two micro-gradients to the first update, three to all others."""
    params = make_params(SHAPES)
    grads = record_gradients(params, 9)

    def steps(gradient_step):
        return jnp.where(gradient_step < 1, 2, 3)

    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, accumulate_steps=steps)
        _, state = check_against_optax(tx, optax.MultiSteps(optax.adamw(1e-2), steps), params, grads)
        assert (int(state.gradient_step), int(state.mini_step)) == (3, 1)


def test_a_mean_of_one_is_the_plain_path():
    params = make_mixed_params()
    grads = record_gradients(params, 3)
    with jmo.Store() as store:
        expected, plain = run(jmo.adamw(1e-2, store=store, name="plain"), params, grads)
        new, state = run(jmo.adamw(1e-2, store=store, accumulate_steps=lambda _: 1, name="mean"), params, grads)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state.inner_opt_state), jmo.read_state(plain))
        # and 1, or None, is that path itself
        for steps in (None, 1, np.int64(1)):
            assert isinstance(jmo.adamw(1e-2, store=store, accumulate_steps=steps).init(params), jmo.OffloadState)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_clipped_and_accumulated_by_hand(dtype):
    """D5: gradients 3 and 4 give -0.6 and -0.8; then three distinct micro-gradients."""
    params = {"x": jnp.zeros((), dtype), "y": jnp.zeros((), dtype)}
    with jmo.Store() as store:
        tx = optax.chain(optax.clip_by_global_norm(1.0), jmo.sgd(1.0, store=store))
        grads = {"x": jnp.float32(3.0), "y": jnp.float32(4.0)}
        updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        tolerance = 1e-7 if dtype == jnp.float32 else 2**-8  # a bfloat16 param's update is one that it can take
        np.testing.assert_allclose([updates["x"], updates["y"]], [-0.6, -0.8], rtol=tolerance)

    with jmo.Store() as store:
        tx = jmo.sgd(1.0, 0.5, store=store, accumulate_steps=3)
        state, update = tx.init(params), jax.jit(tx.update)
        for index, value in enumerate([1.0, 2.0, 6.0, 4.0, 8.0, 3.0]):
            updates, state = update(jax.tree.map(lambda p, v=value: jnp.full_like(p, v), params), state, params)
            params = optax.apply_updates(params, updates)
            # means 3 and 5, momentum 3 and 6.5
            expected = {2: -3.0, 5: -6.5}.get(index, 0.0)
            assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}
            np.testing.assert_array_equal([updates["x"], updates["y"]], [expected, expected])
            assert int(state.inner_opt_state.count) == (index + 1) // 3
        np.testing.assert_array_equal(np.asarray(params["x"], np.float32), -9.5)


def test_updates_without_params():
    params = make_params(SHAPES)
    grads = record_gradients(params, STEPS, dtype=BF16)
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store, accumulate_steps=3)
        state, update, new = tx.init(params), jax.jit(tx.update), params
        for grad in grads:
            updates, state = update(grad, state)
            new = optax.apply_updates(new, updates)
        expected, _ = run_reference(optax.MultiSteps(optax.adam(1e-2), 3), params, grads)
        assert_close(new, expected)


def test_groups_that_accumulate_differently():
    """None leaves, and groups of two and of three micro-gradients."""
    params = {**make_params({"a": (50,), "b": (60,), "c": (3,)}), "none": None}
    grads = record_gradients(params, STEPS)
    labels = {"a": "two", "b": "three", "c": "two", "none": None}

    def make(two, three):
        return optax.partition({"two": two, "three": three}, labels)

    with jmo.Store() as store:
        offloaded = make(
            jmo.adamw(1e-2, store=store, accumulate_steps=2), jmo.sgd(1e-2, store=store, accumulate_steps=3)
        )
        multi = [
            optax.MultiSteps(tx, k).gradient_transformation()
            for tx, k in ((optax.adamw(1e-2), 2), (optax.sgd(1e-2), 3))
        ]
        check_against_optax(offloaded, make(*multi), params, grads)


# -- one update in k calls


def test_nothing_happens_off_the_boundary():
    """Updates are zeros, the optimizer's state is as it was; the same micro-step may even run twice."""
    params = make_mixed_params()
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, accumulate_steps=2)
        update = jax.jit(tx.update)
        new, state = advance(make_step(tx), params, tx.init(params), grads[:2], store)
        assert store.stats()["steps"] == 1
        for _ in range(2):
            updates, after = update(grads[2], state, new)
            assert_bits_equal(updates, zeros_like(params))
            assert_bits_equal(after.inner_opt_state, state.inner_opt_state)
        _, last = update(grads[3], after, new)
        with pytest.raises(jax.errors.JaxRuntimeError, match="ticket"):
            jax.block_until_ready(update(grads[3], after, new))  # the boundary may not
        assert int(last.inner_opt_state.count) == 2


def conditional_holds_all_calls(hlo):
    """Whether the optimizer's calls in a compiled program all stand in a branch of a conditional."""
    blocks = [block for block in hlo.split("\n\n") if re.search(r'custom_call_target="jmo_(update|push)"', block)]
    branches = re.findall(r"conditional\(.*branch_computations={([^}]*)}", hlo)
    named = {name.strip() for branch in branches for name in branch.split(",")}
    return bool(blocks) and all(block.split()[0] in named for block in blocks)


def test_one_program_with_the_update_in_a_conditional():
    params = make_params(SHAPES)
    grads = record_gradients(params, STEPS)
    traces = []
    with jmo.Store() as store:
        tx = jmo.adamw(optax.cosine_decay_schedule(1e-2, 10), store=store, accumulate_steps=3)

        @jax.jit
        def step(params, state, grads):
            traces.append(1)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        assert conditional_holds_all_calls(step.lower(params, state, grads[0]).compile().as_text())
        advance(step, params, state, grads, store)
        assert len(traces) == 1
        assert store.stats()["steps"] == 2
        plain = jmo.adamw(1e-2, store=store, name="plain")
        compiled = make_step(plain).lower(params, plain.init(params), grads[0]).compile()
        assert not conditional_holds_all_calls(compiled.as_text())


def test_micro_steps_in_a_scan():
    """The whole loop in one program: updates run in turn, each from the one before."""
    params = make_mixed_params()
    grads = record_gradients(params, STEPS)
    with jmo.Store() as store:
        expected, other = run(jmo.adamw(1e-2, store=store, accumulate_steps=3, name="loop"), params, grads)
        tx = jmo.adamw(1e-2, store=store, accumulate_steps=3, name="scan")
        step = make_step(tx)

        @jax.jit
        def loop(params, state, grads):
            return jax.lax.scan(lambda carry, grad: (step(*carry, grad), None), (params, state), grads)[0]

        new, state = loop(params, tx.init(params), jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads))
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), jmo.read_state(other))


def test_a_mean_that_is_not_finite_is_skipped(two_tiers):
    """Params, moments and count as they were; the accumulators start anew."""
    params = make_mixed_params()
    grads = record_gradients(params, 6)
    bad = {**grads[2], "low": {"w": grads[2]["low"]["w"].at[3, 5].set(jnp.inf)}}
    with tiered(two_tiers) as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store, skip_nonfinite=True, accumulate_steps=2)
        step = make_step(tx)
        before, state = advance(step, params, tx.init(params), grads[:2])
        moments = jmo.read_state(state.inner_opt_state)
        with pytest.warns(jmo.SkippedStepWarning, match="not finite"):
            same, state = advance(step, before, state, [bad, grads[3]], store)
        assert_bits_equal(same, before)
        assert_bits_equal(jmo.read_state(state.inner_opt_state), moments)
        assert_bits_equal(state.acc_grads, zeros_like(params))
        assert (int(state.inner_opt_state.count), int(state.gradient_step)) == (1, 2)
        assert store.stats()["skipped_steps"] == 1
        new, state = advance(step, same, state, grads[4:])
        last = jmo.read_state(state.inner_opt_state)
        assert_used_tiers(store)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store, accumulate_steps=2)
        expected, state = run(tx, params, grads[:2] + grads[4:])
        assert_bits_equal(new, expected)
        assert_bits_equal(last, jmo.read_state(state.inner_opt_state))


# -- init and arguments


def test_init_is_pure():
    """Concrete, under jit, abstract, and from shapes alone; nothing is stored."""
    params = {**make_params(SHAPES, BF16), "none": None}
    with jmo.Store() as store:
        init = jmo.adamw(1e-2, store=store, accumulate_steps=2).init
        state = init(params)
        assert_bits_equal(jax.jit(init)(params), state)
        shapes = jax.eval_shape(init, params)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        assert_bits_equal(init(jax.eval_shape(lambda: params)), state)
        assert_bits_equal(init(jax.tree.map(np.asarray, params)), state)
        assert store.stats()["record_bytes_total"] == 0
        assert_bits_equal(
            jmo.read_state(state),
            optax.MultiSteps(optax.adamw(1e-2), 2).init(jax.tree.map(lambda p: p.astype(jnp.float32), params)),
        )


@pytest.mark.parametrize("factory", [jmo.adamw, jmo.adam, jmo.sgd])
def test_bad_numbers_of_steps(factory):
    with jmo.Store() as store:
        for steps in (0, -1, True, 2.5, "3", [3], np.int64(0)):
            message = f"accumulate_steps={re.escape(repr(steps))} must be an int of at least 1"
            with pytest.raises(ValueError, match=message):
                factory(1e-2, store=store, accumulate_steps=steps)


@pytest.mark.parametrize("steps", [lambda step: 2.0 * step, lambda _: np.array([2, 3])])
def test_bad_results_of_a_schedule_of_steps(steps):
    params = make_params({"w": (3,)})
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store, accumulate_steps=steps)
        with pytest.raises(ValueError, match=r"accumulate_steps=.* returned .*must return one integer"):
            tx.update(params, tx.init(params), params)


@pytest.mark.parametrize("factory", [jmo.adamw, jmo.adam, jmo.sgd])
def test_bad_accumulator_dtype(factory):
    with jmo.Store() as store, pytest.raises(ValueError, match=r"accumulator_dtype='float16'.*bfloat16"):
        factory(1e-2, store=store, accumulate_steps=2, accumulator_dtype=jnp.float16)


@pytest.mark.parametrize(
    ("grad", "message"),
    [(None, "is None"), (jnp.arange(3), "dtype int32"), (jnp.ones((4,)), r"shape \(4,\), the param \(3,\)")],
)
def test_bad_gradients_are_named_at_once(grad, message):
    """At the first micro-step, before they are widened."""
    params = {"v": jnp.ones((2,)), "w": jnp.ones((3,))}
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store, accumulate_steps=2)
        with pytest.raises((TypeError, ValueError), match=rf"the gradient of \['w'\].*{message}"):
            tx.update({"v": jnp.ones((2,)), "w": grad}, tx.init(params), params)


def test_inside_inject_hyperparams():
    """It makes numbers into arrays, also defaults: the number of steps has to be static."""
    params = make_params({"w": (30,)})
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        with pytest.raises(ValueError, match=r"accumulate_steps=.*static_args=\('accumulate_steps',\)"):
            optax.inject_hyperparams(jmo.adam)(1e-2, store=store, accumulate_steps=2).init(params)
        inject = optax.inject_hyperparams(jmo.adam, static_args=("accumulate_steps",))
        new, state = run(inject(1e-2, store=store, accumulate_steps=2), params, grads)
        expected, _ = run_reference(optax.MultiSteps(optax.adam(1e-2), 2), params, grads)
        assert_close(new, expected)
        assert int(state.inner_state.inner_opt_state.count) == 2
        run(optax.inject_hyperparams(jmo.adam)(1e-2, store=store, name="plain"), params, grads)
