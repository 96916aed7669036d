"""One restore of a tree with offloaded states: other leaves by Orbax, states into their stores.

Which optimizer each state is of, and that the checkpoint has all of it, is known before anything is read.
Thread contract: the user's thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint._src.handlers import standard_checkpoint_handler

from jax_mlp_offload.binding import Binding
from jax_mlp_offload.errors import CheckpointError
from jax_mlp_offload.filling import load, values_of, warn_of_conversions
from jax_mlp_offload.orbax import manifest
from jax_mlp_offload.orbax.arrays import OpenArgs, caching, open_master
from jax_mlp_offload.orbax.matching import Shapes, match
from jax_mlp_offload.orbax.saving import Target
from jax_mlp_offload.peers import Peers, topic_of
from jax_mlp_offload.positions import (
    Keys,
    Position,
    find,
    keys_of,
    put,
    replace,
    shardings_of_params,
    small_array,
    unboxed,
)
from jax_mlp_offload.read import optax_state
from jax_mlp_offload.registry import Registry


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be restored; see :class:`OffloadRestore`."""

    item: Any
    strict: bool
    fallback_sharding: Any
    store: Registry | None


class Restoring:
    """One call of ``restore``: which optimizer each state is of is known before anything is read."""

    def __init__(self, directory: Any, metadata: Any, request: Request) -> None:
        self._directory, self._metadata, self._request = directory, metadata, request
        self._positions = find(request.item)
        self._manifest = manifest.load(directory)
        self._context = caching()
        self._found = [self._match(position) for position in self._positions]
        self._check_distinct()

    def _match(self, position: Position) -> tuple[Registry, Binding] | None:
        """The store and optimizer of a state; None: no update had been made from it, so there is nothing to load."""
        entry = self._manifest.get(position.keys)
        if entry is not None and entry.identity == manifest.FRESH:
            return None
        stored: Shapes = {
            keys_of(path): tuple(leaf.shape)
            for path, leaf in jax.tree_util.tree_flatten_with_path(self._stored(position))[0]
        }
        stores = None if self._request.store is None else [self._request.store]
        store, declared = match(position, stored, entry, stores)
        assert declared.bind is not None
        binding: Binding = declared.bind(shardings_of_params(declared.leaves, self._request.item, self._positions))
        return store, binding

    def _check_distinct(self) -> None:
        numbers: dict[tuple[int, int], Position] = {}
        for position, found in zip(self._positions, self._found, strict=True):
            if found is None:
                continue
            other = numbers.setdefault((id(found[0]), found[1].number), position)
            if other is not position:
                raise CheckpointError(
                    f"the states at {'/'.join(other.keys)} and {'/'.join(position.keys)} would both go to optimizer "
                    f"{found[1].name!r}, whose init was called last: restore each with a jmo.orbax.OffloadRestore of its "
                    "own and store="
                )

    def _stored(self, position: Position) -> Any:
        """The checkpoint's metadata of what it has at a position; an empty tree if there is nothing."""
        at = self._metadata.tree
        for key in position.keys:
            if isinstance(at, (list, tuple)):
                at = at[int(key)] if key.isdigit() and int(key) < len(at) else {}
            elif isinstance(at, dict):
                at = at.get(key, at.get(int(key), {}) if key.isdigit() else {})
            else:
                return {}
        return at

    def run(self, restore_tree: Callable[[Any, Any], Any]) -> Any:
        """Restores the tree: other leaves first, then the states.

        Args:
          restore_tree: (tree, args for restore) -> the tree that Orbax restores.
        """
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])  # for Orbax: what is in stores has none

        def stand_in(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)

        subtrees = [jax.tree.map(stand_in, self._stored(position)) for position in self._positions]
        target = replace(self._request.item, subtrees.__getitem__)
        places = self._places(target)
        restored = restore_tree(target, self._restore_args(target, [number for _, number in places]))
        leaves = jax.tree.leaves(restored)
        inside: list[dict[Keys, Any]] = [{} for _ in self._positions]
        outside = []
        for (keys, number), leaf in zip(places, leaves, strict=True):
            if number is None:
                outside.append(leaf)
            else:
                inside[number][unboxed(keys)] = leaf
        peers = Peers(topic_of("restore", self._directory), together=jax.process_count() > 1)
        try:
            prepared = list(map(self._prepare, self._positions, self._found, inside))
        except BaseException as error:
            peers.fail(error)
            raise
        peers.tell(None)  # whatever can be checked is; nobody is left alone in what follows
        states = list(map(self._load, self._positions, self._found, prepared))
        return put(self._request.item, states, outside)

    def _places(self, target: Any) -> list[tuple[Keys, int | None]]:
        """Of each leaf, the path and None; of one in a state, the path in that and the state's number."""
        places: list[tuple[Keys, int | None]] = []
        for path, _ in jax.tree_util.tree_flatten_with_path(target)[0]:
            keys = keys_of(path)
            prefixes = [position.keys for position in self._positions]
            number = next((i for i, prefix in enumerate(prefixes) if keys[: len(prefix)] == prefix), None)
            places.append((keys if number is None else keys[len(prefixes[number]) :], number))
        return places

    def _restore_args(self, target: Any, numbers: Sequence[int | None]) -> Any:
        made = standard_checkpoint_handler._construct_restore_args(
            target, lambda: self._metadata, self._request.fallback_sharding
        )
        treedef: Any = jax.tree.structure(target)
        args = [
            OpenArgs() if number is not None else arg if self._request.strict else _lenient(arg)
            for arg, number in zip(treedef.flatten_up_to(made), numbers, strict=True)
        ]
        return jax.tree.unflatten(treedef, args)

    def _prepare(
        self, position: Position, found: tuple[Registry, Binding] | None, stored: dict[Keys, Any]
    ) -> tuple[dict[Target, Any], int]:
        """What a state is loaded from, and its count."""
        if found is None:
            return {}, 0
        binding, where = found[1], "/".join(position.keys)
        entry = self._manifest.get(position.keys)
        counts = [entry.count] if entry is not None else []
        arrays: dict[Target, Any] = {}
        for keys, place in _places_of(binding).items():
            if isinstance(place, tuple):
                arrays[place] = stored[keys]
            else:
                counts.append(int(values_of(f"the count of {where}", stored[keys].read())))
        if len(set(counts)) > 1:
            raise CheckpointError(
                f"the state at {where} has several counts of updates, {sorted(set(counts))}: it is damaged, or put "
                "together from several; restore another checkpoint"
            )
        named = {} if entry is None else entry.masters
        kept = set(binding.masters())
        for leaf, spec in enumerate(binding.leaves):
            if spec.path in named:
                master = self._open_master(named[spec.path], binding, leaf, where)
                if leaf in kept and master.dtype.name == binding.section_dtype(leaf, "master").name:
                    arrays[leaf, "master"] = master
        wide = {spec.path for spec in binding.leaves if spec.dtype == "float32"}  # their params are their own masters
        warn_of_conversions(binding, arrays, where, [path for path in named if path in wide])
        return arrays, counts[0] if counts else 0

    def _load(
        self, position: Position, found: tuple[Registry, Binding] | None, prepared: tuple[dict[Target, Any], int]
    ) -> Any:
        """Loads a state into its store; returns the node for the tree."""
        arrays, count = prepared
        ticket = 0 if found is None else load(found[1], arrays, found[0].engine, count)
        placed = _placement(position.state.count, None if found is None else found[1])
        values = np.asarray(count, np.int32), np.asarray([ticket], np.uint32)
        return position.with_leaves(*(small_array(value, placed) for value in values))

    def _open_master(self, name: str, binding: Binding, leaf: int, where: str) -> Any:
        path = binding.leaves[leaf].path
        try:
            array = open_master(self._directory, name, self._context)
        except ValueError as error:
            raise CheckpointError(
                f"the state at {where}: the float32 masters of {path} cannot be read ({error}): the checkpoint is "
                "incomplete or damaged; restore another one"
            ) from error
        if tuple(array.shape) != binding.shapes[leaf]:
            raise CheckpointError(
                f"the state at {where}: the float32 masters of {path} have shape {tuple(array.shape)}, not "
                f"{binding.shapes[leaf]}: the checkpoint is damaged; restore another one"
            )
        return array


def _places_of(binding: Binding) -> dict[Keys, Target | None]:
    """What stands where in optax's state: a leaf's section, or None for a count."""

    @dataclasses.dataclass(frozen=True)
    class Marker:
        place: Target

    def markers(section: str) -> list[Any]:
        return [Marker((leaf, section)) for leaf in range(len(binding.leaves))]

    flat, _ = jax.tree_util.tree_flatten_with_path(optax_state(binding, 0, markers))
    return {unboxed(keys_of(path)): leaf.place if isinstance(leaf, Marker) else None for path, leaf in flat}


def _lenient(arg: Any) -> Any:
    return dataclasses.replace(arg, strict=False) if hasattr(arg, "strict") else arg


def _placement(count: Any, binding: Binding | None) -> jax.sharding.Sharding | None:
    """Where a state's own leaves go: where the tree has them, but over the whole mesh of the params; None: anywhere."""
    found = getattr(count, "sharding", None)
    mesh = None if binding is None else binding.layout.mesh
    if mesh is not None and (found is None or found.device_set != set(mesh.devices.flat)):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return None if isinstance(count, jax.Array) and not count.committed else found
