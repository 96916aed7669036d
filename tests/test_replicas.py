"""Replicated params: each replica updates its share once, and nothing is communicated but what becomes of it."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import jax_mlp_offload as jmo
from jax_mlp_offload.plan import LeafSpec
from jax_mlp_offload.replicas import PACKED_BELOW, make_parts
from tests.meshes import P, collectives, gathered, mesh_of, shard, train
from tests.support import (
    BF16,
    advance,
    assert_bits_equal,
    assert_close,
    assert_within_ulp,
    make_params,
    make_step,
    record_gradients,
    run_reference,
)

SHAPES = {"embed": (256, 48), "norm": (48,), "out": (48, 128), "scale": (), "odd": (1031,), "table": (260, 261)}
MESHES = [
    ({"data": 8}, dict.fromkeys(SHAPES, P())),
    ({"fsdp": 8}, {**dict.fromkeys(SHAPES, P()), "embed": P("fsdp"), "out": P(None, "fsdp")}),
    ({"data": 4, "fsdp": 2}, {**dict.fromkeys(SHAPES, P()), "embed": P("fsdp", None), "out": P(None, "fsdp")}),
    (
        {"data": 2, "fsdp": 2, "tensor": 2},
        {**dict.fromkeys(SHAPES, P()), "embed": P("fsdp", "tensor"), "out": P("tensor", "fsdp"), "norm": P("tensor")},
    ),
    ({"data": 2, "fsdp": 4}, {**dict.fromkeys(SHAPES, P()), "embed": P(("fsdp", "data")), "out": P("data", "fsdp")}),
]
NAMES = ["8", "fsdp8", "4x2", "2x2x2", "both"]
CUBE, CUBE_SPECS = MESHES[3]
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())


# -- who takes what


def test_leaves_are_cut_padded_and_packed():
    sizes = {"data": 2, "fsdp": 4, "one": 1}
    both = ("data", "fsdp", "one")
    leaves = [
        LeafSpec("a", 3 * PACKED_BELOW + 5, "bfloat16", True),
        LeafSpec("b", 7, "bfloat16", True),
        LeafSpec("c", 0, "float32"),
        LeafSpec("d", 1, "bfloat16", True),
        LeafSpec("e", 9, "bfloat16", False),
        LeafSpec("f", 100, "bfloat16", True),
        LeafSpec("g", 3, "bfloat16", True),
    ]
    axes = [both, both, both, both, both, (), ("data",)]
    parts = make_parts(leaves, axes, sizes)
    assert [part.leaves for part, _ in parts] == [(0,), (5,), (1, 3), (4,), (6,)]
    assert [part.replicas for part, _ in parts] == [8, 1, 8, 8, 2]
    assert [part.axes for part, _ in parts] == [("data", "fsdp"), (), ("data", "fsdp"), ("data", "fsdp"), ("data",)]
    assert [part.share for part, _ in parts] == [3 * PACKED_BELOW // 8 + 1, 100, 1, 2, 2]
    assert [(spec.path, spec.elements, spec.decay) for _, spec in parts][2:] == [
        ("b, d", 1, True),
        ("e", 2, False),
        ("g", 2, True),
    ]


# -- what is communicated, and what is handed over


def compiled_step(tx, params, mesh, specs, loss):
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    def step(params, state, x):
        grads = jax.lax.with_sharding_constraint(jax.grad(loss)(params, x), placed)
        updates, state = tx.update(grads, state, params)
        return jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), placed), state

    batch = tuple(axis for axis in mesh.axis_names if axis != "tensor")
    x = shard(np.ones((16, 256), np.float32), mesh, P(batch))
    state = jax.jit(tx.init)(params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()


def loss(p, x):
    hidden = jnp.tanh(x @ p["embed"] * p["norm"]) * p["scale"]
    return jnp.mean((hidden @ p["out"]) ** 2) + jnp.sum(p["odd"] ** 2) + jnp.mean(jnp.tanh(x[:, :1] * p["table"][0]))


def handed_over(compiled):
    """Elements of the gradients and params that one device hands to the ops."""
    elements = 0
    for call in re.findall(r"[^\n]*custom_call_target=\"jmo_(?:update|push)\"[^\n]*", compiled.as_text()):
        operands = re.findall(r"\w+\[([\d,]*)\]", re.search(r"operand_layout_constraints=(.*?\})\}", call)[1])
        for dims in operands[2:]:  # behind ticket and hyperparameters
            elements += int(np.prod([int(dim) for dim in dims.split(",") if dim]))
    return elements


@pytest.mark.parametrize(
    ("dtype", "axes", "specs"),
    [(BF16, *mesh) for mesh in MESHES] + [(jnp.float32, *MESHES[3])],
    ids=[*NAMES, "2x2x2-float32"],
)
def test_the_compiled_step_adds_nothing_but_gathers_of_what_is_replicated(dtype, axes, specs):
    """And each device hands over no more than its part of the whole, padding aside."""
    mesh = mesh_of(**axes)
    params = shard(make_params(SHAPES, dtype), mesh, specs)
    padding = 8 * len(SHAPES)  # elements: less than one a replica and leaf
    with jmo.Store(subgroup_elements=16384) as store:
        plain = collectives(compiled_step(optax.adamw(1e-2), params, mesh, specs, loss))
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
        compiled = compiled_step(tx, params, mesh, specs, loss)
        difference = collectives(compiled)
        difference.subtract(plain)
        assert not -difference, "plain optax communicates what the offloaded step does not"
        assert {kind for kind, _ in +difference} <= {"all-gather"}
        # what is gathered is what is replicated, once, in the params' own width
        gathers = [re.fullmatch(r"(\w+?)\[(\d+)\]", gathered) for _, gathered in +difference]
        assert {found[1] for found in gathers} <= {"f32" if dtype == jnp.float32 else "u16"}
        replicated = sum(
            shard_elements
            for name, leaf in params.items()
            if (shard_elements := leaf.addressable_data(0).size) * 8 > leaf.size
        )
        assert replicated <= sum(int(found[2]) for found in gathers) <= replicated + padding
        # gradients and params, by all eight devices
        assert 2 * ELEMENTS <= 8 * handed_over(compiled) <= 2 * (ELEMENTS + 8 * padding)
        # and the mesh stores every element once, in records of whole pages
        stats = store.stats()
        each = 8 if dtype == jnp.float32 else 10
        assert ELEMENTS * each <= stats["record_bytes_total"] <= 1.02 * ELEMENTS * each + 4096 * stats["records"]


# -- numbers


def mixed(tree_of):
    """A tree with each leaf in float32 and in bfloat16."""
    return {"full": tree_of(jnp.float32), "low": tree_of(BF16)}


def reference_on(mesh, specs, params, grads, tx):
    """Plain optax on float32 masters, on the same mesh."""
    wide = [jax.tree.map(lambda x: np.asarray(x, np.float32), tree) for tree in (params, *grads)]
    masters, state = train(tx, wide[0], wide[1:], mesh, specs)
    return gathered((masters, state), mesh)


@pytest.mark.parametrize(
    ("axes", "specs"),
    [*((({"fsdp": n}), MESHES[1][1]) for n in (1, 2, 4, 8)), MESHES[0], MESHES[2], MESHES[3], MESHES[4]],
    ids=["1", "2", "4", *(NAMES[i] for i in (1, 0, 2, 3, 4))],
)
def test_twenty_steps_equal_plain_optax_on_the_same_mesh(axes, specs, two_tiers):
    mesh, specs = mesh_of(**axes), mixed(lambda _: specs)
    params = mixed(lambda dtype: make_params(SHAPES, dtype))
    grads = record_gradients(params, 20, seed=3)  # of other seeds a scalar's moment happens to cancel out
    with jmo.Store(*two_tiers, host_memory="1.5MB", subgroup_elements=8192) as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store, mesh=mesh, param_specs=specs)
        new, state = train(tx, params, grads, mesh, specs)
        moments, masters = jmo.read_state(state), jmo.read_masters(state, new)
        stats = store.stats()
    expected, reference = reference_on(mesh, specs, params, grads, optax.adamw(1e-2, weight_decay=0.1))
    assert_close(masters, expected)
    assert_close(moments, reference)
    assert_within_ulp(new["low"], expected["low"])
    assert all(tier["bytes_read"] > 0 for tier in stats["tiers"])
    assert stats["adopted_steps"] == 0
    for tree in (new, masters, moments[0].mu):  # sharded as they came
        for part, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
            assert part.sharding.is_equivalent_to(NamedSharding(mesh, spec), part.ndim)


def test_any_mesh_has_the_same_bits():
    """The kernel's arithmetic does not depend on where an element lies."""
    params = mixed(lambda dtype: make_params(SHAPES, dtype))
    grads = record_gradients(params, 2)
    results = []
    for axes, specs in (MESHES[0], MESHES[3], MESHES[4]):
        mesh, specs = mesh_of(**axes), mixed(lambda _, specs=specs: specs)
        with jmo.Store(subgroup_elements=8192) as store:
            tx = jmo.adamw(1e-2, weight_decay=0.1, store=store, mesh=mesh, param_specs=specs)
            new, state = train(tx, params, grads, mesh, specs)
            results.append(gathered((new, jmo.read_state(state), jmo.read_masters(state, new)), mesh))
    for other in results[1:]:
        assert_bits_equal(other, results[0])


