"""Writing and reading Orbax checkpoints in tests, and saying what is in them."""

from __future__ import annotations

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding

import jax_mlp_offload as jmo
from jax_mlp_offload.positions import keys_of
from tests.meshes import P
from tests.support import advance


def schedule():
    """Every step has a learning rate of its own: one that is repeated or skipped shows."""
    return optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)


def clipped(kind, **more):
    """The usual chain."""
    return optax.chain(optax.clip_by_global_norm(1.0), kind.adamw(schedule(), weight_decay=0.1, **more))


def save(path, tree):
    """Saves synchronously with ours; returns the path."""
    with ocp.Checkpointer(jmo.orbax.OffloadHandler()) as checkpointer:
        checkpointer.save(path, args=jmo.orbax.OffloadSave(tree))
    return path


def restore(path, tree, **more):
    """Restores with ours."""
    with ocp.Checkpointer(jmo.orbax.OffloadHandler()) as checkpointer:
        return checkpointer.restore(path, args=jmo.orbax.OffloadRestore(tree, **more))


def save_plain(path, tree):
    """Saves with Orbax alone; returns the path."""
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(tree))
    return path


def restore_plain(path, tree=None):
    """Restores with Orbax alone."""
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.StandardRestore(tree))


def described(path):
    """What Orbax says of each leaf: shape, dtype, sharding and storage."""
    tree = ocp.StandardCheckpointHandler().metadata(epath.Path(path)).tree
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {keys_of(keys): (leaf.shape, str(leaf.dtype), leaf.sharding, leaf.storage) for keys, leaf in flat}


def contents(tree):
    """The bits of each leaf by its path, whatever the nodes are."""
    return {keys_of(keys): np.asarray(leaf).tobytes() for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def as_text(tree):
    """The same for JSON."""
    return {"/".join(map(str, keys)): bits.hex() for keys, bits in contents(tree).items()}


def abstract(tx, params, mesh=None):
    """What a new process gives to restore: shapes, and shardings where there is a mesh. Calls init."""
    state = jax.eval_shape(tx.init, params)
    if mesh is not None:
        everywhere = NamedSharding(mesh, P())
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state)
    return tree_of(jax.tree.map(as_struct, params), state)


def as_struct(array):
    """Its shape, dtype and sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def tree_of(params, state):
    """What the tests save."""
    return {"params": params, "opt": state}


def everything(tree):
    """Host copies of params, float32 masters and moments: all that training goes on from."""
    params, state = tree["params"], tree["opt"]
    return jax.tree.map(np.array, (params, jmo.read_masters(state, params), jmo.read_state(state)))


def go_on(step, tree, grads):
    """``everything`` after more steps from a tree as the tests save it."""
    return everything(tree_of(*advance(step, tree["params"], tree["opt"], grads)))
