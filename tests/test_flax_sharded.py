"""Flax models on meshes, linen and nnx, as their users write them: made abstractly, inside jit, sharded, donated.

The numbers are those of plain optax on the gradients that the steps return.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

import jax_mlp_offload as jmo
from tests.meshes import P, check, host, mesh_of, places
from tests.support import (
    BF16,
    assert_used_tiers,
)

STEPS = 4
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
LINE = {"fsdp": 8}
on_meshes = pytest.mark.parametrize("axes", [CUBE, LINE], ids=["cube", "line"])
in_dtypes = pytest.mark.parametrize("dtype", [jnp.float32, BF16])


def rules_of(axes):
    """Mesh axes of the models' logical ones."""
    return (("embed", "fsdp"), ("mlp", "tensor" if "tensor" in axes else None))


def loss_of(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1.0))


def batch(mesh):
    axes = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, P(axes)))


# -- linen


class Perceptron(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(init, ("embed", "mlp"))
        down = nn.with_logical_partitioning(init, ("mlp", "embed"))
        x = nn.Dense(1024, param_dtype=self.dtype, kernel_init=up)(x)
        x = nn.LayerNorm(param_dtype=self.dtype)(x)
        return nn.Dense(64, param_dtype=self.dtype, kernel_init=down)(jax.nn.gelu(x))


@on_meshes
@in_dtypes
@pytest.mark.parametrize(("boxed", "form"), [(True, "shardings"), (False, "specs")])
def test_linen_train_state_made_inside_jit(axes, dtype, boxed, form, two_tiers):
    """MaxText's way: shapes first, shardings from the logical axes, then params and state in one jitted program."""
    mesh, rules, model = mesh_of(**axes), rules_of(axes), Perceptron(dtype)
    x = batch(mesh)

    def init_params(key):
        params = model.init(key, x)["params"]
        return params if boxed else nn.unbox(params)

    logical = nn.get_partition_spec(jax.eval_shape(lambda key: model.init(key, x)["params"], jax.random.key(0)))
    shardings = nn.logical_to_mesh_sharding(logical, mesh, rules)
    given = {"param_specs": shardings}
    if form == "specs":
        given = {"mesh": mesh, "param_specs": nn.logical_to_mesh(logical, rules)}
    with jmo.Store(*two_tiers, host_memory="1100KB", subgroup_elements=4096) as store, nn.logical_axis_rules(rules):
        tx = jmo.adamw(1e-2, store=store, **given)

        def init(key):
            return TrainState.create(apply_fn=model.apply, params=init_params(key), tx=tx)

        abstract = jax.eval_shape(init, jax.random.key(0))
        where = nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, rules).replace(params=shardings)
        state = jax.jit(init, out_shardings=where)(jax.random.key(0))
        assert jax.tree.structure(state) == jax.tree.structure(abstract)
        first, placed, traces = host(state.params), places(state.params), []

        def step(state, x):
            traces.append(1)
            grads = jax.grad(lambda params: loss_of(model.apply({"params": params}, x)))(state.params)
            return state.apply_gradients(grads=grads), grads

        step = jax.jit(step, in_shardings=(where, x.sharding), out_shardings=(where, where.params), donate_argnums=0)
        recorded = []
        for _ in range(STEPS):
            before = state
            state, grads = step(state, x)
            recorded.append(host(grads))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
        check(first, recorded, state.params, state.opt_state)
        assert places(state.params) == placed
        assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state.params))
        assert len(traces) == 1
        assert store.stats()["adopted_steps"] == 0
        assert_used_tiers(store)


