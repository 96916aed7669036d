"""What happens when an accelerator fails: the step ends, by name, on all devices; nothing hangs."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jax_mlp_offload as jmo
from jax_mlp_offload import accelerators
from jax_mlp_offload.accelerators import EmulatedFailure
from tests import meshes
from tests.emulated import emulate
from tests.meshes import mesh_of
from tests.support import assert_bits_equal, make_params, make_step, record_gradients, run

P = PartitionSpec
SHAPES = {"w": (300, 200), "v": (200, 200)}
STEPS = 4


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("call", "nth", "place"),
    [
        ("copy_to_host", 0, "host"),  # of the ticket, then of hyperparameters and gradients
        ("copy_to_host", 1, "host"),
        ("copy_to_host", 8, "host"),
        ("copy_to_device", 1, "host"),
        ("update", 1, "device"),
    ],
)
def test_refused_call_fails_the_step_by_name_and_init_goes_on(call, nth, place, count):
    """Old params come back of what had not ended, the next update raises, and a fresh start has plain numbers again.

    Other devices are not left alone in a collective.
    """
    params = make_params(SHAPES, "bfloat16")
    mesh, specs = mesh_of(fsdp=count), {"w": P("fsdp", None), "v": P()}
    gradients = [meshes.shard(grads, mesh, specs) for grads in record_gradients(params, 2)]
    placed = meshes.shard(params, mesh, specs)
    failure = EmulatedFailure(call, device=count - 1, nth=nth)
    with emulate(count, failures=[failure]), jmo.Store(subgroup_elements=4096, update_on=place) as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
        step = make_step(tx)
        new, state = step(placed, tx.init(placed), gradients[0])
        jax.block_until_ready(new)
        with pytest.raises(jmo.AcceleratorError, match=rf"{call} was refused; optimizer .*leaves"):
            store.flush()
        after_failure = jax.tree.map(np.asarray, new)
        with pytest.raises(jax.errors.JaxRuntimeError, match=call):
            jax.block_until_ready(step(new, state, gradients[1]))
        ours, _ = run(tx, placed, gradients)
        ours = jax.tree.map(np.asarray, ours)
    with jmo.Store(subgroup_elements=4096) as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
        first, state = run(tx, placed, gradients[:1])
        expected, _ = run(tx, first, gradients[1:], state)
        first, expected = jax.tree.map(np.asarray, (first, expected))
    assert_bits_equal(ours, expected)
    for name, got in after_failure.items():  # buckets that ended before the failure have had their update
        assert ((got == np.asarray(params[name])) | (got == first[name])).all()


@pytest.mark.parametrize(
    ("call", "place"),
    [("copy_to_host", "host"), ("copy_to_device", "host"), ("update", "device"), ("record", "host")],
)
@pytest.mark.parametrize("nth", [0, 5, 9])
def test_device_that_fails_for_good_hangs_nobody(call, place, nth):
    params = make_params(SHAPES, "bfloat16")
    gradients = record_gradients(params, 1)
    failure = EmulatedFailure(call, nth=nth, later=call != "record")
    with emulate(failures=[failure]):
        store = jmo.Store(subgroup_elements=4096, update_on=place)
        tx = jmo.adamw(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)

        def advance():
            new, new_state = params, state
            for _ in range(8):
                new, new_state = jax.block_until_ready(step(new, new_state, gradients[0]))

        with pytest.raises((jmo.OffloadError, jax.errors.JaxRuntimeError), match=call):
            advance()
        with contextlib.suppress(jmo.AcceleratorError):  # raised unless only a handler met it
            store.close()


def test_failing_optimizer_waits_for_its_neighbours_updates():
    """XLA frees the program's buffers when it hears of the error: nobody may write there then."""
    params = make_params({"w": (300, 200), "v": (900, 200)}, "bfloat16")
    gradients = record_gradients(params, 3)
    # past the first step's copies of the smaller one
    failure = EmulatedFailure("copy_to_device", nth=1)
    with (
        accelerators.emulate(1, seed=2, longest_delay_us=3000, failures=[failure]),
        jmo.Store(update_on="host") as store,
    ):
        each = {"w": jmo.adamw(1e-2, store=store, name="w"), "v": jmo.adamw(1e-2, store=store, name="v")}
        tx = optax.partition(each, {"w": "w", "v": "v"})
        step, state = make_step(tx), tx.init(params)
        new, state = step(params, state, gradients[0])
        with pytest.raises(jmo.AcceleratorError, match="copy_to_device was refused"):
            store.flush()
        with pytest.raises(jax.errors.JaxRuntimeError, match="copy_to_device was refused"):
            jax.block_until_ready(step(new, state, gradients[1]))
        engine = store.engine
        assert engine._native.open_requests() == 0
        ours, _ = run(tx, params, gradients)
    with jmo.Store() as store:
        each = {"w": jmo.adamw(1e-2, store=store, name="w"), "v": jmo.adamw(1e-2, store=store, name="v")}
        expected, _ = run(optax.partition(each, {"w": "w", "v": "v"}), params, gradients)
    assert_bits_equal(ours, expected)


