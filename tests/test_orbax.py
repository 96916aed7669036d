"""Saving with Orbax and going on: in a new process, in the same one, through each of Orbax's front doors."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from tests.checkpoints import (
    abstract,
    as_struct,
    as_text,
    clipped,
    contents,
    everything,
    go_on,
    restore,
    restore_plain,
    save,
    save_plain,
    schedule,
    tree_of,
)
from tests.processes import finish, start_python
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
    run_reference,
    tiered,
)

SAVED, LAST = 3, 5  # steps
SHAPES = {"bias": (7,), "embed": (8, 12)}


def start(store, dtype=jnp.float32, shapes=None, kind=clipped):
    """(step, tree after SAVED steps, gradients of the rest)."""
    params = make_params(shapes or SHAPES, dtype)
    grads = record_gradients(params, LAST)
    tx = kind(jmo, store=store)
    step = make_step(tx, donate=True)
    tree = tree_of(*advance(step, jax.tree.map(jnp.copy, params), tx.init(params), grads[:SAVED]))
    return step, tree, grads[SAVED:]


# -- case D4: a new process

NEW_PROCESS = """
from tests.checkpoints import *

path, end, dtype, *tiers = sys.argv[1:]
params = make_params(SMALL_SHAPES, jnp.dtype(dtype))
grads = record_gradients(params, 5)
with tiered(tiers) if tiers else jmo.Store() as store, ocp.CheckpointManager(path) as manager:
    tx = clipped(jmo, store=store)
    step = make_step(tx, donate=True)
    fresh = tree_of(params, tx.init(params))
    tree = manager.restore(manager.latest_step(), args=jmo.orbax.OffloadRestore(jax.tree.map(as_struct, fresh)))
    assert jax.tree.structure(tree) == jax.tree.structure(fresh)
    for found, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(fresh), strict=True):
        assert (found.dtype, found.shape, found.weak_type) == (expected.dtype, expected.shape, False)
        assert found.sharding.memory_kind == expected.sharding.memory_kind
    assert int(tree["opt"][1].count) == 3
    found = go_on(step, tree, grads[3:])
    assert step._cache_size() == 1
with open(end, "w") as file:
    json.dump(as_text(found), file)
"""


@pytest.mark.parametrize(("dtype", "asynchronous"), [(jnp.float32, True), (BF16, True), (jnp.float16, False)])
def test_a_new_process_goes_on_bit_for_bit(dtype, asynchronous, two_tiers, tmp_path):
    tiers = two_tiers if asynchronous else []
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous)
    with (
        tiered(tiers) if tiers else jmo.Store() as store,
        ocp.CheckpointManager(tmp_path / "run", options=options) as manager,
    ):
        step, tree, grads = start(store, dtype, SMALL_SHAPES)
        assert manager.save(SAVED, args=jmo.orbax.OffloadSave(tree))
        straight = as_text(go_on(step, tree, grads))  # donates what is being saved
        if tiers:
            assert_used_tiers(store)
    finish(start_python(NEW_PROCESS, tmp_path / "run", tmp_path / "end", jnp.dtype(dtype).name, *tiers))
    found = json.loads((tmp_path / "end").read_text())
    assert found.keys() == straight.keys()
    assert not [keys for keys in found if found[keys] != straight[keys]]


# -- a process without this package

PLAIN = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp

path, target = sys.argv[1:]
params = {"w": jnp.zeros((6, 5))}
tx = optax.adamw(1e-2)
with ocp.CheckpointManager(path) as manager:
    raw = manager.restore(3)
    tree = manager.restore(3, args=ocp.args.StandardRestore({"params": params, "opt": tx.init(params)}))
params, state = tree["params"], tree["opt"]
assert raw["opt"][0]["count"] == 3
np.testing.assert_array_equal(raw["opt"][0]["mu"]["w"], state[0].mu["w"])
for value in (0.5, -2.0):
    updates, state = jax.jit(tx.update)({"w": jnp.full((6, 5), value)}, state, params)
    params = optax.apply_updates(params, updates)
np.savez(target, params["w"], state[0].mu["w"], state[0].nu["w"])
assert "jax_mlp_offload" not in sys.modules
"""