def test_gradients_of_several_dtypes_in_one_pack():
    mesh, specs = mesh_of(data=8), {"a": P(), "b": P()}
    params = make_params({"a": (33,), "b": (7,)}, BF16)
    grads = [{**grad, "a": grad["a"].astype(jnp.float32)} for grad in record_gradients(params, 3)]
    with jmo.Store() as store:
        new, state = train(jmo.adam(1e-2, store=store, mesh=mesh, param_specs=specs), params, grads, mesh, specs)
        masters, _ = run_reference(optax.adam(1e-2), params, grads)
        assert_close(jmo.read_masters(state, new), masters)


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_what_fills_up_a_share_alarms_nobody(eps, dtype):
    """9 elements for 4 replicas: the last share is all filling, whatever becomes of the elements in front of it."""
    mesh, specs = mesh_of(data=4), {"x": P(), "z": P()}
    params = make_params({"x": (8,), "z": (1,)}, dtype)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, eps=eps, weight_decay=0.1, store=store, mesh=mesh, param_specs=specs)
        step = make_step(tx)
        for seed in range(6):
            grads = [shard(grad, mesh, specs) for grad in record_gradients(params, 10, seed)]
            new = shard(params, mesh, specs)
            new, state = advance(step, new, jax.jit(tx.init)(new), grads[:5], store)
            assert store.stats()["adopted_steps"] == seed
            new = {**new, "x": jnp.zeros_like(new["x"])}  # once; to see it twice would be an error
            with pytest.warns(jmo.ForeignParamsWarning, match="adopted"):
                new, state = advance(step, new, state, grads[5:], store)
            assert store.stats()["adopted_steps"] == seed + 1
            assert bool(jnp.isfinite(new["z"].astype(jnp.float32)).all())


