"""Snapshots that a store takes by itself: when, how many are kept, and that none of it disturbs training."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from tests.snapshots import SMALL, host_states, seen
from tests.support import BF16, SMALL_SHAPES, advance, assert_bits_equal, make_params, make_step, record_gradients


def begin(store, dtype=jnp.float32, steps=12):
    params = make_params(SMALL_SHAPES, dtype)
    tx = jmo.adamw(1e-2, store=store)
    return make_step(tx), params, tx.init(params), record_gradients(params, steps)


def until(condition, timeout_s=30.0):
    """Waits for what happens on other threads."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def settled(store):
    """Waits until the steps so far have ended, and what was taken is written."""
    store.flush()
    until(lambda: not any(thread.name == "jmo-snapshot" for thread in threading.enumerate()))
    return store.stats()["snapshots"]


def test_the_newest_two_are_kept_and_hold_their_step(tmp_path):
    folder = tmp_path / "snapshots"
    with jmo.Store(tmp_path / "tier", **SMALL, snapshot_every=3, snapshot_dir=folder) as store:
        step, params, state, grads = begin(store)
        kept = {}
        for number, grad in enumerate(grads, 1):
            params, state = step(params, state, grad)
            kept[number] = seen(state, params)
            settled(store)
            store.flush()
        assert sorted(os.listdir(folder)) == ["lock", "step-12", "step-9"]
        stats = store.stats()["snapshots"]
        assert stats["taken"] == 4 and stats["failed"] == stats["skipped"] == 0
        assert stats["last"] == str(folder / "step-12") and stats["seconds"] > 0
    for number in (9, 12):
        with jmo.Store(tmp_path / "tier", **SMALL) as store:
            step, *_ = begin(store)
            (state,) = store.restore_snapshot(folder / f"step-{number}").values()
            assert int(state.count) == number
            assert_bits_equal(seen(state, kept[number][0]), kept[number])
    with jmo.Store() as store:
        begin(store)
        assert set(host_states(store.restore_snapshot(folder)).values()) == {12}  # the newest


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_with_every_step_a_failed_update_costs_nothing(dtype, tmp_path):
    """The loop goes on with the params that are alive, and the numbers are those of a run without a failure."""
    with jmo.Store() as store:
        step, params, state, grads = begin(store, dtype, 6)
        for grad in grads:
            params, state = step(params, state, grad)
        expected = seen(state, params)
    folder = tmp_path / "snapshots"
    with jmo.Store(tmp_path / "tier", **SMALL, snapshot_every=1, snapshot_dir=folder) as store:
        step, params, state, grads = begin(store, dtype, 6)
        for grad in grads[:3]:
            params, state = jax.block_until_ready(step(params, state, grad))
            settled(store)  # else the next one might be skipped
        native.inject_fault(str(tmp_path / "tier"), is_write=False, error_number=errno.EIO)
        broken = step(params, state, grads[3])
        with pytest.raises(jmo.TierError, match="restore_snapshot"):
            store.flush()
        assert int(broken[1].ticket[0]) == 2**32 - 1
        native.clear_faults()
        state = store.restore_snapshot(folder, state)  # no tree was saved: the state is put in the place of this one
        assert int(state.count) == 3
        for grad in grads[3:]:
            params, state = step(params, state, grad)
        assert_bits_equal(seen(state, params), expected)


def test_moments_of_an_older_step_are_taken_and_remainders_dropped(tmp_path):
    folder = tmp_path / "snapshots"
    with jmo.Store(tmp_path / "tier", **SMALL, snapshot_every=2, snapshot_dir=folder) as store:
        step, params, state, grads = begin(store, BF16, 6)
        for grad in grads[:3]:
            params, state = step(params, state, grad)
        store.flush()
        settled(store)
        (state,) = store.restore_snapshot(folder / "step-2").values()
        assert int(state.count) == 2
        with pytest.warns(jmo.ForeignParamsWarning, match="were adopted"):
            params, state = advance(step, params, state, grads[3:4], store)
        advance(step, params, state, grads[4:5], store)  # once: a warning would be an error


