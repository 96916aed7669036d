"""Snapshots and the way back: the same numbers, on other tiers, meshes and processes; and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts

import jax_mlp_offload as jmo
from benchmarks import snapshot as benchmark
from jax_mlp_offload import native
from jax_mlp_offload.filling import load
from jax_mlp_offload.snapshots import source as snapshot_source
from tests.meshes import P, mesh_of, shard
from tests.processes import finish, start_python
from tests.snapshots import SMALL, allocated_bytes, digest, go_on, host_states, records, seen, straight, train, train_on
from tests.support import (
    BF16,
    SMALL_SHAPES,
    advance,
    assert_bits_equal,
    assert_used_tiers,
    make_params,
    make_step,
    record_gradients,
)

DTYPES = [jnp.float32, BF16, jnp.float16]


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_new_process_goes_on_bit_for_bit(dtype, tmp_path):
    params, grads, expected = straight(dtype)
    with jmo.Store(tmp_path / "tier", **SMALL) as store:
        new, state = train(jmo.adamw(1e-2, store=store), params, grads[:3])
        store.snapshot(tmp_path / "snapshot", {"params": new, "state": state, "step": 3})
        assert_used_tiers(store)
    code = """
    dtype = jnp.dtype(sys.argv[3])
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 5)
    with jmo.Store(sys.argv[1], host_memory="110KB", subgroup_elements=4096) as store:
        tx = jmo.adamw(1e-2, store=store)
        tree = {"params": params, "state": jax.eval_shape(tx.init, params), "step": 0}
        tree = store.restore_snapshot(sys.argv[2], tree)
        assert tree["step"] == 3 and int(tree["state"].count) == 3
        step, (params, state) = make_step(tx), (tree["params"], tree["state"])
        for grad in grads[3:]:
            params, state = step(params, state, grad)
        leaves = jax.tree.leaves((params, jmo.read_state(state), jmo.read_masters(state, params)))
        np.savez(sys.argv[4], *[np.asarray(leaf).view(f"u{leaf.dtype.itemsize}") for leaf in leaves])
    """
    result = tmp_path / "result.npz"
    finish(start_python(code, tmp_path / "tier", tmp_path / "snapshot", jnp.dtype(dtype).name, result))
    with np.load(result) as found:
        got = [found[f"arr_{i}"] for i in range(len(found.files))]
    expected = jax.tree.leaves(expected)
    assert_bits_equal([g.view(e.dtype).reshape(e.shape) for g, e in zip(got, expected, strict=True)], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_tiers_memory_and_subgroups(dtype, tmp_path):
    """Verbatim where the records are the same, else in pieces; with the tree, or with the states alone."""
    params, grads, expected = straight(dtype)
    with jmo.Store(tmp_path / "tier", **SMALL) as store:
        new, state = train(jmo.adamw(1e-2, store=store), params, grads[:3])
        store.snapshot(tmp_path / "whole", (new, state))
        store.snapshot(tmp_path / "states")
    others = [SMALL, {"host_memory": "300KB", "subgroup_elements": 1000}, {"subgroup_elements": 50_000}]
    for number, (tier, other) in enumerate(zip([tmp_path / "other", "memory://snapshot/", None], others, strict=True)):
        with jmo.Store(*([] if tier is None else [tier]), **other) as store:
            tx = jmo.adamw(1e-2, store=store)
            abstract = jax.eval_shape(lambda: (params, tx.init(params)))  # noqa: B023
            restored = store.restore_snapshot(tmp_path / "whole", abstract)
            assert_bits_equal(go_on(tx, *restored, grads[3:]), expected, f"{number} ")
            states = store.restore_snapshot(tmp_path / "states")
            assert host_states(states) == dict.fromkeys(store.stats()["optimizers"], 3)
            assert_bits_equal(go_on(tx, new, *states.values(), grads[3:]), expected, f"{number} ")
            # a tree of which the snapshot has none: states are put in, all else stays
            put = store.restore_snapshot(tmp_path / "states", {"p": new, "s": (optax.EmptyState(), state)})
            assert put["p"]["wide"] is new["wide"]
            assert_bits_equal(go_on(tx, put["p"], put["s"][1], grads[3:]), expected, f"{number} ")


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_other_meshes(dtype, tmp_path, monkeypatch):
    """From eight devices with replicas to the same, to another mesh, to fewer devices and to one; and from one to eight."""
    if dtype == BF16:  # leaves of a realistic size are read in several parts
        monkeypatch.setattr(snapshot_source, "_ENCLOSING_ELEMENTS", 64)
    shapes = {"embed": (96, 64), "norm": (48,), "out": (64, 136), "scale": (), "odd": (1031,), "table": (400, 200)}
    specs = {**dict.fromkeys(shapes, P()), "embed": P("fsdp"), "out": P("data", "fsdp"), "table": P(None, "fsdp")}
    params = make_params(shapes, dtype)
    grads = record_gradients(params, 5)
    meshes = {
        "2x4": mesh_of(data=2, fsdp=4),
        "4x2": mesh_of(data=4, fsdp=2),
        "1x2": mesh_of(data=1, fsdp=2),
        "1": None,
    }

    def go(mesh, store, trees, tree=None):
        """What is seen after steps from the tree (else from the start), and the tree."""
        tx = jmo.adamw(1e-2, store=store, **({} if mesh is None else {"mesh": mesh, "param_specs": specs}))
        place = (lambda x: x) if mesh is None else (lambda x: shard(x, mesh, specs))
        if tree is not None:
            p = place(params)
            p, s = store.restore_snapshot(tree, (p, jax.jit(tx.init)(p)))
        else:
            p = place(params)
            s = jax.jit(tx.init)(p)
        step = make_step(tx)
        for grad in trees:
            p, s = step(p, s, place(grad))
        return seen(s, p), (p, s)

    options = {"host_memory": "800KB", "subgroup_elements": 4096}
    with jmo.Store() as store:
        expected, _ = go(None, store, grads)
    ways = {"2x4": ["2x4", "4x2"]} if dtype != BF16 else {"2x4": ["2x4", "4x2", "1x2", "1"], "1": ["2x4"]}
    for source, targets in ways.items():
        with jmo.Store(tmp_path / "tier", **options) as store:
            _, tree = go(meshes[source], store, grads[:3])
            store.snapshot(tmp_path / source, tree)
        for target in targets:
            with jmo.Store(tmp_path / "other", **options) as store:
                found, _ = go(meshes[target], store, grads[3:], tmp_path / source)
            assert_bits_equal(found, expected, f"{source} to {target}: ")


def test_links_add_nothing_and_stay_as_they_are(tmp_path):
    params, grads, _ = straight(jnp.float32, 13)
    with jmo.Store(tmp_path / "tier", **SMALL) as store:
        tx = jmo.adamw(1e-2, store=store)
        params, state = train(tx, params, grads[:3])
        store.flush()
        before = allocated_bytes(tmp_path / "tier")
        store.snapshot(tmp_path / "snapshot")
        stats = store.stats()
        linked = [path for path in records(tmp_path / "snapshot") if path.stat().st_nlink > 1]
        copied = [path for path in records(tmp_path / "snapshot") if path.stat().st_nlink == 1]
        assert len(linked) > len(copied)
        assert len(copied) == stats["slots"]  # all of them dirty
        manifests = sum(path.stat().st_blocks * 512 for path in (tmp_path / "snapshot").rglob("manifest.json"))
        added = allocated_bytes(tmp_path) - before
        assert added == sum(path.stat().st_size for path in copied) + manifests
        assert not list((tmp_path / "tier").glob("*/kept/*"))
        old = digest(tmp_path / "snapshot")
        step = make_step(tx)
        for grad in grads[3:]:
            params, state = step(params, state, grad)
        store.flush()
        assert digest(tmp_path / "snapshot") == old
        assert all(path.stat().st_nlink == 1 for path in linked)
    assert digest(tmp_path / "snapshot") == old


def test_updates_go_on_while_it_is_written(tmp_path):
    """Slow storage: the steps made meanwhile are not in it, and are those that they would have been."""
    params, grads, expected = straight(jnp.float32, 6)
    with jmo.Store(tmp_path / "tier", **SMALL) as store:
        tx = jmo.adamw(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        params, state = advance(step, params, state, grads[:3])
        kept = seen(state, params)
        native.inject_fault(str(tmp_path / ".new-"), is_write=True, min_delay_s=0.6, max_delay_s=0.6)
        writing = threading.Thread(target=store.snapshot, args=[tmp_path / "snapshot"])
        writing.start()
        while not store.engine.driver.captures and writing.is_alive():
            pass
        params, state = advance(step, params, state, grads[3:])
        was_written = writing.is_alive()
        writing.join()
        native.clear_faults()
        assert was_written
        assert_bits_equal(seen(state, params), expected)
        (old,) = store.restore_snapshot(tmp_path / "snapshot").values()
        assert_bits_equal(seen(old, kept[0]), kept)


def test_another_file_system(tmp_path):
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system")
    params, grads, expected = straight(BF16)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other, jmo.Store(tmp_path, **SMALL) as store:
        tx = jmo.adamw(1e-2, store=store)
        params, state = train(tx, params, grads[:3])
        store.snapshot(f"{other}/snapshot")
        assert all(path.stat().st_nlink == 1 for path in records(f"{other}/snapshot"))
        go_on(tx, params, state, grads[3:])
        (state,) = store.restore_snapshot(f"{other}/snapshot").values()
        assert_bits_equal(go_on(tx, params, state, grads[3:]), expected)


def test_several_optimizers_and_one_without_a_state(tmp_path):
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 5)

    def optimizer(store):
        parts = {"a": jmo.adamw(1e-2, store=store), "b": jmo.sgd(1e-2, momentum=0.9, store=store, name="b")}
        labels = {"bias": "a", "embed": "a", "scalar": "b", "wide": "b"}
        return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(parts, labels))

    with jmo.Store(tmp_path / "tier", **SMALL) as store:
        tx, idle = optimizer(store), jmo.adam(1e-2, store=store, name="idle")
        never = idle.init(params)
        first = train(tx, params, grads[:3])
        store.snapshot(tmp_path / "snapshot", (*first, never))
        expected = jax.device_get(train_on(tx, first, grads[3:]))
    with jmo.Store(**SMALL | {"host_memory": "2MB"}) as store:
        tx, idle = optimizer(store), jmo.adam(1e-2, store=store, name="idle")
        tree = store.restore_snapshot(tmp_path / "snapshot", (params, tx.init(params), idle.init(params)))
        assert int(tree[2].ticket[0]) == 0
        assert_bits_equal(jax.device_get(train_on(tx, tree[:2], grads[3:])), expected)
        states = store.restore_snapshot(tmp_path / "snapshot")
        assert len(states) == 2 and "b" in states and set(host_states(states).values()) == {3}


def test_an_update_that_waits_too_long(tmp_path):
    """Training goes before: after the deadline records are let go, and the snapshot says so."""
    params, grads, expected = straight(jnp.float32)
    with jmo.Store(tmp_path / "tier", **SMALL, deadline_s=1.5) as store:
        tx = jmo.adamw(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        params, state = advance(step, params, state, grads[:3])
        native.inject_fault(str(tmp_path / ".new-"), is_write=True, min_delay_s=5.0, max_delay_s=5.0)
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(store.snapshot, tmp_path / "snapshot")
            while not store.engine.driver.captures and not writing.done():
                pass
            params, state = advance(step, params, state, grads[3:])
            assert_bits_equal(seen(state, params), expected)
            with pytest.raises(jmo.DeadlineError, match="the checkpoint was given up"):
                writing.result()
    assert os.listdir(tmp_path) == ["tier"]


def test_float16_without_masters(tmp_path):
    """A record that says it has no masters says so in any plan: they are the params, and not zero."""
    params = make_params(SMALL_SHAPES, jnp.float16)
    grads = record_gradients(params, 3)
    bad = jax.tree.map(lambda g: g * jnp.nan, grads[0])
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, skip_nonfinite=True)
        expected = go_on(tx, params, tx.init(params), grads)
    with jmo.Store(**SMALL | {"host_memory": "2MB"}) as store:
        tx = jmo.adamw(1e-2, store=store, skip_nonfinite=True)
        with pytest.warns(jmo.SkippedStepWarning):
            _, state = advance(make_step(tx), params, tx.init(params), [bad], store)
        store.snapshot(tmp_path / "skipped", state)
        (binding,) = store.bindings()
        zeros = {
            (leaf, section): ts.array(np.zeros(shape, np.float32))
            for leaf, shape in enumerate(binding.shapes)
            for section in ("mu", "nu")
        }
        load(binding, zeros, store.engine)
        store.snapshot(tmp_path / "loaded")
    for name, options in itertools.product(("skipped", "loaded"), (SMALL, {"subgroup_elements": 1000})):
        with jmo.Store(**options | {"host_memory": "2MB"}) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore", jmo.CheckpointWarning)  # masters are missing
            tx = jmo.adamw(1e-2, store=store, skip_nonfinite=True)
            state = store.restore_snapshot(tmp_path / name, tx.init(params))
            assert_bits_equal(go_on(tx, params, state, grads), expected, f"{name} {options} ")


def test_the_benchmark(tmp_path):
    arguments = [
        "--state",
        "4e6",
        "--tier",
        str(tmp_path),
        "--subgroup-elements",
        "8192",
        "--repeats",
        "1",
        "--steps",
        "2",
    ]
    benchmark.main(
        [*arguments, "--json", str(tmp_path / "out.json")]
    )  # of so little, a snapshot takes as long as a copy
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert figures["same_after_steps"]
    assert 0 < figures["added_beyond_memory_bytes"] < 50_000
    assert figures["disk_after_next_step_bytes"] > figures["disk_after_bytes"] + figures["state_bytes"] // 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