def test_replaced_params_of_a_pack_are_adopted_and_named():
    """X8 where leaves are packed: the warning names them."""
    mesh, specs = mesh_of(data=4), {"a": P(), "b": P(), "w": P()}
    params = make_params({"a": (33,), "b": (7,), "w": (300, 400)}, BF16)
    grads = record_gradients(params, 3)
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store, mesh=mesh, param_specs=specs)
        new, state = train(tx, params, grads[:2], mesh, specs)
        new = {**new, "b": jnp.zeros_like(new["b"])}
        step, last = make_step(tx), [shard(grads[2], mesh, specs)]
        with pytest.warns(jmo.ForeignParamsWarning, match=r"adopted.*\['a'\], \['b'\]"):
            new, _ = advance(step, new, state, last, store)
        assert all(bool(jnp.isfinite(leaf.astype(jnp.float32)).all()) for leaf in new.values())


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_d14_lengths_that_do_not_divide(dtype):
    """D14, of sharding: leaves of 1031 and 8 on 4 devices, then on 1, 2 and 3, with donation."""
    params = make_params({"odd": (1031,), "eight": (8,), "both": (8, 1031)}, dtype)
    grads = record_gradients(params, 3)
    elements = sum(leaf.size for leaf in params.values())
    results = []
    for devices in (4, 1, 2, 3):
        mesh = mesh_of(fsdp=devices)
        wished = dict.fromkeys(params, P("fsdp"))
        held = (
            wished
            if devices == 1
            else {"odd": P(), **dict.fromkeys(("eight", "both"), P() if devices == 3 else P("fsdp"))}
        )
        with jmo.Store() as store:
            tx = jmo.adamw(1e-2, weight_decay=0.1, store=store, mesh=mesh, param_specs=wished)
            placed = shard(params, mesh, held)
            state = jax.jit(tx.init)(placed)
            compiled = make_step(tx, donate=True).lower(placed, state, shard(grads[0], mesh, held)).compile()
            # a gradient and a param of each element, and less than one more a leaf
            assert handed_over(compiled) <= 2 * (elements // devices + len(params))
            new, state = train(tx, params, grads, mesh, held)
            results.append(gathered((new, jmo.read_state(state), jmo.read_masters(state, new)), mesh))
    for other in results[1:]:
        assert_bits_equal(other, results[0])
    masters, reference = run_reference(optax.adamw(1e-2, weight_decay=0.1), params, grads)
    assert_close(results[0][2], masters)
    assert_close(results[0][1], reference)


# -- how specs are told


def test_a_dimension_that_does_not_divide_is_whole():
    """JAX cannot shard it so; one rule for the whole tree (P('fsdp') for all that has a dimension) is all it takes."""
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    wished = {name: P("fsdp") if shape else P() for name, shape in SHAPES.items()}
    held = {name: P("fsdp") if shape and shape[0] % 2 == 0 else P() for name, shape in SHAPES.items()}
    params = make_params(SHAPES)
    grads = record_gradients(params, 3)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=wished)
        new, state = train(tx, params, grads, mesh, held)
        expected, reference = run_reference(optax.adamw(1e-2), params, grads)
        assert_close(new, expected)
        assert_close(jmo.read_state(state), reference)