def test_a_load_is_no_step(tmp_path):
    """A restored state is not written again, though its count is one of those at which snapshots are taken."""
    folder = tmp_path / "snapshots"
    options = {**SMALL, "snapshot_every": 2, "snapshot_dir": folder}
    with jmo.Store(tmp_path / "tier", **options) as store:
        step, params, state, grads = begin(store)
        for grad in grads[:4]:
            params, state = jax.block_until_ready(step(params, state, grad))
            settled(store)
    with jmo.Store(tmp_path / "tier", **options) as store:
        step, _, _, grads = begin(store)
        (state,) = store.restore_snapshot(folder).values()
        store.flush()
        assert store.stats()["snapshots"]["taken"] == 0
        for grad in grads[4:7]:
            params, state = jax.block_until_ready(step(params, state, grad))
        settled(store)
        store.flush()
        assert store.stats()["snapshots"]["taken"] == 1
        assert store.stats()["snapshots"]["last"].endswith("step-6")
        # a fresh start counts from zero
        state = jmo.OffloadState(jnp.zeros([], jnp.int32), jnp.zeros([1], jnp.uint32))
        for grad in grads[:2]:
            params, state = jax.block_until_ready(step(params, state, grad))
        settled(store)
        assert store.stats()["snapshots"]["last"].endswith("step-2")
        until(lambda: sorted(os.listdir(folder)) == ["lock", "step-2", "step-6"])


def test_optimizers_of_one_program_are_taken_together(tmp_path):
    """Never one of them after its update and the other before."""
    folder = tmp_path / "snapshots"
    params = make_params(SMALL_SHAPES)
    with jmo.Store(tmp_path / "tier", **SMALL, snapshot_every=1, snapshot_dir=folder) as store:
        tx = optax.partition(
            {"a": jmo.adam(1e-2, store=store, name="a"), "b": jmo.adam(1e-3, store=store, name="b")},
            {"bias": "a", "embed": "a", "scalar": "b", "wide": "b"},
        )
        step, state = make_step(tx), tx.init(params)
        for number, grad in enumerate(record_gradients(params, 6), 1):
            params, state = jax.block_until_ready(step(params, state, grad))
            settled(store)
            assert store.stats()["snapshots"]["last"].endswith(f"step-{number}")
        assert store.stats()["snapshots"]["taken"] == 6
        assert host_states(store.restore_snapshot(folder)) == {"a": 6, "b": 6}
        assert host_states(store.restore_snapshot(folder / "step-5")) == {"a": 5, "b": 5}


def test_a_slow_one_is_skipped_over_and_waited_for(tmp_path):
    folder = tmp_path / "snapshots"
    with jmo.Store(tmp_path / "tier", **SMALL, snapshot_every=1, snapshot_dir=folder) as store:
        step, params, state, grads = begin(store)
        native.inject_fault(str(folder), is_write=True, min_delay_s=0.1, max_delay_s=0.1)
        for grad in grads[:6]:
            params, state = jax.block_until_ready(step(params, state, grad))
        store.flush()
        assert store.stats()["snapshots"]["skipped"] >= 1
    native.clear_faults()
    assert 1 <= len([name for name in os.listdir(folder) if name.startswith("step-")]) <= 2
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_a_failure_warns_and_training_goes_on(tmp_path):
    folder = tmp_path / "snapshots"
    with jmo.Store(tmp_path / "tier", **SMALL, snapshot_every=1, snapshot_dir=folder) as store:
        step, params, state, grads = begin(store)
        native.inject_fault(str(folder), is_write=True, error_number=errno.ENOSPC)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params, state = jax.block_until_ready(step(params, state, grads[0]))
            until(lambda: caught)
        assert issubclass(caught[0].category, jmo.SnapshotWarning)
        assert re.search("no snapshot was taken.*No space left on device", str(caught[0].message))
        native.clear_faults()
        params, state = jax.block_until_ready(step(params, state, grads[1]))
        settled(store)
        assert store.stats()["snapshots"]["failed"] == 1
        until(lambda: sorted(os.listdir(folder)) == ["lock", "step-2"])
        # another store in the same folder
        with jmo.Store(snapshot_every=1, snapshot_dir=folder) as other:
            otherwise, p, s, _ = begin(other)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                jax.block_until_ready(otherwise(p, s, grads[0]))
                until(lambda: caught)
            assert "in use by another store" in str(caught[0].message)
        assert sorted(os.listdir(folder)) == ["lock", "step-2"]


def test_leftovers_are_removed(tmp_path):
    folder = tmp_path / "snapshots"
    for name in (".new-step-7-0123", ".old-step-3-4567"):
        (folder / name / "process-0").mkdir(parents=True)
        (folder / name / "lock").touch()
    (folder / "mine").mkdir()
    with jmo.Store(snapshot_every=1, snapshot_dir=folder) as store:
        step, params, state, grads = begin(store)
        jax.block_until_ready(step(params, state, grads[0]))
    assert sorted(os.listdir(folder)) == ["lock", "mine", "step-1"]