def test_a_process_without_this_package_goes_on(tmp_path):
    grads = [{"w": jnp.full((6, 5), value)} for value in (1.0, -0.3, 0.1, 0.5, -2.0)]
    params = {"w": jnp.linspace(-1.0, 1.0, 30).reshape(6, 5)}
    with jmo.Store() as store, ocp.CheckpointManager(tmp_path / "run") as manager:
        tx = jmo.adamw(1e-2, store=store)
        new, state = advance(make_step(tx), params, tx.init(params), grads[:SAVED])
        manager.save(SAVED, args=jmo.orbax.OffloadSave(tree_of(new, state)))
    command = [sys.executable, "-c", PLAIN, tmp_path / "run", tmp_path / "end.npz"]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=tmp_path)
    masters, moments = run_reference(optax.adamw(1e-2), params, grads)
    with np.load(tmp_path / "end.npz") as found:
        assert_close(list(found.values()), [masters["w"], moments[0].mu["w"], moments[0].nu["w"]])


# -- the same process


def test_rollback_of_a_running_optimizer(two_tiers, tmp_path):
    with tiered(two_tiers) as store:
        step, tree, grads = start(store, BF16, SMALL_SHAPES)
        path = save(tmp_path / "at", tree)
        like = jax.tree.map(as_struct, tree)
        stale = tree["opt"]
        params, state = step(tree["params"], jax.tree.map(jnp.copy, stale), grads[0])
        ahead = go_on(step, tree_of(params, state), grads[1:])
        for _ in range(2):
            restored = restore(path, like)
            assert_bits_equal(go_on(step, restored, grads), ahead)
        with pytest.raises(jax.errors.JaxRuntimeError, match="latest"):  # handles of before are of no use
            jax.block_until_ready(step(make_params(SMALL_SHAPES, BF16), stale, grads[0]))
        assert_bits_equal(go_on(step, restore(path, like), grads), ahead)


@pytest.mark.parametrize("is_write", [False, True])
def test_restore_mends_an_optimizer_that_storage_broke(is_write, two_tiers, tmp_path):
    with tiered(two_tiers) as store:
        step, tree, grads = start(store, jnp.float32, SMALL_SHAPES)
        path, like = save(tmp_path / "at", tree), jax.tree.map(as_struct, tree)
        straight = go_on(step, tree, grads)
        tree = restore(path, like)
        for tier in two_tiers if not is_write else two_tiers[:1]:
            native.inject_fault(tier, is_write=is_write, error_number=errno.EIO, fail_count=1 if is_write else -1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params, state = jax.block_until_ready(step(tree["params"], tree["opt"], grads[0]))
            if is_write:
                assert_bits_equal(go_on(step, tree_of(params, state), grads[1:]), straight)
            else:
                with pytest.raises(jmo.OffloadError, match="Input/output error"):
                    store.flush()
        native.clear_faults()
        assert {w.category for w in caught} <= {jmo.TierWarning}
        assert_bits_equal(go_on(step, restore(path, like), grads), straight)


# -- front doors


def test_checkpointers_take_the_handler(tmp_path):
    with jmo.Store() as store:
        step, tree, grads = start(store)
        like = jax.tree.map(as_struct, tree)
        saved = everything(tree)
        with ocp.Checkpointer(jmo.orbax.OffloadHandler()) as checkpointer:
            checkpointer.save(tmp_path / "a", args=jmo.orbax.OffloadSave(tree))
        with ocp.AsyncCheckpointer(jmo.orbax.OffloadHandler()) as checkpointer:
            checkpointer.save(tmp_path / "b", args=jmo.orbax.OffloadSave(tree))
            straight = go_on(step, tree, grads)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "b", args=jmo.orbax.OffloadRestore(like))
            assert_bits_equal(everything(restored), saved)
        assert_bits_equal(go_on(step, restore(tmp_path / "a", like), grads), straight)
        assert contents(restore_plain(tmp_path / "a")) == contents(restore_plain(tmp_path / "b"))


def test_manager_with_several_items(tmp_path):
    with jmo.Store() as store, ocp.CheckpointManager(tmp_path) as manager:
        step, tree, grads = start(store)
        like = jax.tree.map(as_struct, tree)
        items = {"state": jmo.orbax.OffloadSave(tree), "data": ocp.args.JsonSave({"position": 17})}
        manager.save(SAVED, args=ocp.args.Composite(**items))
        straight = go_on(step, tree, grads)
        manager.wait_until_finished()
        asked = {"state": jmo.orbax.OffloadRestore(like), "data": ocp.args.JsonRestore()}
        found = manager.restore(SAVED, args=ocp.args.Composite(**asked))
        assert found["data"] == {"position": 17}
        assert_bits_equal(go_on(step, found["state"], grads), straight)
        as_arrays = manager.restore(SAVED, args=ocp.args.Composite(state=jmo.orbax.OffloadRestore()))["state"]
        assert int(as_arrays["opt"][1][0]["count"]) == SAVED