@pytest.mark.parametrize("told", ["specs", "types", "arrays"])
@pytest.mark.parametrize("kinds", ["explicit", "mixed"])
def test_explicit_and_mixed_axes(kinds, told):
    """Types tell Explicit axes; where some are Auto, it takes specs or concrete params."""
    kinds = [AxisType.Explicit if kinds == "explicit" or i == 1 else AxisType.Auto for i in range(3)]
    mesh = jax.make_mesh(tuple(CUBE.values()), tuple(CUBE), axis_types=tuple(kinds))
    params = make_params(SHAPES)
    grads = record_gradients(params, 3)
    with jax.set_mesh(mesh), jmo.Store() as store:
        given = {"mesh": mesh, "param_specs": CUBE_SPECS} if told == "specs" else {}
        tx = jmo.adamw(1e-2, store=store, **given)
        placed = shard(params, mesh, CUBE_SPECS)
        state = tx.init(placed) if told == "arrays" else jax.jit(tx.init)(placed)
        step, new = make_step(tx), placed
        if told == "types" and AxisType.Auto in kinds:
            with pytest.raises(ValueError, match="pass mesh= and param_specs="):
                step(new, state, placed)
            return
        for grad in grads:
            new, state = step(new, state, shard(grad, mesh, CUBE_SPECS))
        expected, reference = run_reference(optax.adamw(1e-2), params, grads)
        assert_close(new, expected)
        assert_close(jmo.read_state(state), reference)
        assert store.stats()["record_bytes_total"] < 1.05 * 8 * ELEMENTS


