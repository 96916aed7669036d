"""Cases from the field (``D``, ``X``: public bug reports of systems that do this job), against plain optax: numbers."""

from __future__ import annotations

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_mlp_offload as jmo
from tests.support import (
    BF16,
    SMALL_SHAPES,
    assert_bits_equal,
    assert_close,
    assert_within_ulp,
    check_against_optax,
    make_params,
    make_step,
    record_gradients,
    run,
    run_and_flush,
    run_reference,
)

MEMORY = "110KB"  # two or three records of 4096 elements


@pytest.fixture(params=["host", "one tier", "two tiers"])
def places(request, two_tiers):
    """The tiers of a store: none, one or two."""
    return two_tiers[: {"host": 0, "one tier": 1, "two tiers": 2}[request.param]]


# -- D1, D2: sizes


UGLY = {"scalar": (), "one": (1,), "empty": (0, 4), "seven": (7,), "prime": (1031,), "matrix": (3, 5)}


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_d1_ugly_tree(dtype, places):
    params = {**make_params(UGLY, dtype), "none": None}
    grads = record_gradients(params, 10)
    with jmo.Store(*places, host_memory=25_000 if places else None, subgroup_elements=8) as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store)
        check_against_optax(tx, optax.adamw(1e-2, weight_decay=0.1), params, grads)
        first, state = run(tx, params, grads[:1])  # starts afresh
        masters = jmo.read_masters(state, first)
        for name, old in params.items():
            if old is not None and old.size:
                assert bool(jnp.all(masters[name] != old.astype(jnp.float32))), name
        store.flush()
        stats = store.stats()
        assert stats["misses"] > 0 if places else stats["misses"] == 0
        assert all(tier["bytes_read"] > 0 for tier in stats["tiers"])


@pytest.mark.parametrize("tree", [{}, {"none": None}, {"empty": (0, 4)}, ()])
def test_d1_tree_with_nothing_in_it(tree, places):
    params = {k: None if v is None else jnp.zeros(v) for k, v in tree.items()} if tree else tree
    with jmo.Store(*places) as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store)
        state = tx.init(params)
        for _ in range(3):
            updates, state = jax.jit(tx.update)(params, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert int(state.count) == 3
        store.flush()


# elements: 2-byte moments of 2, 510-514, 4094-4098 bytes, 4-byte ones of 4, 508-516, 4092-4100 bytes
EDGES = (1, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 2047, 2048, 2049)


@pytest.mark.parametrize("place", ["ext4", "tmpfs"])
@pytest.mark.parametrize("mu_dtype", [None, BF16])
def test_d2_sizes_around_sectors_and_pages(mu_dtype, place, tmp_path, shm_path):
    """Moments come back from the tier bit for bit, and the last elements moved."""
    tier = tmp_path if place == "ext4" else shm_path
    params = make_params({f"n{size:05}": (size,) for size in EDGES})
    grads = record_gradients(params, 4)
    with jmo.Store(subgroup_elements=1) as store:
        expected, state = run(jmo.adam(1e-2, mu_dtype=mu_dtype, store=store), params, grads)
        moments = jmo.read_state(state)
    with jmo.Store(tier, host_memory=3 * 20480, subgroup_elements=1) as store:
        new, state = run(jmo.adam(1e-2, mu_dtype=mu_dtype, store=store), params, grads)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), moments)
        stats = store.stats()
        assert stats["records"] == len(EDGES)
        assert stats["misses"] >= 3 * (len(EDGES) - 4)
    for old, moved in zip(*map(jax.tree.leaves, (params, new)), strict=True):
        assert old[-1] != moved[-1]


def test_d2_sizes_around_the_block(tmp_path):
    """One transfer is of 4 MiB: records of that size, a page less and a page more."""
    block = 4 * 2**20 // 8
    params = make_params({"less": (block - 513,), "same": (block,), "more": (block + 1,)})
    grads = record_gradients(params, 3)
    with jmo.Store(subgroup_elements=block + 4096) as store:
        expected, state = run(jmo.adam(1e-2, store=store), params, grads)
        moments = jmo.read_state(state)
    with jmo.Store(tmp_path, host_memory="9MiB", subgroup_elements=block + 4096) as store:
        new, state = run(jmo.adam(1e-2, store=store), params, grads)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), moments)
        assert store.stats()["misses"] >= 2
        assert all(new[name][-1] != params[name][-1] for name in params)


@pytest.mark.slow
def test_d2_a_leaf_of_more_than_2_gib(tmp_path):
    size = 2**29 + 3
    params = {"huge": jnp.ones((size,), jnp.float32)}
    with jmo.Store(tmp_path, host_memory="512MiB") as store:
        tx = jmo.sgd(0.5, 0.5, store=store)
        step, state = make_step(tx, donate=True), tx.init(params)
        for expected in (0.5, -0.25):  # trace 1, then 1.5
            params, state = step(params, state, {"huge": jnp.ones((size,), jnp.float32)})
            assert float(params["huge"][-1]) == expected
            assert float(params["huge"].min()) == float(params["huge"].max()) == expected
        assert store.stats()["tiers"][0]["bytes_read"] > 2**30