@pytest.mark.parametrize(
    ("prefix", "dtype"),
    [(P(), jnp.float32), ({"Dense_0": P("fsdp"), "Dense_1": P(("data", "fsdp")), "LayerNorm_0": P()}, BF16)],
    ids=["one", "tree"],
)
def test_specs_as_a_prefix(prefix, dtype):
    """Whatever jit takes as a prefix for shardings."""
    mesh, model = mesh_of(**CUBE), Perceptron(dtype)
    x = batch(mesh)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), prefix, is_leaf=lambda s: isinstance(s, P))

    def step(state, x):
        grads = jax.grad(lambda params: loss_of(model.apply({"params": params}, x)))(state.params)
        return state.apply_gradients(grads=grads), grads

    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=prefix)
        init = jax.jit(lambda key: nn.unbox(model.init(key, x)["params"]), out_shardings=shardings)
        state = TrainState.create(apply_fn=model.apply, params=init(jax.random.key(0)), tx=tx)
        first, recorded, step = host(state.params), [], jax.jit(step, donate_argnums=0)
        for _ in range(STEPS):
            state, grads = step(state, x)
            recorded.append(host(grads))
        check(first, recorded, state.params, state.opt_state)


# -- nnx


def make_model(axes, dtype):
    tensor = "tensor" if "tensor" in axes else None

    class Model(nnx.Module):
        def __init__(self, rngs):
            up = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", tensor))
            down = {"out_sharding": (tensor, "fsdp")}
            self.one = nnx.Linear(64, 1024, param_dtype=dtype, kernel_init=up, rngs=rngs)
            self.norm = nnx.LayerNorm(1024, param_dtype=dtype, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.two = nnx.Linear(1024, 64, param_dtype=dtype, kernel_metadata=down, rngs=rngs)

        def __call__(self, x):
            return self.two(self.drop(jax.nn.gelu(self.norm(self.one(x)))))

    return Model


def given_as(form, make, mesh):
    """The optimizer's arguments, in each form that Flax hands out."""
    state = nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    params = nnx.filter_state(state, nnx.Param)
    return {
        "nothing": lambda: {},
        "specs": lambda: {"mesh": mesh, "param_specs": nnx.get_partition_spec(params)},
        "specs of all": lambda: {"mesh": mesh, "param_specs": nnx.get_partition_spec(state)},
        "pure specs": lambda: {"mesh": mesh, "param_specs": nnx.to_pure_dict(nnx.get_partition_spec(params))},
        "shardings": lambda: {"param_specs": nnx.get_named_sharding(params, mesh)},
    }[form]()


def pure(model):
    return host(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def train_nnx(model, optimizer, x, traces):
    """Steps in nnx's object style; returns the gradients."""

    def step(model, optimizer, x):
        traces.append(1)
        grads = nnx.grad(lambda model: loss_of(model(x)))(model)
        optimizer.update(model, grads)
        return grads

    step = nnx.jit(step, donate_argnums=(0, 1))
    recorded = []
    for _ in range(STEPS):
        before = model.one.kernel.get_value()
        recorded.append(host(nnx.to_pure_dict(step(model, optimizer, x))))
        assert before.is_deleted()
    return recorded


@in_dtypes
@pytest.mark.parametrize(("axes", "form"), [(CUBE, "specs"), (CUBE, "shardings"), (LINE, "nothing"), (LINE, "specs")])
def test_nnx_objects(axes, dtype, form, two_tiers):
    """Variables are sharded as they are made, wherever a mesh is set."""
    mesh, make, traces = mesh_of(**axes), make_model(axes, dtype), []
    with jax.set_mesh(mesh), jmo.Store(*two_tiers, host_memory="1100KB", subgroup_elements=4096) as store:
        model = make(nnx.Rngs(0))
        tx = jmo.adamw(1e-2, store=store, **given_as(form, make, mesh))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        first, placed = pure(model), places(nnx.state(model, nnx.Param))
        recorded = train_nnx(model, optimizer, batch(mesh), traces)
        check(first, recorded, nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer.opt_state)
        assert places(nnx.state(model, nnx.Param)) == placed
        assert int(optimizer.step[...]) == STEPS
        assert len(traces) == 1
        assert store.stats()["adopted_steps"] == 0
        assert len(store.stats()["optimizers"]) == 1
        assert_used_tiers(store)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [("specs", BF16), ("specs of all", jnp.float32), ("pure specs", BF16), ("shardings", jnp.float32)],
)
def test_nnx_made_inside_jit(form, dtype):
    """Model and optimizer come out of one ``nnx.jit``: nothing is concrete where ``init`` is called."""
    mesh, make, traces = mesh_of(**CUBE), make_model(CUBE, dtype), []
    with jax.set_mesh(mesh), jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, **given_as(form, make, mesh))

        @nnx.jit
        def create():
            model = make(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            state = nnx.state((model, optimizer))
            nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return model, optimizer

        model, optimizer = create()
        assert model.one.kernel.get_value().sharding.spec == P("fsdp", "tensor")
        first = pure(model)
        recorded = train_nnx(model, optimizer, batch(mesh), traces)
        check(first, recorded, nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer.opt_state)
        assert len(traces) == 1


@pytest.mark.parametrize(("axes", "dtype"), [(CUBE, BF16), (LINE, jnp.float32)], ids=["cube", "line"])
def test_nnx_split_and_merge(axes, dtype):
    """Pure functions of state: abstract objects, ``jax.jit`` with shardings of params and state, donation."""
    mesh, make, traces = mesh_of(**axes), make_model(axes, dtype), []
    x = batch(mesh)
    with jax.set_mesh(mesh), jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, **given_as("specs", make, mesh))

        def create():
            model = make(nnx.Rngs(0))
            return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

        graph, abstract = nnx.split(nnx.eval_shape(create))
        where = nnx.get_named_sharding(abstract, mesh)
        state = jax.jit(lambda: nnx.state(create()), out_shardings=where)()
        assert jax.tree.structure(state) == jax.tree.structure(abstract)

        def step(state, x):
            traces.append(1)
            model, optimizer = nnx.merge(graph, state)
            grads = nnx.grad(lambda model: loss_of(model(x)))(model)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), grads

        step = jax.jit(step, in_shardings=(where, x.sharding), out_shardings=(where, None), donate_argnums=0)
        first, recorded = pure(nnx.merge(graph, state)[0]), []
        for _ in range(STEPS):
            before = jax.tree.leaves(nnx.filter_state(state, nnx.Param))
            state, grads = step(state, x)
            recorded.append(host(nnx.to_pure_dict(grads)))
            assert all(leaf.is_deleted() for leaf in before)
        model, optimizer = nnx.merge(graph, state)
        check(first, recorded, nnx.to_pure_dict(nnx.state(model, nnx.Param)), optimizer.opt_state)
        assert len(traces) == 1