ORDER = {**CUBE_SPECS, "embed": P(("fsdp", "data")), "out": P(None, ("tensor", "fsdp", "data"))}


@pytest.mark.parametrize(
    ("manual", "specs", "explicit"),
    [
        (("data", "fsdp", "tensor"), CUBE_SPECS, False),
        (("data",), CUBE_SPECS, True),
        (("fsdp", "tensor"), CUBE_SPECS, False),
        (("data",), ORDER, False),
        (("data", "fsdp"), ORDER, False),
    ],
    ids=["all", "explicit", "some", "inner axis", "inner axes"],
)
def test_inside_a_shard_map(manual, specs, explicit):
    """All of its axes manual, or some: specs over the whole mesh tell who holds replicas. Init sees whole leaves."""
    mesh, whole = mesh_of(explicit, **CUBE), specs
    params = make_params(SHAPES)
    grads = record_gradients(params, 3)

    def kept(spec):
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
        return P(*(tuple(axis for axis in entry if axis in manual) or None for entry in entries))

    inside = {name: kept(spec) for name, spec in whole.items()}
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=whole)

        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        specs = {"in_specs": (inside, P(), inside), "out_specs": (inside, P())}
        step = jax.jit(jax.shard_map(step, mesh=mesh, axis_names=set(manual), check_vma=False, **specs))
        new = shard(params, mesh, whole)
        state = jax.jit(tx.init)(new)
        for grad in grads:
            new, state = step(new, state, shard(grad, mesh, whole))
        expected, reference = run_reference(optax.adamw(1e-2), params, grads)
        assert_close(new, expected)
        assert_close(jmo.read_state(state), reference)
        assert store.stats()["record_bytes_total"] < 1.05 * 8 * ELEMENTS


def test_inside_a_shard_map_of_which_nothing_is_known():
    """Each device has its own shard; whole leaves cannot be told, so they are not read back wrong."""
    mesh = mesh_of(data=2, fsdp=4)
    params = {"w": np.ones((64, 8), np.float32)}
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        local = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
        state = tx.init(local)
        specs = {"in_specs": ({"w": P("fsdp")}, P()), "out_specs": ({"w": P("fsdp")}, P()), "check_vma": False}
        step = jax.jit(jax.shard_map(lambda p, s: tx.update(p, s, p), mesh=mesh, **specs))
        updates, state = step(shard(params, mesh, {"w": P("fsdp")}), state)
        expected, _ = run_reference(optax.adamw(1e-2), {"w": jnp.ones((64, 8))}, [{"w": jnp.ones((64, 8))}])
        assert_close(jax.tree.map(lambda u, p: u + p, updates, params), expected)
        with pytest.raises(ValueError, match="param_specs"):
            jmo.read_state(state)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        some = {"in_specs": ({"w": P("data")}, P()), "out_specs": ({"w": P("data")}, P()), "check_vma": False}
        some = jax.shard_map(lambda p, s: tx.update(p, s, p), mesh=mesh, axis_names={"data"}, **some)
        state = tx.init({"w": jax.ShapeDtypeStruct((32, 8), jnp.float32)})
        with pytest.raises(ValueError, match="leaves other axes automatic"):
            jax.eval_shape(some, params, state)