@pytest.fixture
def shm_path(tmp_path):
    """A directory on tmpfs, whose O_DIRECT differs from that of a disk."""
    root = pathlib.Path("/dev/shm")
    if not root.is_dir():
        pytest.skip("no /dev/shm here")
    path = root / f"jmo-test-{os.getpid()}-{tmp_path.name}"
    path.mkdir()
    yield path
    assert not list(path.iterdir())
    path.rmdir()


# -- D5: clipping


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_d5_clip_in_front(dtype):
    params = {"a": jnp.zeros((), dtype), "b": jnp.zeros((), dtype)}
    with jmo.Store() as store:
        tx = optax.chain(optax.clip_by_global_norm(1.0), jmo.sgd(1.0, store=store))
        new, state = run(tx, params, [{"a": jnp.asarray(3.0), "b": jnp.asarray(4.0)}])
        masters = jmo.read_masters(state, new)
        np.testing.assert_allclose([masters["a"], masters["b"]], [-0.6, -0.8], rtol=1e-6)
        rtol = 1e-6 if dtype == jnp.float32 else 2**-8
        np.testing.assert_allclose([float(new["a"]), float(new["b"])], [-0.6, -0.8], rtol=rtol)


# -- X3, X4, X10: numbers


def test_x3_a_lossless_master_moves():
    """A step of 1e-3 is lost on bf16 near 1: there plain Adam stands still."""
    params = {"w": jnp.ones((64,), BF16)}
    grad = {"w": jnp.ones((64,), BF16)}
    with jmo.Store() as store:
        new, state = run(jmo.adam(1e-3, store=store), params, [grad] * 300)
        np.testing.assert_allclose(jmo.read_masters(state, new)["w"], 0.70, atol=1e-3)
        np.testing.assert_allclose(np.asarray(new["w"], np.float32), 0.70, atol=3e-3)
    plain, _ = run(optax.adam(1e-3), params, [grad] * 300)
    assert float(plain["w"][0]) == 1.0


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_x4_tied_leaves_have_two_states(dtype, two_tiers):
    w = make_params({"w": (100, 120)}, dtype)["w"]
    params = {"emb": w, "head": w}
    grads = record_gradients(params, 5)
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        tx = jmo.adamw(1e-2, store=store)
        step, state, new = make_step(tx), tx.init(params), params
        for grad in grads:
            new, state = step(new, state, grad)
        expected, plain = run_reference(optax.adamw(1e-2), params, grads)
        assert_close(jmo.read_masters(state, new), expected)
        assert_close(jmo.read_state(state), plain)
        assert store.stats()["misses"] > 0


def test_x10_two_rules_on_one_store_one_made_anew(two_tiers):
    params = make_params({"a": (90, 100), "b": (9001,)})
    grads = record_gradients(params, 6)
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        adam, sgd = jmo.adam(1e-2, store=store), jmo.sgd(1e-2, 0.9, store=store)
        tx = optax.partition({"adam": adam, "sgd": sgd}, {"a": "adam", "b": "sgd"})
        step, state, new = make_step(tx), tx.init(params), params
        for grad in grads[:3]:
            new, state = step(new, state, grad)
        half = new
        state.inner_states["adam"] = tx.init(params).inner_states["adam"]
        for grad in grads[3:]:
            new, state = step(new, state, grad)
        expected, _ = run_reference(optax.sgd(1e-2, 0.9), {"b": params["b"]}, [{"b": g["b"]} for g in grads])
        assert_close({"b": new["b"]}, expected)
        expected, _ = run_reference(optax.adam(1e-2), {"a": half["a"]}, [{"a": g["a"]} for g in grads[3:]])
        assert_close({"a": new["a"]}, expected)
        assert all(tier["bytes_read"] > 0 for tier in store.stats()["tiers"])


# -- X8, X9: params from elsewhere


def test_x8_weights_replaced_from_outside(two_tiers):
    """Adopted once, with a warning that names the leaves; the moments stay."""
    params = make_params(SMALL_SHAPES, BF16)
    grads = record_gradients(params, 9)
    plain = optax.adamw(1e-2, weight_decay=0.1)
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store)
        step, state = make_step(tx), tx.init(params)

        def train(params, state, grads):
            for grad in grads:
                params, state = step(params, state, grad)
            jax.block_until_ready(params)
            store.flush()
            return params, state

        new, state = train(params, state, grads[:3])
        _, moments = run_reference(plain, params, grads[:3])
        # half of the weights of one leaf
        odd = jnp.arange(new["embed"].size).reshape(new["embed"].shape) % 2
        new = {**new, "embed": jnp.where(odd, 0, new["embed"])}
        kept = jmo.read_masters(state, new)
        start = {**kept, "embed": new["embed"].astype(jnp.float32)}
        with pytest.warns(jmo.ForeignParamsWarning, match="embed") as told:
            new, state = train(new, state, grads[3:6])
        assert len(told) == 1
        assert "wide" not in str(told[0].message)
        expected, moments = run_reference(plain, start, grads[3:6], moments)
        assert_close(jmo.read_masters(state, new), expected, 1e-5)
        assert store.stats()["adopted_steps"] == 1
        # all weights of another run
        other = make_params(SMALL_SHAPES, BF16, seed=9)
        with pytest.warns(jmo.ForeignParamsWarning) as told:
            new, state = train(other, state, grads[6:])
        assert len(told) == 1
        assert all(name in str(told[0].message) for name in SMALL_SHAPES)
        expected, moments = run_reference(plain, other, grads[6:], moments)
        assert_close(jmo.read_masters(state, new), expected, 1e-5)
        assert_within_ulp(new, jmo.read_masters(state, new))
        assert_close(jmo.read_state(state), moments, 1e-5)
        assert store.stats()["adopted_steps"] == 2


