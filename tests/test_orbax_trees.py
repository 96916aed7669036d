"""Checkpoints of offloaded optimizers and of plain optax are the same, and either restores the other's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jax_mlp_offload as jmo
from tests.checkpoints import (
    abstract,
    clipped,
    contents,
    described,
    everything,
    go_on,
    restore,
    restore_plain,
    save,
    save_plain,
    schedule,
    tree_of,
)
from tests.meshes import P, mesh_of, shard
from tests.support import (
    BF16,
    advance,
    assert_bits_equal,
    assert_close,
    make_params,
    make_step,
    record_gradients,
)

SHAPES = {"bias": (7,), "embed": (8, 12), "scalar": (), "wide": (4, 20)}
SPECS = {"bias": P(), "embed": P("fsdp", "data"), "scalar": P(), "wide": P("fsdp"), "none": None}
GROUPS = {"bias": "slow", "embed": "fast", "scalar": "frozen", "wide": "slow"}
SAVED, LAST = 3, 5  # steps


def labels(params):
    """Of each param, and of no leaf that is None."""
    return jax.tree_util.tree_map_with_path(lambda path, _: GROUPS[path[0].key], params)


def groups_of_two_rules(kind, **more):
    slow, fast = kind.adamw(1e-2, weight_decay=0.1, **more), kind.sgd(schedule(), 0.9, nesterov=True, **more)
    return optax.partition({"slow": slow, "fast": fast, "frozen": optax.set_to_zero()}, labels)


def groups_of_one_rule(kind, **more):
    """Only the paths of their leaves tell whose a state is."""
    slow, fast = kind.adamw(1e-3, weight_decay=0.1, **more), kind.adamw(1e-2, **more)
    return optax.partition({"slow": slow, "fast": fast, "frozen": optax.set_to_zero()}, labels)


def masked(kind, **more):
    return optax.masked(kind.adamw(1e-2, **more), lambda params: jax.tree.map(lambda p: p.ndim == 2, params))


def injected(kind, **more):
    factory = optax.inject_hyperparams(
        kind.adamw, static_args=tuple({"mesh"} & set(more)), hyperparam_dtype=jnp.float32
    )
    return optax.chain(optax.clip_by_global_norm(1.0), factory(schedule(), weight_decay=0.1, **more))


def accumulated(kind, **more):
    """Saved in the middle of an accumulation."""
    if kind is optax:
        return optax.MultiSteps(optax.adamw(schedule()), 2).gradient_transformation()
    return kind.adamw(schedule(), accumulate_steps=2, **more)


def sgd(kind, **more):
    return kind.sgd(schedule(), **more)


def momentum(kind, **more):
    return kind.sgd(1e-1, 0.9, **more)


KINDS = [clipped, groups_of_two_rules, groups_of_one_rule, masked, injected, accumulated, sgd, momentum]
ON_ONE_DEVICE = [pytest.param(kind, jnp.float32, None, id=kind.__name__) for kind in KINDS]
ON_MESHES = [
    pytest.param(kind, dtype, explicit, id=f"{kind.__name__}-{'explicit' if explicit else 'auto'}")
    for kind, dtype, explicit in [
        (clipped, jnp.float32, False),
        (clipped, BF16, True),
        (groups_of_two_rules, BF16, False),
        (injected, jnp.float32, True),
        (accumulated, jnp.float32, False),
    ]
]


@pytest.mark.parametrize(("kind", "dtype", "explicit"), ON_ONE_DEVICE + ON_MESHES)
def test_offloaded_and_plain_checkpoints_are_the_same(kind, dtype, explicit, tmp_path):
    mesh = None if explicit is None else mesh_of(explicit, data=2, fsdp=2)
    params = {**make_params(SHAPES, dtype), "none": None}
    grads = record_gradients(params, LAST)
    if mesh is not None:
        params, *grads = (shard(tree, mesh, SPECS) for tree in (params, *grads))
    more = {} if mesh is None else {"mesh": mesh}
    plain = kind(optax)
    plain_step = make_step(plain)
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    masters, moments = advance(plain_step, masters, plain.init(masters), widened(grads[:SAVED]))
    expected = advance(plain_step, masters, moments, widened(grads[SAVED:]))

    with jmo.Store() as store:
        tx = kind(jmo, store=store, **more)
        step = make_step(tx)
        new, state = advance(step, params, tx.init(params), grads[:SAVED])
        ours = save(tmp_path / "ours", tree_of(new, state))
        saved = everything(tree_of(new, state))
        straight = go_on(step, tree_of(new, state), grads[SAVED:])
    theirs = save_plain(tmp_path / "theirs", tree_of(jax.tree.map(lambda m: m.astype(dtype), masters), moments))

    a, b = described(ours), described(theirs)
    assert a == b, [(k, str(a.get(k)), str(b.get(k))) for k in {**a, **b} if a.get(k) != b.get(k)]
    assert contents(restore_plain(ours)) == contents(tree_of(saved[0], saved[2]))
    found = restore_plain(ours, tree_of(masters, moments))  # widens the params
    assert_bits_equal(found["opt"], saved[2])
    if dtype == jnp.float32:
        assert_close(advance(plain_step, found["params"], found["opt"], grads[SAVED:]), expected)

    with jmo.Store() as store:
        tx = kind(jmo, store=store, **more)
        step = make_step(tx, donate=True)
        restored = restore(ours, abstract(tx, params, mesh))
        assert_bits_equal(everything(restored), saved)
        assert_bits_equal(go_on(step, restored, grads[SAVED:]), straight)
        if dtype == jnp.float32:
            found = go_on(step, restore(theirs, abstract(tx, params, mesh)), grads[SAVED:])
            assert_close(found[1:], expected)


def widened(grads):
    return [jax.tree.map(lambda g: g.astype(jnp.float32), grad) for grad in grads]


def test_frozen_params_keep_their_bits_and_take_no_room(tmp_path):
    params = {**make_params(SHAPES), "none": None}
    grads = record_gradients(params, LAST)
    with jmo.Store() as store:
        tx = groups_of_two_rules(jmo, store=store)
        step = make_step(tx)
        new, state = advance(step, params, tx.init(params), [*grads, jax.tree.map(jnp.zeros_like, params)])
        path = save(tmp_path / "ours", tree_of(new, state))
        restored = restore(path, tree_of(new, state))
        new, _ = advance(step, restored["params"], restored["opt"], grads)
    assert_bits_equal(new["scalar"], params["scalar"])
    assert [keys for keys in described(path) if "scalar" in keys] == [("params", "scalar")]


# -- Flax


def test_train_state(tmp_path):
    params = make_params(SHAPES)
    grads = record_gradients(params, LAST)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)

    def create(kind, **more):
        return TrainState.create(apply_fn=None, params=jax.tree.map(jnp.copy, params), tx=clipped(kind, **more))

    def train(state, grads):
        for grad in grads:
            state = step(state, grad)
        return state

    theirs = save_plain(tmp_path / "theirs", train(create(optax), grads[:SAVED]))
    expected = train(create(optax), grads)
    with jmo.Store() as store:
        state = train(create(jmo, store=store), grads[:SAVED])
        ours = save(tmp_path / "ours", state)
        straight = jax.tree.map(np.array, train(state, grads[SAVED:]).params)
    a, b = described(ours), described(theirs)
    assert a == b, [(k, str(a.get(k)), str(b.get(k))) for k in {**a, **b} if a.get(k) != b.get(k)]
    found = train(restore_plain(ours, create(optax)), grads[SAVED:])
    assert_close((found.params, found.opt_state), (expected.params, expected.opt_state))
    for path in ours, theirs:
        with jmo.Store() as store:
            restored = restore(path, jax.eval_shape(lambda store=store: create(jmo, store=store)))
            assert int(restored.step) == SAVED
            found = train(restored, grads[SAVED:])
            assert_close((found.params, jmo.read_state(found.opt_state)), (expected.params, expected.opt_state))
            if path == ours:
                assert_bits_equal(found.params, straight)


class Model(nnx.Module):
    """Two layers."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@nnx.jit