@pytest.mark.parametrize("explicit", [False, True])
def test_nnx_shapes_with_shardings_tell_the_mesh(explicit):
    """``nnx.eval_shape`` under a mesh: shapes whose shardings name axes, but no devices."""
    axes, traces = {"fsdp": 8}, []
    mesh, make = mesh_of(explicit=explicit, **axes), make_model(axes, jnp.float32)
    with jmo.Store() as store:
        with jax.set_mesh(mesh):
            tx = jmo.adamw(1e-2, store=store)
            abstract = nnx.state(nnx.as_abstract(nnx.eval_shape(lambda: make(nnx.Rngs(0)))), nnx.Param)
            params = nnx.as_pure(nnx.state(make(nnx.Rngs(0)), nnx.Param))
            state = tx.init(abstract)
            first, grads = host(params), record_gradients_like(params)

            def step(params, state, grads):
                traces.append(1)
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            step, placed = jax.jit(step, donate_argnums=(0, 1)), places(params)
            for grad in grads:
                params, state = step(params, state, grad)
        check(first, host(grads), params, state)
        assert places(jmo.read_state(state)[0].mu) == placed
        assert len(traces) == 1


def record_gradients_like(params):
    """Gradients placed and typed as their params."""
    rng = np.random.default_rng(1)

    def draw(param):
        return jax.device_put(rng.normal(size=param.shape).astype(param.dtype), param.sharding)

    return [jax.tree.map(draw, params) for _ in range(STEPS)]