def test_x8_one_replaced_element_is_found():
    params = make_params({"w": (9000,)}, BF16)
    grads = record_gradients(params, 3)
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        new, state = step(params, state, grads[0])
        new = {"w": new["w"].at[8999].set(-new["w"][8999])}
        with pytest.warns(jmo.ForeignParamsWarning, match="'w'"):
            run_and_flush(store, tx, new, grads[1:2], state)


@pytest.mark.parametrize("behind", [optax.scale(0.5), optax.clip(1e-3)])
def test_x9_a_transform_behind_bfloat16_is_refused(behind):
    params = make_params(SMALL_SHAPES, BF16)
    grads = record_gradients(params, 3)
    store = jmo.Store()
    try:
        tx = optax.chain(jmo.adamw(1e-2, store=store), behind)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)embed.*in front"):
            run(tx, params, grads)
        with pytest.raises(jmo.ForeignParamsError, match="in front"):
            store.flush()
    finally:
        store._close_quietly()


@pytest.mark.parametrize(("mode", "adopted"), [("adopt", 2), ("error", None)])
def test_x9_foreign_params_modes(mode, adopted):
    params = make_params({"w": (500,)}, BF16)
    grads = record_gradients(params, 3)
    store = jmo.Store()
    try:
        tx = jmo.adamw(1e-2, store=store, foreign_params=mode)
        step, state = make_step(tx), tx.init(params)
        new, state = step(params, state, grads[0])
        for grad in grads[1:]:
            new = jax.tree.map(lambda p: p * 2, new)
            if adopted is None:
                with pytest.raises(jax.errors.JaxRuntimeError, match="adopt"):
                    jax.block_until_ready(step(new, state, grad))
                break
            new, state = step(new, state, grad)
        if adopted is not None:
            jax.block_until_ready(new)
            store.flush()
            assert store.stats()["adopted_steps"] == adopted
    finally:
        store._close_quietly()


# -- X7, X11: values and dtypes


def test_x7_complex_leaves_are_refused_by_name():
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store)
        with pytest.raises(ValueError, match=r"(?s)'odd'.*complex64.*masked"):
            tx.init({"fine": jnp.ones(3), "odd": jnp.ones(3, jnp.complex64)})


def special_values():
    big = float(jnp.finfo(BF16).max)
    tiny = float(np.float32(1e-40))  # a subnormal, in bf16 too
    return np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, big, -big, 1.0, -1.5, 1e-30], np.float32)


def assert_same_values(actual, expected, rtol):
    """Element by element; NaN for NaN; zero and what is flushed to it count as one."""
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(
                np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=1.2e-38, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_x11_special_values(kind, dtype, tmp_path):
    """Every special param with every special gradient, from a tier, over three steps."""
    values = special_values()
    args = {"adamw": (1e-2,), "sgd": (1e-2, 0.9)}[kind]
    grid = np.repeat(values[:, None], values.size, 1)
    params = {"w": jnp.asarray(grid).astype(dtype), "plain": jnp.ones((30000,), dtype)}
    grad = {"w": jnp.asarray(grid.T).astype(dtype), "plain": jnp.ones((30000,), dtype)}
    ones = jax.tree.map(jnp.ones_like, grad)
    grads = [grad, ones, jax.tree.map(lambda g: g[::-1], grad)]
    with jmo.Store(tmp_path, host_memory="100KB", subgroup_elements=4096) as store:
        new, state = run(getattr(jmo, kind)(*args, store=store), params, grads)
        masters, moments = run_reference(getattr(optax, kind)(*args), params, grads)
        assert_same_values(jmo.read_masters(state, new), masters, 2e-6)
        assert_same_values(jmo.read_state(state), moments, 2e-6)
        rounded = jax.tree.map(lambda m: m.astype(dtype), masters)
        assert_same_values(new, rounded, 1e-6 if dtype == jnp.float32 else 2**-7)
        stats = store.stats()
        assert stats["adopted_steps"] == 0
        assert stats["tiers"][0]["bytes_read"] > 0
