"""What the tests share: recorded gradients, runs of offloaded and plain optimizers, and comparisons."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_mlp_offload as jmo

BF16 = jnp.bfloat16
SMALL_SHAPES = {"bias": (7,), "embed": (96, 128), "scalar": (), "wide": (64, 200)}


def make_params(shapes: dict[str, tuple[int, ...]], dtype: Any = jnp.float32, seed: int = 0) -> Any:
    """A flat tree of normal params."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype) for name, shape in shapes.items()}


def record_gradients(params: Any, steps: int, seed: int = 1, dtype: Any = None, scale: float = 1.0) -> list[Any]:
    """One gradient tree a step, in the params' dtype unless ``dtype`` is given."""
    rng = np.random.default_rng(seed)

    def draw(param: Any) -> Any:
        values = scale * rng.normal(size=param.shape) * np.exp(rng.normal(size=param.shape))
        return jnp.asarray(values, jnp.float32).astype(dtype or param.dtype)

    return [jax.tree.map(draw, params) for _ in range(steps)]


def make_step(tx: Any, donate: bool = False, apply: Any = optax.apply_updates) -> Any:
    """The usual jitted step: update, then apply."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return apply(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1) if donate else ())


def run(tx: Any, params: Any, grads: list[Any], state: Any = None, **options: Any) -> tuple[Any, Any]:
    """Params and state after one step a gradient."""
    step = make_step(tx, **options)
    params = jax.tree.map(jnp.copy, params)
    return advance(step, params, tx.init(params) if state is None else state, grads)


def run_reference(tx: Any, params: Any, grads: list[Any], state: Any = None) -> tuple[Any, Any]:
    """Plain optax under jit on float32 masters, gradients widened. Returns masters and state."""
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    widened = [jax.tree.map(lambda g: g.astype(jnp.float32), grad) for grad in grads]
    state = tx.init(masters) if state is None else state
    step = compile_once(make_step(tx), masters, state, widened[0]) if grads else None
    return advance(step, masters, state, widened)


_programs: dict[Any, Any] = {}  # by their text


def compile_once(step: Any, *args: Any) -> Any:
    """The jitted ``step``, compiled unless another test's had the same text: many compare with the same plain optax."""
    lowered = step.lower(*args)
    placed = tuple(getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    key = lowered.as_text(), lowered.in_tree, lowered.out_tree, placed
    if key not in _programs:
        _programs[key] = lowered.compile()
    return _programs[key]


def assert_bits_equal(actual: Any, expected: Any, what: str = "") -> None:
    """Same structure, dtypes and bits; NaN for NaN."""
    flat, tree = jax.tree_util.tree_flatten_with_path(actual)
    expected_flat, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    assert tree == expected_tree
    for (path, a), (_, b) in zip(flat, expected_flat, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        differ = (a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")) & ~(np.isnan(a) & np.isnan(b))
        assert not differ.any(), f"{what}{jax.tree_util.keystr(path)}: {differ.sum()} of {a.size} elements differ"


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6, what: str = "") -> None:
    """Within ``tolerance`` of each leaf's largest magnitude."""
    flat = jax.tree_util.tree_flatten_with_path(actual)[0]
    for (path, a), b in zip(flat, jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        if a.size == 0:
            continue
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        inf = np.isinf(b)
        np.testing.assert_array_equal(a[inf], b[inf])
        usable = np.isfinite(b)
        largest = np.abs(b[usable]).max(initial=0.0)
        worst = np.abs(a[usable] - b[usable]).max(initial=0.0)
        assert worst <= tolerance * largest, (
            f"{what}{jax.tree_util.keystr(path)}: off by {worst:.3g}, {worst / max(largest, 1e-300):.3g} of the maximum"
        )


def assert_within_ulp(params: Any, masters: Any) -> None:
    """16-bit params are the masters rounded, to one unit in the last place (near zero: to 1e-6 of the maximum)."""
    for a, master in zip(jax.tree.leaves(params), jax.tree.leaves(masters), strict=True):
        b = jnp.asarray(master).astype(a.dtype)
        x = np.asarray(a).view(np.uint16).astype(np.int32)
        y = np.asarray(b).view(np.uint16).astype(np.int32)
        x, y = (np.where(v & 0x8000, -(v & 0x7FFF), v) for v in (x, y))
        both_nan = np.isnan(np.asarray(a, np.float32)) & np.isnan(np.asarray(b, np.float32))
        off = np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32))
        near = off <= 1e-6 * np.nanmax(np.abs(np.where(np.isfinite(master), master, 0)), initial=0.0)
        assert ((np.abs(x - y) <= 1) | near | both_nan).all()


def check_against_optax(
    offloaded: Any, plain: Any, params: Any, grads: list[Any], tolerance: float = 1e-6, **options: Any
) -> tuple[Any, Any]:
    """Runs both; compares params, masters and the whole optax state. Returns params and state of the offloaded run."""
    new, state = run(offloaded, params, grads, **options)
    masters, expected = run_reference(plain, params, grads)
    low = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(params))
    if low:
        assert_close(jmo.read_masters(state, new), masters, tolerance, "master ")
        for a, p, b in zip(*map(jax.tree.leaves, (new, params, masters)), strict=True):
            assert a.dtype == p.dtype
            if a.dtype != jnp.float32:
                assert_within_ulp(a, b)
    else:
        assert_close(new, masters, tolerance, "param ")
    actual = jmo.read_state(state)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_close(actual, expected, tolerance, "state ")
    return new, state


def tiered(two_tiers: list[str], **more: Any) -> jmo.Store:
    """A store in which about a third of Adam's state of SMALL_SHAPES fits."""
    return jmo.Store(*two_tiers, host_memory=more.pop("host_memory", "110KB"), subgroup_elements=4096, **more)


def assert_used_tiers(store: jmo.Store) -> None:
    """Records were read from every tier of the store, and written to it."""
    stats = store.stats()
    assert stats["misses"] > 0
    assert all(tier["bytes_read"] > 0 and tier["bytes_written"] > 0 for tier in stats["tiers"]), stats


def advance(step: Any, params: Any, state: Any, grads: list[Any], store: jmo.Store | None = None) -> tuple[Any, Any]:
    """Params and state after one step a gradient; with a store, once its warnings have been given."""
    for grad in grads:
        params, state = step(params, state, grad)
    jax.block_until_ready(params)
    if store is not None:
        store.flush()
    return params, state


def run_and_flush(store: jmo.Store, *args: Any) -> tuple[Any, Any]:
    """As ``run``; warnings have been given when it returns."""
    result = run(*args)
    store.flush()
    return result
