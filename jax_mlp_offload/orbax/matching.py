"""Which optimizer a state in a checkpoint is of, and how its params lie.

A state in a tree does not say whose it is. It is taken to be of the optimizer that ``init`` was called of in this process,
and whose moments have the paths and shapes that the checkpoint has at that place. Where several do: that of the identity
which the checkpoint names; else the one whose ``init`` was called last, if they are in stores of their own. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jax_mlp_offload.errors import CheckpointError
from jax_mlp_offload.orbax.manifest import Entry
from jax_mlp_offload.positions import Keys, Position, keys_of, unboxed
from jax_mlp_offload.registry import Declared, Registry, identity_of, live_stores

_NAMES_SHOWN = 4
Shapes = dict[Keys, tuple[int, ...]]


def match(
    position: Position, stored: Shapes, entry: Entry | None, stores: Sequence[Registry] | None
) -> tuple[Registry, Declared]:
    """(store, what init saw) of the optimizer that the state at a position is of.

    Args:
      position: where the state stands.
      stored: shapes of the checkpoint's arrays below that, by their path from there.
      entry: what the manifest says, if there is one.
      stores: where to look; None: every open store.

    Raises:
      CheckpointError: if none fits, or several do; names the position and the remedy.
    """
    where = "/".join(position.keys) or "the root"
    if set(map(unboxed, stored)) == {("count",), ("ticket",)}:
        raise CheckpointError(
            f"the checkpoint holds only the handle of the offloaded state at {where} (count and ticket), and none of its "
            "moments: it was saved with StandardSave or PyTreeSave. Save with jmo.orbax.OffloadSave. From this checkpoint "
            "take the params alone, and start the optimizer afresh with init"
        )
    every = [
        (store, key, declared)
        for store in (live_stores() if stores is None else stores)
        for key, declared in store.declarations().items()
        if declared.initial is not None
    ]
    fitting = [item for item in every if _shapes(item[2]) == _unboxed(stored)]
    if not fitting:
        raise CheckpointError(_no_match(where, stored, [declared for _, _, declared in every]))
    named = [item for item in fitting if entry is not None and identity_of(item[1]) == entry.identity]
    chosen = named or fitting
    latest = max(chosen, key=lambda item: item[2].order)
    if sum(store is latest[0] for store, _, _ in chosen) > 1:
        names = ", ".join(repr(identity_of(key)) for store, key, _ in chosen if store is latest[0])
        raise CheckpointError(
            f"the state at {where} may be of several optimizers ({names}), and the checkpoint does not say which: restore "
            "each with a jmo.orbax.OffloadRestore of its own and store=, from stores of their own"
        )
    return latest[0], latest[2]


def _shapes(declared: Declared) -> Shapes:
    assert declared.initial is not None
    flat, _ = jax.tree_util.tree_flatten_with_path(declared.initial())
    return {unboxed(keys_of(path)): tuple(leaf.shape) for path, leaf in flat}


def _unboxed(stored: Shapes) -> Shapes:
    return {unboxed(keys): shape for keys, shape in stored.items()}


def _no_match(where: str, stored: Shapes, known: Sequence[Declared]) -> str:
    if not known:
        return (
            f"there is no offloaded optimizer for the state at {where}: call tx.init(params) first, on arrays or under "
            "jax.eval_shape, in this process"
        )
    if not stored:
        return f"the checkpoint has nothing at {where}, where the tree given to OffloadRestore has an offloaded state"
    differences = []
    for declared in known:
        expected, found = _shapes(declared), _unboxed(stored)
        lacks = sorted(set(expected) - set(found))
        more = sorted(set(found) - set(expected))
        other = sorted(keys for keys in set(found) & set(expected) if found[keys] != expected[keys])
        said = [_shown("lacks", lacks), _shown("has also", more)]
        said += [f"has {'/'.join(keys)} with shape {found[keys]}, not {expected[keys]}" for keys in other[:1]]
        differences.append(" and ".join(filter(None, said)))
    return (
        f"the state at {where} in the checkpoint is that of another optimizer or of other params: "
        f"it {'; or it '.join(differences[:_NAMES_SHOWN])}. Restore it with the optimizer and the params that it was "
        "saved with"
    )


def _shown(verb: str, keys: Sequence[Keys]) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - _NAMES_SHOWN} more" if len(keys) > _NAMES_SHOWN else ""
    return f"{verb} {', '.join('/'.join(key) for key in keys[:_NAMES_SHOWN])}{more}"