def test_a_tree_without_offloaded_states(tmp_path):
    tree = {"w": jnp.arange(6.0), "n": 3}
    save(tmp_path / "ours", tree)
    assert contents(restore(tmp_path / "ours", tree)) == contents(restore_plain(tmp_path / "ours", tree))


def test_a_state_before_its_first_update(tmp_path):
    params = make_params(SHAPES, BF16)
    grads = record_gradients(params, LAST)
    with jmo.Store() as store:
        tx = clipped(jmo, store=store)
        step = make_step(tx)
        tree = tree_of(params, tx.init(params))
        path = save(tmp_path / "ours", tree)
        plain = clipped(optax).init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        assert contents(restore_plain(path)) == contents(tree_of(params, plain))
        straight = go_on(step, tree, grads)
        restored = restore(path, abstract(tx, params))
        assert_bits_equal(go_on(step, restored, grads), straight)


# -- what others have written


def unclipped(kind, **more):
    """Clipping bf16 gradients would round them."""
    return kind.adamw(schedule(), weight_decay=0.1, **more)


def test_masters_that_a_checkpoint_lacks_are_the_params(tmp_path):
    params = make_params(SHAPES, BF16)
    grads = record_gradients(params, LAST)
    masters, moments = run_reference(unclipped(optax), params, grads[:SAVED])
    rounded = jax.tree.map(lambda m: m.astype(BF16), masters)
    path = save_plain(tmp_path / "theirs", tree_of(rounded, moments))
    with jmo.Store() as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tx = unclipped(jmo, store=store)
        found = go_on(make_step(tx), restore(path, abstract(tx, params)), grads[SAVED:])
    (warning,) = [w for w in caught if issubclass(w.category, UserWarning)]
    assert warning.category is jmo.CheckpointWarning
    assert "without float32 masters of 2 16-bit params (['bias'], ['embed'])" in str(warning.message)
    assert_close(found[1:], run_reference(unclipped(optax), rounded, grads[SAVED:], moments))


def test_moments_of_16_bits_are_converted(tmp_path):
    """Plain optax keeps the moments of bf16 params in bf16."""
    params = make_params(SHAPES, BF16)
    grads = record_gradients(params, LAST)
    plain = unclipped(optax)
    state = advance(make_step(plain), params, plain.init(params), grads[:SAVED])[1]
    assert state[0].nu["embed"].dtype == BF16
    widened = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == BF16 else x, state)
    path = save_plain(tmp_path / "theirs", tree_of(params, state))
    with jmo.Store() as store:
        tx = unclipped(jmo, store=store)
        with (
            pytest.warns(jmo.CheckpointWarning, match="mu from bfloat16 to float32, nu from bfloat16 to float32"),
            pytest.warns(jmo.CheckpointWarning, match="without float32 masters of 2"),
        ):
            restored = restore(path, abstract(tx, params))
        assert_bits_equal(jmo.read_state(restored["opt"]), widened)
        found = go_on(make_step(tx), restored, grads[SAVED:])
    assert_close(found[1:], run_reference(plain, params, grads[SAVED:], widened))


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_a_state_without_masters_that_is_saved_again_is_still_one(dtype, tmp_path):
    """Its records hold none; what stands there must not be taken for them, by whoever reads or restores it next."""
    params = make_params(SHAPES, dtype)
    grads = record_gradients(params, LAST, scale=0.1)
    masters, moments = run_reference(unclipped(optax), params, grads[:SAVED])
    rounded = jax.tree.map(lambda m: m.astype(dtype), masters)
    path = save_plain(tmp_path / "theirs", tree_of(rounded, moments))
    with jmo.Store() as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", jmo.CheckpointWarning)
        tx = unclipped(jmo, store=store)
        tree = restore(path, abstract(tx, params))
        assert_bits_equal(
            jmo.read_masters(tree["opt"], tree["params"]), jax.tree.map(lambda m: m.astype(jnp.float32), rounded)
        )
        again = save(tmp_path / "again", tree)
        found = go_on(make_step(tx), restore(again, abstract(tx, params)), grads[SAVED:])
    assert_close(found[1:], run_reference(unclipped(optax), rounded, grads[SAVED:], moments))