def nnx_step(model, optimizer, x):
    gradients = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)


def nnx_trained(kind, steps, **more):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, clipped(kind, **more), wrt=nnx.Param)
    return nnx_train(model, optimizer, steps)


def nnx_train(model, optimizer, steps):
    x = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
    for _ in range(steps):
        nnx_step(model, optimizer, x)
    return model, optimizer


def pure(model, optimizer):
    return {"model": nnx.to_pure_dict(nnx.state(model)), "opt": nnx.to_pure_dict(nnx.state(optimizer))}


def variables(model, optimizer):
    return {"model": nnx.state(model), "opt": nnx.state(optimizer)}


def nnx_put(model, optimizer, restored):
    for node, found in ((model, restored["model"]), (optimizer, restored["opt"])):
        if isinstance(found, dict):
            state = nnx.state(node)
            nnx.replace_by_pure_dict(state, found)
            nnx.update(node, state)
        else:
            nnx.update(node, found)


@pytest.mark.parametrize("form", [variables, pure])
def test_nnx_optimizer(form, tmp_path):
    theirs = save_plain(tmp_path / "theirs", form(*nnx_trained(optax, SAVED)))
    expected = contents_of_model(*nnx_trained(optax, LAST))
    with jmo.Store() as store:
        trained = nnx_trained(jmo, SAVED, store=store)
        ours = save(tmp_path / "ours", form(*trained))
        straight = contents_of_model(*nnx_train(*trained, LAST - SAVED))
    a, b = described(ours), described(theirs)
    assert a == b, [(k, str(a.get(k)), str(b.get(k))) for k in {**a, **b} if a.get(k) != b.get(k)]
    back = nnx_trained(optax, 0)
    nnx_put(*back, restore_plain(ours, form(*back)))
    assert_close(contents_of_model(*nnx_train(*back, LAST - SAVED)), expected)
    for path in ours, theirs:
        with jmo.Store() as store:
            fresh = nnx_trained(jmo, 0, store=store)
            restored = restore(path, form(*fresh))
            assert jax.tree.structure(restored) == jax.tree.structure(form(*fresh))
            nnx_put(*fresh, restored)
            found = contents_of_model(*nnx_train(*fresh, LAST - SAVED))
            assert_close(found, expected)
            if path == ours:
                assert_bits_equal(found, straight)


def contents_of_model(model, optimizer):
    del optimizer
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
