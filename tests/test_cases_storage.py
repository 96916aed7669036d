"""Cases from the field (``D``, ``X``: public bug reports of systems that do this job), against plain optax: storage."""

from __future__ import annotations

import errno
import os
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from tests.support import (
    BF16,
    SMALL_SHAPES,
    assert_bits_equal,
    assert_close,
    check_against_optax,
    make_params,
    make_step,
    record_gradients,
    run,
    run_and_flush,
    run_reference,
)

ROOT = pathlib.Path(__file__).parents[1]
MEMORY = "110KB"  # two or three records of 4096 elements


# -- D9: a tier that fails in the background


FAILURES = (jmo.TierError, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize("ask", ["update", "flush", "close"])
def test_d9_a_failed_write_is_told_of(ask, two_tiers):
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 4)
    native.inject_fault(path_prefix=two_tiers[0], is_write=True, after_count=2, error_number=errno.EIO)
    store = jmo.Store(two_tiers[0], host_memory=MEMORY, subgroup_elements=4096)
    tx = jmo.adam(1e-2, store=store)
    step, state = make_step(tx), tx.init(params)

    def go():
        new, after = step(params, state, grads[0])
        for grad in grads[1:] if ask == "update" else ():
            new, after = step(new, after, grad)
        jax.block_until_ready(new)
        if ask != "update":
            getattr(store, ask)()

    try:
        with pytest.raises(FAILURES, match=r"leaves .*(embed|wide|bias|scalar)") as caught:
            go()
        text = str(caught.value)
        assert two_tiers[0] in text
        assert "Input/output error" in text
        if ask == "flush":
            with pytest.raises(jmo.TierError):  # and again, until the state is made anew
                store.flush()
    finally:
        store._close_quietly()
    assert not os.listdir(two_tiers[0])


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_d9_another_tier_takes_over(dtype, two_tiers):
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 5)
    with jmo.Store() as store:
        expected, state = run(jmo.adamw(1e-2, store=store), params, grads)
        moments = jmo.read_state(state)
    native.inject_fault(path_prefix=two_tiers[0], is_write=True, after_count=2, error_number=errno.EIO)
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        with pytest.warns(jmo.TierWarning, match="Input/output error") as told:
            new, state = run_and_flush(store, jmo.adamw(1e-2, store=store), params, grads)
        assert two_tiers[0] in str(told[0].message)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), moments)
        assert [tier["retired"] for tier in store.stats()["tiers"]] == [True, False]


def test_d9_a_failed_read_is_told_of(two_tiers):
    """What was on the tier is lost: no other can stand in."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 4)
    store = jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096)
    try:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        new, state = step(params, state, grads[0])
        store.flush()
        native.inject_fault(path_prefix=two_tiers[1], is_write=False, error_number=errno.EIO)
        with pytest.raises(FAILURES, match="Input/output error") as caught:
            run(tx, new, grads[1:], state)
        assert two_tiers[1] in str(caught.value)
        native.clear_faults()
        new, _ = run(tx, params, grads)  # init makes the optimizer whole again
        expected, _ = run_reference(optax.adam(1e-2), params, grads)
        assert_close(new, expected)
    finally:
        store._close_quietly()


# -- D12, D15, X6: long runs and odd timing


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_d12_open_files_and_memory_stay_flat(two_tiers):
    params = make_params({"w": (256, 256), "v": (300,)})
    grads = record_gradients(params, 2)
    with jmo.Store(*two_tiers, host_memory="150KB", subgroup_elements=8192) as store:
        tx = jmo.adamw(1e-3, store=store)
        step, state = make_step(tx, donate=True), tx.init(params)
        files, memory, sizes = [], [], []
        for index in range(200):
            params, state = step(params, state, grads[index % 2])
            jax.block_until_ready(params)
            if index % 5 == 4:
                store.flush()
                files.append(len(os.listdir("/proc/self/fd")))
                memory.append(resident_bytes())
                sizes.append(sum(p.stat().st_size for t in two_tiers for p in pathlib.Path(t).rglob("0")))
        stats = store.stats()
        assert stats["misses"] > 200
        assert max(files) == files[0]
        assert max(memory[20:]) - memory[8] < 16 * 2**20
        # no more than every record twice: once where it is and once as a file that is taken over
        assert max(sizes) <= 2 * stats["record_bytes_total"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_d15_delays_change_no_bit(dtype, seed, two_tiers):
    """Tiers complete out of order, two or three slots, donation on."""
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        expected, state = run(jmo.adamw(1e-2, store=store), params, grads, donate=True)
        moments = jmo.read_state(state)
    for index, tier in enumerate(two_tiers):
        for is_write in (False, True):
            native.inject_fault(
                path_prefix=tier, is_write=is_write, min_delay_s=0.0, max_delay_s=0.02, seed=10 * seed + index
            )
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        new, state = run(jmo.adamw(1e-2, store=store), params, grads, donate=True)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), moments)
        assert store.stats()["misses"] > 0


@pytest.mark.timeout(60)
def test_x6_steps_dispatched_ahead(two_tiers):
    """100 updates that nobody waits for, and then two steps of two optimizers on their way at once."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 100)
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        one, two = (jmo.adam(1e-2, store=store, name=name) for name in ("one", "two"))
        step, other = make_step(one, donate=True), make_step(two)
        a, b = jax.tree.map(jnp.copy, params), params
        state_a, state_b = one.init(a), two.init(b)
        for index, grad in enumerate(grads):
            a, state_a = step(a, state_a, grad)
            if index % 20 == 0:
                b, state_b = other(b, state_b, grad)
        jax.block_until_ready((a, b))
        assert int(state_a.count) == 100
        expected, _ = run_reference(optax.adam(1e-2), params, grads[::20])
        assert_close(b, expected)
        expected, _ = run_reference(optax.adam(1e-2), params, grads)
        assert_close(a, expected, 1e-5)  # a hundred steps
        assert store.stats()["misses"] > 100


def test_x1_a_leaf_of_three_times_the_memory(two_tiers):
    params = make_params({"w": (3 * 16384,)})
    grads = record_gradients(params, 4)
    with jmo.Store(*two_tiers, host_memory=16384 * 8, subgroup_elements=4096) as store:
        check_against_optax(jmo.adam(1e-2, store=store), optax.adam(1e-2), params, grads)
        stats = store.stats()
        assert stats["host_bytes"] <= 16384 * 8
        assert stats["record_bytes_total"] >= 3 * stats["host_bytes"]