def test_close_during_a_step():
    params = make_params({"w": (3000, 200)}, "bfloat16")
    with accelerators.emulate(1, seed=1, longest_delay_us=20_000):
        store = jmo.Store(subgroup_elements=4096)
        tx = jmo.adamw(1e-2, store=store)
        step = make_step(tx)
        new, _ = step(params, tx.init(params), record_gradients(params, 1)[0])
        store.engine.close()  # without waiting for the step
        with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
            jax.block_until_ready(new)


def test_memory_that_cannot_be_pinned_is_a_warning():
    params = make_params(SHAPES, "bfloat16")
    gradients = record_gradients(params, STEPS)
    with jmo.Store() as store:
        expected, _ = run(jmo.adamw(1e-2, store=store), params, gradients)
    with emulate(failures=[EmulatedFailure("pin", nth=-1)]), jmo.Store(update_on="device") as store:
        with pytest.warns(jmo.DeviceWarning, match="could not be pinned"):
            ours, _ = run(jmo.adamw(1e-2, store=store), params, gradients)
        assert store.stats()["devices"][0]["update_on"] == "host"
    assert_bits_equal(ours, expected)


@pytest.mark.parametrize("which", [2, 3, 4, 5])
def test_slots_that_cannot_be_pinned_are_not_reached_by_the_device(which):
    """Nor its hyperparameters; though all that the link had at first is pinned."""
    params = make_params(SHAPES, "bfloat16")
    gradients = record_gradients(params, STEPS)
    # after the link's two pins come those of blocks and slots, of each optimizer
    failure = EmulatedFailure("pin", nth=which)
    with emulate(failures=[failure]), jmo.Store(update_on="device") as store:
        optimizers = [jmo.adamw(1e-2, store=store, name=name) for name in ("a", "b")]
        with pytest.warns(jmo.DeviceWarning, match="could not be pinned"):
            (first, _), (second, _) = (run(tx, params, gradients) for tx in optimizers)
        assert store.stats()["devices"][0]["update_on"] == "host"
    assert_bits_equal(first, second)


def test_link_that_cannot_be_measured_leaves_updates_to_the_host():
    params = make_params(SHAPES, "bfloat16")
    with emulate(failures=[EmulatedFailure("make_memory", nth=-1)]), jmo.Store() as store:
        with pytest.warns(jmo.DeviceWarning, match="could not be measured, so they run on the host"):
            run(jmo.adamw(1e-2, store=store), params, record_gradients(params, 1))
        assert store.stats()["devices"][0]["update_on"] == "host"


@pytest.mark.parametrize("call", ["make_stream", "make_event"])
def test_device_without_streams_refuses_the_optimizer(call):
    params = make_params(SHAPES)
    broken = emulate(failures=[EmulatedFailure(call, nth=-1)])
    with broken, jmo.Store() as store, pytest.raises(RuntimeError, match=call):
        run(jmo.adam(1e-2, store=store), params, record_gradients(params, 1))
