"""Plain trees on meshes: Explicit axes, params that move, the state in every kind of init, and optax's wrappers."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, reshard

import jax_mlp_offload as jmo
from tests.meshes import P, check, host, mesh_of, shard
from tests.support import (
    BF16,
    assert_bits_equal,
    assert_close,
    make_params,
    make_step,
    record_gradients,
    run_reference,
)

STEPS = 4
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
in_dtypes = pytest.mark.parametrize("dtype", [jnp.float32, BF16])
SHAPES = {"matrix": (64, 32), "odd": (1031,), "norm": (48,), "scalar": ()}
SPECS = {"matrix": P("fsdp", "tensor"), "odd": P(), "norm": P("data"), "scalar": P()}
OTHERWISE = {"matrix": P("data", "tensor"), "odd": P(), "norm": P(), "scalar": P()}


@pytest.mark.parametrize(
    ("order", "sharded_inside", "dtype"), [(1, False, jnp.float32), (1, True, BF16), (-1, False, BF16)]
)
def test_explicit_axes_need_no_specs(order, sharded_inside, dtype):
    """Types tell the shardings, also where ``init`` sees values before ``out_shardings`` places them."""
    devices = np.array(jax.devices())[::order].reshape(tuple(CUBE.values()))
    mesh, traces = Mesh(devices, tuple(CUBE), axis_types=(AxisType.Explicit,) * 3), []
    params = make_params(SHAPES, dtype)
    grads = record_gradients(params, STEPS)
    first = host(params)
    with jmo.Store() as store:
        with jax.set_mesh(mesh):
            tx = jmo.adamw(1e-2, store=store)

            def init():
                made = jax.tree.map(jnp.asarray, first)
                if sharded_inside:
                    made = jax.tree.map(reshard, made, SPECS)
                return made, tx.init(made)

            where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
            new, state = jax.jit(init, out_shardings=(where, NamedSharding(mesh, P())))()

            def step(params, state, grads):
                traces.append(1)
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            step = jax.jit(step, donate_argnums=(0, 1))
            for grad in grads:
                new, state = step(new, state, shard(grad, mesh, SPECS))
        check(params, grads, new, state)
        assert len(traces) == 1
        assert jmo.read_state(state)[0].mu["matrix"].sharding.is_equivalent_to(where["matrix"], 2)


def moved(how, params, mesh, specs):
    if how == "device_put":
        return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    params = host(params)
    return {"numpy": params, "default device": jax.tree.map(jnp.asarray, params)}[how]


@pytest.mark.parametrize(
    ("how", "eager", "specs", "dtype"),
    [
        ("device_put", False, True, BF16),
        ("device_put", False, False, jnp.float32),
        ("device_put", True, True, BF16),
        ("device_put", True, False, BF16),
        ("device_put", True, False, jnp.float32),
        ("numpy", False, True, BF16),
        ("numpy", True, False, BF16),
        ("default device", False, False, BF16),
        ("default device", True, True, BF16),
    ],
)
def test_params_that_move_on_their_mesh(how, eager, specs, dtype):
    """To another sharding, or through the host, and back: the state stays as it is divided, nothing is adopted."""
    mesh, params = mesh_of(**CUBE), make_params(SHAPES, dtype)
    grads = record_gradients(params, 5)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, **({"mesh": mesh, "param_specs": SPECS} if specs else {}))
        new = shard(params, mesh, SPECS)
        state, update = tx.init(new), tx.update if eager else jax.jit(tx.update)
        for index, grad in enumerate(grads):
            if index in (2, 3):
                new = moved(how, new, mesh, OTHERWISE if index == 2 else SPECS)
            updates, state = update(shard(grad, mesh, SPECS), state, new)
            new = optax.apply_updates(new, updates)
        check(params, grads, new, state)
        store.flush()
        assert store.stats()["adopted_steps"] == 0
        assert len(store.stats()["optimizers"]) == 1


def test_init_again_divides_the_state_anew():
    """Params that were laid out otherwise for good: ``init`` sees it, and the moments start afresh there."""
    mesh, params = mesh_of(**CUBE), make_params(SHAPES, BF16)
    grads = record_gradients(params, STEPS)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        for specs in (SPECS, OTHERWISE):
            step = make_step(tx)  # on automatic axes a program that was traced before keeps its layout
            new = shard(params, mesh, specs)
            state = tx.init(new)
            for grad in grads:
                new, state = step(new, state, shard(grad, mesh, specs))
            check(params, grads, new, state)
            mu = jmo.read_state(state)[0].mu["matrix"]
            assert mu.sharding.is_equivalent_to(NamedSharding(mesh, specs["matrix"]), 2)


@in_dtypes
@pytest.mark.parametrize("specs", [False, True])
def test_explicit_params_moved_apart_from_their_moments(dtype, specs):
    """JAX refuses the step, as that of plain optax; nothing is lost: back in place, it goes on."""
    mesh, params = mesh_of(explicit=True, **CUBE), make_params(SHAPES, dtype)
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        with jax.set_mesh(mesh):
            tx = jmo.adamw(1e-2, store=store, **({"mesh": mesh, "param_specs": SPECS} if specs else {}))
            plain, step = make_step(optax.adamw(1e-2)), make_step(tx)
            new = shard(params, mesh, SPECS)
            state, plain_state = tx.init(new), optax.adamw(1e-2).init(new)
            for index, grad in enumerate(grads):
                placed = shard(grad, mesh, SPECS)
                if index == 2:
                    elsewhere = moved("device_put", new, mesh, OTHERWISE)
                    for refused, its_state in ((plain, plain_state), (step, state)):
                        with pytest.raises(Exception, match="incompatible shardings"):
                            refused(elsewhere, its_state, placed)
                    new = moved("default device", new, mesh, SPECS)
                new, state = step(new, state, placed)
        check(params, grads, new, state)


@in_dtypes
def test_params_restored_from_an_earlier_step(dtype):
    """Values of an older checkpoint: taken up with one warning where masters are split, silently in float32."""
    mesh, params = mesh_of(**CUBE), make_params(SHAPES, dtype)
    grads = record_gradients(params, 5)
    low = dtype == BF16
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=SPECS)
        step, new = make_step(tx, donate=True), shard(params, mesh, SPECS)
        state = tx.init(new)
        for grad in grads[:3]:
            new, state = step(new, state, shard(grad, mesh, SPECS))
        _, moments = run_reference(optax.adamw(1e-2), params, grads[:3])
        with pytest.warns(jmo.ForeignParamsWarning, match="matrix") if low else contextlib.nullcontext():
            new, state = step(shard(params, mesh, SPECS), state, shard(grads[3], mesh, SPECS))
            jax.block_until_ready(new)
            store.flush()
        new, state = step(new, state, shard(grads[4], mesh, SPECS))
        masters, moments = run_reference(optax.adamw(1e-2), params, grads[3:], moments)
        assert_close(jmo.read_masters(state, new), masters)
        assert_close(jmo.read_state(state), moments)
        assert store.stats()["adopted_steps"] == int(low)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("how", ["shapes", "eval_shape", "jit"])
def test_state_of_every_kind_of_init(how, explicit):
    """One structure, one set of dtypes, at ``init`` and after updates; one trace."""
    mesh, params, traces = mesh_of(explicit=explicit, **CUBE), make_params(SHAPES, BF16), []
    grads = record_gradients(params, STEPS, dtype=jnp.float32)  # clipping rounds to the gradients' dtype
    replicated = NamedSharding(mesh, P())
    with jmo.Store() as store:
        with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
            new = shard(params, mesh, SPECS)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), new)
            # on automatic axes nothing tells an abstract init how params are sharded, but the shapes' own shardings
            given = {} if explicit or how == "shapes" else {"mesh": mesh, "param_specs": SPECS}
            tx = optax.chain(optax.clip_by_global_norm(1.0), jmo.adamw(1e-2, store=store, **given))
            abstract = jax.eval_shape(tx.init, shapes if how == "shapes" else new)
            if how == "shapes":
                state = jax.device_put(tx.init(shapes), replicated)
            elif how == "eval_shape":
                state = jax.tree.map(lambda s: jax.device_put(jnp.zeros(s.shape, s.dtype), replicated), abstract)
            else:
                state = jax.jit(tx.init, out_shardings=replicated)(new)

            def step(params, state, grads):
                traces.append(1)
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            step = jax.jit(step, donate_argnums=(0, 1))
            for grad in grads:
                assert jax.tree.structure(state) == jax.tree.structure(abstract)
                assert jax.tree.map(jnp.shape, state) == jax.tree.map(lambda s: s.shape, abstract)
                assert jax.tree.map(lambda s: s.dtype, state) == jax.tree.map(lambda s: s.dtype, abstract)
                assert all(leaf.sharding.is_equivalent_to(replicated, leaf.ndim) for leaf in jax.tree.leaves(state))
                new, state = step(new, state, shard(grad, mesh, SPECS))
        check(params, grads, new, state, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
        assert len(traces) == 1


# -- wrappers

GROUPS = {"frozen": {"kernel": (32, 16), "bias": (7,)}, **SHAPES}
GROUP_SPECS = {"frozen": {"kernel": P("fsdp", "tensor"), "bias": P()}, **SPECS}
LABELS = {"frozen": "frozen", "matrix": "adam", "odd": "sgd", "norm": "adam", "scalar": "sgd"}


def clipped(kind, **more):
    return optax.chain(optax.clip_by_global_norm(1.0), kind.adamw(1e-2, weight_decay=0.1, **more))


def masked(kind, **more):
    trained = {name: label != "frozen" for name, label in LABELS.items()}
    rest = {name: not yes for name, yes in trained.items()}
    return optax.chain(optax.masked(kind.adamw(1e-2, **more), trained), optax.masked(optax.set_to_zero(), rest))


def partitioned(kind, **more):
    groups = {"adam": kind.adamw(1e-2, **more), "sgd": kind.sgd(1e-2, 0.9, **more), "frozen": optax.set_to_zero()}
    return optax.partition(groups, LABELS)


def injected(kind, **more):
    static = [name for name in ("mesh",) if name in more]  # a mesh is callable, and would be taken for a schedule
    factory = optax.inject_hyperparams(kind.adamw, static_args=static, hyperparam_dtype=jnp.float32)
    return factory(optax.linear_schedule(1e-2, 0.0, 10), **more)


@pytest.mark.parametrize(("form", "dtype"), [("specs", jnp.float32), ("shardings", BF16)])
@pytest.mark.parametrize("make", [clipped, masked, partitioned, injected])
def test_wrapped_on_a_mesh(make, form, dtype):
    """Sharded, replicated, odd-sized and scalar leaves; labels and masks that are prefixes of the tree."""
    mesh = mesh_of(**CUBE)
    params = {**make_params(SHAPES, dtype), "frozen": make_params(GROUPS["frozen"], dtype, seed=1)}
    grads = record_gradients(params, STEPS, dtype=jnp.float32)  # clipping rounds to the gradients' dtype
    given = {
        "specs": {"mesh": mesh, "param_specs": GROUP_SPECS},
        "shardings": {"param_specs": jax.tree.map(lambda spec: NamedSharding(mesh, spec), GROUP_SPECS)},
    }[form]
    with jmo.Store() as store:
        tx = make(jmo, store=store, **given)
        new = shard(params, mesh, GROUP_SPECS)
        state, step = tx.init(new), make_step(tx, donate=True)
        for grad in grads:
            new, state = step(new, state, shard(grad, mesh, GROUP_SPECS))
        check(params, grads, new, state, make(optax))
        if make in (masked, partitioned):
            assert_bits_equal(host(new["frozen"]), host(params["frozen"]))
        assert store.stats()["adopted_steps"] == 0


def test_a_mesh_taken_for_a_schedule_is_named():
    mesh = mesh_of(**CUBE)
    with jmo.Store() as store:
        tx = optax.inject_hyperparams(jmo.adamw)(1e-2, store=store, mesh=mesh, param_specs=P())
        with pytest.raises(TypeError, match="static_args"):
            tx.init(make_params(SHAPES))
