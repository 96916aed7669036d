"""Putting a snapshot's states in the place of a store's.

Everything that can be checked is checked before the store is touched: the manifests, the files and their sizes, which
optimizers they are of, and the tree. Records are checked as they are read. Thread contract: the user's thread.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_mlp_offload.binding import Binding
from jax_mlp_offload.errors import CheckpointError
from jax_mlp_offload.filling import load, warn_of_conversions
from jax_mlp_offload.positions import Position, find, replace, shardings_of_params, small_array
from jax_mlp_offload.registry import Declared, Registry, identity_of
from jax_mlp_offload.snapshots.folder import whole
from jax_mlp_offload.snapshots.manifest import FILE, TREE, Optimizer, Snapshot, read
from jax_mlp_offload.snapshots.source import Records, sections
from jax_mlp_offload.snapshots.taking import Snapshots, local_path
from jax_mlp_offload.state import OffloadState


def restore(store: Registry, snapshots: Snapshots, path: Any, tree: Any = None) -> Any:
    """See ``Store.restore_snapshot``."""
    place = local_path(path)
    positions = [] if tree is None else find(tree)
    together = snapshots.spans() or (tree is not None and jax.process_count() > 1)
    peers = snapshots.next_peers(together)
    snapshot, found = None, None
    try:
        snapshot = _read(place)
        if tree is not None:
            _check_positions(snapshot, positions)
        found = _find_all(store, snapshot, tree, positions)
    except BaseException as error:
        peers.tell(None, error)  # raises it, once the others know
    if len(set(peers.tell(None if snapshot is None else snapshot.path.name))) > 1:
        raise CheckpointError(f"the processes found different snapshots in {place}; name one of them")
    assert snapshot is not None and found is not None
    given = tree
    if tree is not None and snapshot.states is not None:
        tree = _restore_tree(snapshot, tree)  # what may fail comes first
    states = {identity: _load(store, *each, str(place)) for identity, each in found.items()}
    if tree is None:
        return {records.optimizer.name: states[identity] for identity, (records, _) in found.items()}
    return _put(given, tree, snapshot, states)


def _read(place: pathlib.Path) -> Snapshot:
    if not (place / FILE).exists() and (newest := whole(place)):
        place = newest[0]  # of a folder of snapshots
    return read(place)


# -- what it is of


def _check_positions(snapshot: Snapshot, positions: Sequence[Position]) -> None:
    """Whether the tree has states where the snapshot has."""
    if not positions:
        raise CheckpointError("the tree has no offloaded state; give one like that which was saved, or tree=None")
    if snapshot.states is None:
        optimizers = {optimizer.name for each in snapshot.processes.values() for optimizer in each}
        if len(optimizers) != 1:
            raise CheckpointError(
                f"{snapshot.path} was taken without a tree, and of {len(optimizers)} optimizers ({', '.join(optimizers)}): "
                "which state of the tree is whose cannot be told. Restore it with tree=None, and put the states where "
                "they belong"
            )
        return
    there, here = [state.keys for state in snapshot.states], [position.keys for position in positions]
    if there != here:
        raise CheckpointError(
            f"{snapshot.path} was taken of a tree with offloaded states at {_shown(there)}, but the tree to restore has "
            f"them at {_shown(here)}; give one like that which was saved"
        )


def _shown(places: Sequence[tuple[str, ...]]) -> str:
    return ", ".join("/".join(keys) or "its root" for keys in places) or "no place"


def _find_all(
    store: Registry, snapshot: Snapshot, tree: Any, positions: Sequence[Position]
) -> dict[str, tuple[Records, Binding]]:
    """By identity each optimizer's records, and the optimizer of the store that they are of."""
    declarations = {identity_of(key): declared for key, declared in store.declarations().items()}
    identities = dict.fromkeys(o.identity for optimizers in snapshot.processes.values() for o in optimizers)
    checked = {}
    for identity in identities:
        records = Records(snapshot, identity)
        checked[identity] = records, _check(snapshot, records.optimizer, declarations)
    found = {}
    for identity, (records, declared) in checked.items():
        assert declared.bind is not None
        placed = _shardings(declared, tree, positions)
        binding: Binding = declared.bind(placed)
        if binding.rule.kind != records.optimizer.rule:
            raise CheckpointError(
                f"{snapshot.path}: optimizer {binding.name!r} is {records.optimizer.rule} there and {binding.rule.kind} "
                "here; restore it with the optimizer that it was taken of"
            )
        found[identity] = records, binding
    return found


