"""Checkpoints that cannot be restored, and states that cannot be saved: named, and nothing else is harmed."""

from __future__ import annotations

import errno
import json
import shutil

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from tests.checkpoints import (
    abstract,
    as_struct,
    clipped,
    everything,
    go_on,
    restore,
    save,
    save_plain,
    schedule,
    tree_of,
)
from tests.support import (
    BF16,
    SMALL_SHAPES,
    advance,
    assert_bits_equal,
    make_params,
    make_step,
    record_gradients,
    tiered,
)

SHAPES = {"bias": (7,), "embed": (8, 12)}
PARAMS = make_params(SHAPES, BF16)
GRADS = record_gradients(PARAMS, 5)


def trained(store, kind=clipped, params=PARAMS, grads=GRADS[:3]):
    """(step, tree) of an optimizer after some steps."""
    tx = kind(jmo, store=store)
    step = make_step(tx)
    return step, tree_of(*advance(step, params, tx.init(params), grads))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint after three steps."""
    with jmo.Store() as store:
        return save(tmp_path_factory.mktemp("written") / "checkpoint", trained(store)[1])


@pytest.fixture
def copied(written, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(written, tmp_path / "checkpoint")


# -- checkpoints


def manifest_in(path):
    return path / "jax_mlp_offload" / "manifest.json"


def manifest_cut(path):
    manifest_in(path).write_text(manifest_in(path).read_text()[:-20])


def manifest_lacks_a_field(path):
    content = json.loads(manifest_in(path).read_text())
    del content["states"][0]["count"]
    manifest_in(path).write_text(json.dumps(content))


def manifest_of_the_future(path):
    content = json.loads(manifest_in(path).read_text())
    manifest_in(path).write_text(json.dumps({**content, "format": 99}))


def manifest_missing(path):
    manifest_in(path).unlink()


def manifest_of_another_step(path):
    content = json.loads(manifest_in(path).read_text())
    content["states"][0]["count"] = 2
    manifest_in(path).write_text(json.dumps(content))


def masters_missing(path):
    shutil.rmtree(next((path / "jax_mlp_offload").glob("0.*")))


def masters_emptied(path):
    """The array is there, its data is not."""
    for chunk in (path / "jax_mlp_offload").glob("0.*/[0-9]*"):
        chunk.unlink()


def masters_cut(path):
    for chunk in (path / "jax_mlp_offload").glob("0.*/[0-9]*"):
        chunk.write_bytes(chunk.read_bytes()[:-3])


DAMAGES = [
    (manifest_cut, r"manifest.json cannot be read .*restore another one, or remove", True),
    (manifest_lacks_a_field, r"manifest.json cannot be read .*count", True),
    (manifest_of_the_future, r"has format 99, this version reads 1", True),
    (manifest_missing, r"manifest.json cannot be read .*No such file", True),
    (manifest_of_another_step, r"opt/1 has several counts of updates, \[2, 3\]", True),
    (masters_missing, r"opt/1: the float32 masters of \['bias'\] cannot be read", True),
    (masters_emptied, r"\['(bias|embed)'\].*cannot be read.*missing", False),
    (masters_cut, r"\['(bias|embed)'\].*cannot be read", False),
]


@pytest.mark.parametrize(("damage", "message", "goes_on"), DAMAGES, ids=[damage[0].__name__ for damage in DAMAGES])
def test_damaged_checkpoints_are_refused(damage, message, goes_on, copied):
    damage(copied)
    with jmo.Store() as store:
        step, tree = trained(store)
        with pytest.raises(jmo.CheckpointError, match=message):
            restore(copied, jax.tree.map(as_struct, tree))
        check_alive(store, step, tree if goes_on else None)


def check_alive(store, step, tree=None):
    """A running optimizer goes on as if nothing had been asked for (where nothing was loaded yet), and one starts afresh."""
    with jmo.Store() as other:
        other_step, other_tree = trained(other)
        if tree is not None:
            expected = go_on(other_step, other_tree, GRADS[3:])
            assert_bits_equal(go_on(step, tree, GRADS[3:]), expected)
        expected = go_on(other_step, fresh(other), GRADS)
    assert_bits_equal(go_on(step, fresh(store), GRADS), expected)


def fresh(store):
    return tree_of(PARAMS, clipped(jmo, store=store).init(PARAMS))


def test_damaged_moments_are_refused(tmp_path):
    params = make_params({"w": (40, 60)}, BF16)
    with jmo.Store() as store:
        tx = clipped(jmo, store=store)
        step = make_step(tx)
        state = advance(step, params, tx.init(params), [params])[1]
        path = save(tmp_path / "checkpoint", {"opt": state})
        for file in path.rglob("d/*"):  # what Orbax itself writes; small values are in its tree, which is left alone
            if file.stat().st_size > 5000:
                file.write_bytes(b"\0" * file.stat().st_size)
        with pytest.raises(jmo.CheckpointError, match=r"\['w'\].*cannot be read"):
            restore(path, {"opt": jax.tree.map(as_struct, state)})
        go_on(step, tree_of(params, tx.init(params)), [params])
        store.flush()


def test_a_handle_alone_is_refused(tmp_path):
    with jmo.Store() as store:
        step, tree = trained(store)
        path = save_plain(tmp_path / "handle", tree)
        with pytest.raises(
            jmo.CheckpointError, match=r"opt/1.*StandardSave.*jmo\.orbax\.OffloadSave.*params alone"
        ) as caught:
            restore(path, jax.tree.map(as_struct, tree))
        assert "init" in str(caught.value)
        check_alive(store, step, tree)


def sgd(kind, **more):
    return optax.chain(optax.clip_by_global_norm(1.0), kind.sgd(schedule(), 0.9, **more))


def chained_otherwise(kind, **more):
    return optax.chain(optax.identity(), optax.clip_by_global_norm(1.0), kind.adamw(schedule(), **more))


def with_one_more(params):
    return {**params, "new": jnp.zeros((3,), BF16)}


def of_another_shape(params):
    return {**params, "bias": jnp.zeros((9,), BF16)}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (sgd, dict, r"opt/1 .* of another optimizer .*lacks 0/trace/bias"),
        (clipped, with_one_more, r"opt/1 .* of other params: it lacks 0/mu/new, 0/nu/new"),
        (clipped, of_another_shape, r"opt/1 .*has 0/mu/bias with shape \(7,\), not \(9,\)"),
        (chained_otherwise, dict, r"nothing at opt/2"),
    ],
)
def test_another_optimizer_or_other_params_are_refused(kind, change, message, written):
    params = change(PARAMS)
    with jmo.Store() as store:
        tx = kind(jmo, store=store)
        with pytest.raises(jmo.CheckpointError, match=message):
            restore(written, abstract(tx, params))
        go_on(make_step(tx), tree_of(params, tx.init(params)), [params])


def test_an_optimizer_must_be_known(written):
    with jmo.Store() as store:
        tree = abstract(clipped(jmo, store=store), PARAMS)
    with pytest.raises(jmo.CheckpointError, match=r"no offloaded optimizer for the state at opt/1: call tx\.init"):
        restore(written, tree)
    with jmo.Store() as one, jmo.Store() as other:
        clipped(jmo, store=one).init(PARAMS)
        with pytest.raises(jmo.CheckpointError, match=r"no offloaded optimizer"):
            restore(written, tree, store=other)
        restore(written, tree, store=one)


def test_two_that_fit_are_told_apart_by_name_only(tmp_path):
    def named(name):
        return lambda kind, **more: kind.adamw(1e-2, **more, **({"name": name} if kind is jmo else {}))

    with jmo.Store() as store:
        trees = {name: trained(store, named(name), grads=GRADS[: 2 + i])[1] for i, name in enumerate("ab")}
        saved = {name: everything(tree) for name, tree in trees.items()}
        path = save(tmp_path / "ours", trees)
        theirs = save_plain(tmp_path / "theirs", {"a": tree_of(saved["a"][0], saved["a"][2])})
        restored = restore(path, jax.tree.map(as_struct, trees))
        for name, tree in restored.items():
            assert_bits_equal(everything(tree), saved[name])
        with pytest.raises(jmo.CheckpointError, match=r"'a', 'b'.*does not say which"):
            restore(theirs, {"a": jax.tree.map(as_struct, trees["a"])})


# -- states


def test_a_stale_state_is_not_saved(two_tiers, tmp_path):
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 5)
    with tiered(two_tiers) as store:
        step, tree = trained(store, params=params, grads=grads[:3])
        latest = tree_of(*step(tree["params"], tree["opt"], grads[3]))
        with pytest.raises(ValueError, match=r"ticket.*earlier step"):
            save(tmp_path / "stale", tree)
        found = go_on(step, latest, grads[4:])  # nothing is held
    with jmo.Store() as store:
        step, tree = trained(store, params=params, grads=grads[:3])
        assert_bits_equal(found, go_on(step, tree, grads[3:]))


def test_a_poisoned_state_is_not_saved(two_tiers, tmp_path):
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 5)
    with tiered(two_tiers) as store:
        step, tree = trained(store, params=params, grads=grads[:3])
        for tier in two_tiers:
            native.inject_fault(tier, is_write=False, error_number=errno.EIO)
        failed = tree_of(*jax.block_until_ready(step(tree["params"], tree["opt"], grads[3])))
        for old_or_new in (failed, tree):
            with pytest.raises((jmo.OffloadError, ValueError), match=r"failed|Input/output error|ticket"):
                save(tmp_path / "poisoned", old_or_new)
        native.clear_faults()
        tx = clipped(jmo, store=store)
        found = go_on(step, tree_of(params, tx.init(params)), grads)
    with jmo.Store() as store:
        tx = clipped(jmo, store=store)
        assert_bits_equal(found, go_on(make_step(tx), tree_of(params, tx.init(params)), grads))


def test_the_state_of_a_closed_store_is_not_saved(tmp_path):
    with jmo.Store() as store:
        _, tree = trained(store)
    with pytest.raises(ValueError, match="closed store"):
        save(tmp_path / "closed", tree)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(ValueError, match="closed store"):
            manager.save(1, args=jmo.orbax.OffloadSave(tree))
        with jmo.Store() as store:
            step, tree = trained(store)
            manager.save(2, args=jmo.orbax.OffloadSave(tree))
            manager.wait_until_finished()
            straight = go_on(step, tree, GRADS[3:])
            restored = manager.restore(2, args=jmo.orbax.OffloadRestore(jax.tree.map(as_struct, tree)))
            assert_bits_equal(go_on(step, restored, GRADS[3:]), straight)


def test_one_bad_state_of_several_leaves_no_hold(tmp_path):
    """The first is captured before the second is refused."""
    with jmo.Store() as good, jmo.Store() as bad:
        step, tree = trained(good)
        _, other = trained(bad)
        bad.close()
        with pytest.raises(ValueError, match="ticket"):
            save(tmp_path / "both", {"a": tree, "b": other})
        check_alive(good, step, tree)
