"""Flax models on meshes, linen and nnx, as their users write them: made abstractly, inside jit, sharded, donated.

The numbers are those of plain optax on the gradients that the steps return.
"""

from __future__ import annotations

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, reshard

import jax_mlp_offload as jmo
from tests.meshes import P, mesh_of, shard
from tests.support import (
    BF16,
    assert_bits_equal,
    assert_close,
    assert_used_tiers,
    make_params,
    make_step,
    record_gradients,
    run_reference,
)

STEPS = 4
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
LINE = {"fsdp": 8}
on_meshes = pytest.mark.parametrize("axes", [CUBE, LINE], ids=["cube", "line"])
in_dtypes = pytest.mark.parametrize("dtype", [jnp.float32, BF16])


def rules_of(axes):
    """Mesh axes of the models' logical ones."""
    return (("embed", "fsdp"), ("mlp", "tensor" if "tensor" in axes else None))


def host(tree):
    """Copies that outlive donation."""
    return jax.tree.map(np.array, tree)


def loss_of(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32) - 1.0))


def batch(mesh):
    axes = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, P(axes)))


def check(first, recorded, new, opt_state, plain=None):
    """Masters and moments are those of plain optax on the recorded gradients."""
    masters, moments = run_reference(plain or optax.adamw(1e-2), first, recorded)
    assert_close(jmo.read_masters(opt_state, new), masters)
    assert_close(jmo.read_state(opt_state), moments)


def places(tree):
    """Of each leaf, which part of it lies on which device."""
    return [leaf.sharding.devices_indices_map(leaf.shape) for leaf in jax.tree.leaves(tree)]


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


# -- plain trees: explicit axes, params that move, the state, wrappers

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