def _check(snapshot: Snapshot, saved: Optimizer, declarations: dict[str, Declared]) -> Declared:
    """What ``init`` saw of the optimizer, if it is of the same params."""
    declared = declarations.get(saved.identity)
    if declared is None:
        known = ", ".join(map(repr, declarations)) or "none"
        raise CheckpointError(
            f"{snapshot.path} has a state of optimizer {saved.name!r} ({saved.identity}), which this store does not know "
            f"(it knows {known}); call its init(params) with this store first, on arrays or under jax.eval_shape"
        )
    if declared.leaves != saved.leaves:
        theirs, ours = set(saved.leaves), set(declared.leaves)
        differing = sorted(theirs - ours)[:4], sorted(ours - theirs)[:4]
        raise CheckpointError(
            f"{snapshot.path}: optimizer {saved.name!r} is of other params there ({', '.join(map(str, differing[0]))}) than "
            f"here ({', '.join(map(str, differing[1]))}); restore it with the params that it was taken of"
        )
    return declared


def _shardings(declared: Declared, tree: Any, positions: Sequence[Position]) -> list[Any]:
    if tree is None:
        return [None] * len(declared.leaves)
    return shardings_of_params(declared.leaves, tree, positions)


# -- what is put in


def _load(store: Registry, records: Records, binding: Binding, where: str) -> OffloadState:
    """Loads one optimizer; returns its state."""
    ticket, count = 0, records.optimizer.count
    if not records.empty:
        if records.fit(binding):
            ticket = load(binding, {}, store.engine, count, records.copy)
        else:
            arrays = sections(records)
            warn_of_conversions(binding, arrays, where)
            ticket = load(binding, arrays, store.engine, count)
    mesh = binding.layout.mesh
    everywhere = None if mesh is None or not binding.layout.specs else NamedSharding(mesh, PartitionSpec())
    return OffloadState(
        *(small_array(value, everywhere) for value in (np.asarray(count, np.int32), np.asarray([ticket], np.uint32)))
    )


def _restore_tree(snapshot: Snapshot, tree: Any) -> Any:
    """The tree as it was, handles and all."""
    import orbax.checkpoint as ocp

    try:
        with contextlib.closing(ocp.Checkpointer(ocp.StandardCheckpointHandler())) as checkpointer:
            restored = checkpointer.restore(snapshot.path / TREE, args=ocp.args.StandardRestore(tree))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{snapshot.path / TREE} cannot be restored ({error}): it is damaged, or of another tree; give a tree like that "
            "which was saved, or restore another snapshot"
        ) from error
    assert snapshot.states is not None
    for position, state in zip(find(restored), snapshot.states, strict=True):
        if (found := int(np.asarray(position.state.ticket)[0])) != state.ticket:
            raise CheckpointError(
                f"{snapshot.path / TREE} has ticket {found} at {'/'.join(state.keys)}, the manifest {state.ticket}: "
                "the tree is that of another snapshot; restore another one"
            )
    return restored


def _put(given: Any, tree: Any, snapshot: Snapshot, states: dict[str, OffloadState]) -> Any:
    """The tree with the new states' tickets, and their counts where it was not restored; placed as they were given."""
    places, positions = find(given), find(tree)

    def node(index: int) -> Any:
        position, place = positions[index], places[index].state
        if snapshot.states is None:
            (state,) = states.values()
        elif (identity := snapshot.states[index].identity) is None:
            return position.node
        else:
            state = OffloadState(position.state.count, states[identity].ticket)
        return position.with_leaves(_placed(state.count, place.count), _placed(state.ticket, place.ticket))

    return replace(tree, node)


def _placed(value: jax.Array, like: Any) -> jax.Array:
    """A small array, placed as another one is said to be; one that is not committed to devices may go anywhere."""
    sharding = getattr(like, "sharding", None)
    if sharding is None or (isinstance(like, jax.Array) and not like.committed):
        return jnp.asarray(np.asarray(value)) if value.is_fully_addressable else value
    return small_array(np.asarray(value), sharding)