def test_inside_a_shard_map_over_one_device():
    mesh = mesh_of(data=1)
    params = make_params({"w": (64, 8)})
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        specs = {"in_specs": (P(), P(), P()), "out_specs": (P(), P()), "check_vma": False}
        step = jax.jit(jax.shard_map(lambda g, s, p: tx.update(g, s, p), mesh=mesh, **specs))
        state = tx.init(params)
        for grad in record_gradients(params, 3):
            updates, state = step(grad, state, params)
        jax.block_until_ready(updates)
        assert (store.stats()["steps"], store.stats()["records"]) == (3, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"param_specs": {"w": P(("data", "data"))}}, "names an axis twice"),
        ({"param_specs": {"w": P("data", "data")}}, "names an axis twice"),
        ({"param_specs": {"w": P()}}, "sharded as .*'data'.*but param_specs= says"),
        ({"mesh": (8,), "param_specs": {"w": P("data")}}, "mesh= is .*give a jax.sharding.Mesh"),
        ({"mesh": mesh_of(data=8).abstract_mesh, "param_specs": P()}, "mesh= is .*give a jax.sharding.Mesh"),
        ({"mesh": mesh_of(fsdp=8), "param_specs": NamedSharding(mesh_of(data=8), P("data"))}, "lie on one mesh"),
        ({"mesh": mesh_of(data=4), "param_specs": None}, "the params lie on"),
    ],
)
def test_what_contradicts_itself_is_refused_by_init(given, message):
    mesh = mesh_of(data=8)
    params = shard({"w": np.ones((16, 8), np.float32)}, mesh, {"w": P("data")})
    with jmo.Store() as store, pytest.raises((ValueError, TypeError), match=message):
        jmo.adam(1e-2, store=store, **{"mesh": mesh, **given}).init(params)


def test_a_mesh_with_axes_of_another_type_is_the_same_mesh():
    params = shard({"w": np.ones((16, 8), np.float32)}, mesh_of(data=8), {"w": P("data")})
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store, mesh=mesh_of(explicit=True, data=8), param_specs={"w": P("data")})
        tx.init(params)


def test_the_state_before_the_first_update_lies_as_the_params():
    mesh = mesh_of(**CUBE)
    params = shard(make_params(SHAPES), mesh, CUBE_SPECS)
    with jmo.Store() as store:
        state = jmo.read_state(jmo.adamw(1e-2, store=store).init(params))
        for name, moment in state[0].mu.items():
            assert moment.sharding.is_equivalent_to(params[name].sharding, moment.ndim)


def test_shardings_of_the_state_by_tree_map_params():
    """optax's own way to specs of a state: what is like the params has theirs, all else is replicated."""
    mesh = mesh_of(**CUBE)
    params = shard(make_params(SHAPES), mesh, CUBE_SPECS)
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        given = {"mesh": mesh, "param_specs": CUBE_SPECS, "accumulate_steps": 2, "name": "one"}
        tx = optax.chain(optax.clip_by_global_norm(1e3), jmo.adamw(1e-2, store=store, **given))
        shapes = jax.eval_shape(tx.init, params)
        specs = optax.tree.map_params(tx, lambda _, spec: spec, shapes, CUBE_SPECS, transform_non_params=lambda _: P())
        assert specs[1].acc_grads == CUBE_SPECS
        assert specs[1].inner_opt_state == (P(), P())
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
        state, step = jax.jit(tx.init, out_shardings=placed)(params), make_step(tx)
        new = params
        for grad in grads:
            new, state = step(new, state, shard(grad, mesh, CUBE_SPECS))
        expected, _ = run_reference(optax.MultiSteps(optax.adamw(1e-2), 2), params, grads)
        assert_close(new, expected)


def test_counter_of_collectives_sees_them():
    """What the tests above rely on."""
    mesh = mesh_of(data=8)
    x = shard(np.ones(64, np.float32), mesh, P("data"))
    whole = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P())).lower(x).compile()
    assert collectives(whole) == Counter({("all-gather", "f32[64]"): 1})
