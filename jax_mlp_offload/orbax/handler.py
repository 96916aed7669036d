"""Orbax's ``Save`` and ``Restore`` arguments for trees with offloaded states, and the handler behind them.

The tree on disk is that of plain optax, leaf for leaf. See ``saving`` and ``restoring`` for how the states get there and
back, ``matching`` for whose they are, ``manifest`` for what is kept beside the tree.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.handlers import standard_checkpoint_handler
from orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler import BasePyTreeCheckpointHandler

from jax_mlp_offload.binding import Binding
from jax_mlp_offload.errors import CheckpointError
from jax_mlp_offload.filling import load, warn_of_conversions
from jax_mlp_offload.orbax import manifest
from jax_mlp_offload.orbax.arrays import OpenArgs, caching, make_registry, open_master, write_job
from jax_mlp_offload.orbax.leaves import OffloadedLeaf
from jax_mlp_offload.orbax.matching import Shapes, match, shardings_of_params
from jax_mlp_offload.orbax.saving import Job, Target
from jax_mlp_offload.positions import Keys, Position, find, keys_of, put, replace, unboxed
from jax_mlp_offload.read import optax_state
from jax_mlp_offload.store import Store

_LEAST_CONCURRENT_BYTES = 64 * 2**20


class OffloadHandler(ocp.StandardCheckpointHandler):  # type: ignore[misc]
    """Saves and restores trees in which states of offloaded optimizers stand anywhere.

    Works wherever Orbax takes a handler; ``CheckpointManager`` finds it by the type of :class:`OffloadSave` and
    :class:`OffloadRestore`. A tree without offloaded states is saved as ``StandardSave`` does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arrays = BasePyTreeCheckpointHandler(
            save_concurrent_bytes=_LEAST_CONCURRENT_BYTES,
            restore_concurrent_bytes=_LEAST_CONCURRENT_BYTES,
            type_handler_registry=make_registry(),
        )
        self._impl = ocp.PyTreeCheckpointHandler(handler_impl=self._arrays, type_handler_registry=make_registry())
        self._supported_types: tuple[Any, ...] = (*self._supported_types, OffloadedLeaf)
        # what is written can be read by plain Orbax, and its own handler is named as the one to do it
        self.typestr = ocp.StandardCheckpointHandler.typestr

    async def async_save(
        self, directory: Any, item: Any = None, save_args: Any = None, args: OffloadSave | None = None
    ) -> list[Any] | None:
        """Takes hold of all records, and returns futures that end once they are written.

        Raises:
          OffloadError: if a state cannot be read (it is not the last one, or its update failed).
          ValueError: if no open store holds it.
        """
        return await self._begin(directory, args or OffloadSave(item, save_args), asynchronous=True)

    def save(self, directory: Any, item: Any = None, save_args: Any = None, args: OffloadSave | None = None) -> None:
        """The same, and waits until all is written."""

        async def save() -> None:
            for each in await self._begin(directory, args or OffloadSave(item, save_args), asynchronous=False):
                each.result()

        asyncio_utils.run_sync(save())

    async def _begin(self, directory: Any, args: OffloadSave, asynchronous: bool) -> list[Any]:
        self._limit_memory(args.item)
        job = Job(args.item, asynchronous)
        try:
            standard = standard_checkpoint_handler.StandardSaveArgs(job.tree, args.save_args, args.custom_metadata)
            futures = list(await super().async_save(directory, args=standard) or [])
        except BaseException:
            job.close()
            raise
        if not job.started:  # no leaf of the tree is in a store, but masters may be
            rest = _write_rest(job, directory)
            futures.append(future.CommitFutureAwaitingContractedSignals(rest, name="offloaded_states"))
        return futures

    def restore(self, directory: Any, item: Any = None, args: OffloadRestore | None = None) -> Any:
        """See :class:`OffloadRestore`."""
        if args is None:
            args = OffloadRestore(item)
        positions = find(args.item)  # none: a tree of plain arrays; without a tree, all as plain optax has it
        if not positions:
            standard = standard_checkpoint_handler.StandardRestoreArgs(
                args.item, args.strict, None, args.fallback_sharding
            )
            return super().restore(directory, args=standard)
        return _Restoring(self, directory, args, positions).run()

    def _limit_memory(self, tree: Any) -> None:
        """Has Orbax move few of the arrays at a time that are not in stores, but any single one."""
        arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))]
        largest = max((math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays), default=0)
        most = max(_LEAST_CONCURRENT_BYTES, 2 * largest)
        self._arrays._save_concurrent_bytes = self._arrays._restore_concurrent_bytes = most

    def restore_tree(self, directory: Any, tree: Any, restore_args: Any) -> Any:
        """Restores a tree as ``restore_args`` say."""
        self._limit_memory(tree)
        return self._impl.restore(directory, args=ocp.args.PyTreeRestore(item=tree, restore_args=restore_args))


async def _write_rest(job: Job, directory: Any) -> None:
    try:
        if hasattr(directory, "await_creation"):
            directory = await directory.await_creation()
        if job.saved:
            await asyncio.to_thread(job.set_down)
            await write_job(job, directory, [])
    finally:
        job.close()


class _Restoring:
    """One call of ``restore``: which optimizer each state is of is known before anything is read."""

    def __init__(
        self, handler: OffloadHandler, directory: Any, args: OffloadRestore, positions: Sequence[Position]
    ) -> None:
        self._handler, self._directory, self._args, self._positions = handler, directory, args, positions
        self._manifest = manifest.load(directory)
        self._metadata = handler.metadata(directory)
        self._context = caching()
        self._found = [self._match(position) for position in positions]

    def _match(self, position: Position) -> tuple[Store, Binding]:
        stored: Shapes = {
            keys_of(path): tuple(leaf.shape)
            for path, leaf in jax.tree_util.tree_flatten_with_path(self._stored(position))[0]
        }
        stores = None if self._args.store is None else [self._args.store]
        store, declared = match(position, stored, self._manifest.get(position.keys), stores)
        assert declared.bind is not None
        binding: Binding = declared.bind(shardings_of_params(declared, self._args.item, self._positions))
        return store, binding

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

    def run(self) -> Any:
        """Restores the tree: other leaves first, which are what may fail, then the states."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])  # for Orbax: what is in stores has none

        def stand_in(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)

        subtrees = [jax.tree.map(stand_in, self._stored(position)) for position in self._positions]
        target = replace(self._args.item, subtrees.__getitem__)
        restored = self._handler.restore_tree(self._directory, target, self._restore_args(target))
        leaves = jax.tree.leaves(restored)
        inside: list[dict[Keys, Any]] = [{} for _ in self._positions]
        outside = []
        for (keys, number), leaf in zip(self._places(target), leaves, strict=True):
            if number is None:
                outside.append(leaf)
            else:
                inside[number][unboxed(keys)] = leaf
        states = list(map(self._load, self._positions, self._found, inside))
        return put(self._args.item, states, outside)

    def _places(self, target: Any) -> list[tuple[Keys, int | None]]:
        """Of each leaf, the path and None; of one in a state, the path in that and the state's number."""
        places: list[tuple[Keys, int | None]] = []
        for path, _ in jax.tree_util.tree_flatten_with_path(target)[0]:
            keys = keys_of(path)
            prefixes = [position.keys for position in self._positions]
            number = next((i for i, prefix in enumerate(prefixes) if keys[: len(prefix)] == prefix), None)
            places.append((keys if number is None else keys[len(prefixes[number]) :], number))
        return places

    def _restore_args(self, target: Any) -> Any:
        made = standard_checkpoint_handler._construct_restore_args(
            target, lambda: self._metadata, self._args.fallback_sharding
        )
        treedef: Any = jax.tree.structure(target)
        args = [
            OpenArgs() if number is not None else arg if self._args.strict else _lenient(arg)
            for arg, (_, number) in zip(treedef.flatten_up_to(made), self._places(target), strict=True)
        ]
        return jax.tree.unflatten(treedef, args)

    def _load(self, position: Position, found: tuple[Store, Binding], stored: dict[Keys, Any]) -> Any:
        """Loads a state into its store; returns the node for the tree."""
        store, binding = found
        where = "/".join(position.keys)
        entry = self._manifest.get(position.keys)
        counts = [entry.count] if entry is not None else []
        arrays: dict[Target, Any] = {}
        for keys, place in _places_of(binding).items():
            if isinstance(place, tuple):
                arrays[place] = stored[keys]
            else:
                counts.append(int(stored[keys].read().result()))
        if len(set(counts)) > 1:
            raise CheckpointError(
                f"the state at {where} has several counts of updates, {sorted(set(counts))}: it is damaged, or put "
                "together from several; restore another checkpoint"
            )
        for leaf, spec in enumerate(binding.leaves):
            if entry is not None and spec.path in entry.masters:
                arrays[leaf, "master"] = self._open_master(entry.masters[spec.path], binding, leaf, where)
        warn_of_conversions(binding, arrays, where)
        ticket = load(binding, arrays, store.engine)
        count = np.asarray(counts[0] if counts else 0, np.int32)
        placed = _placement(position.state.count, binding)
        return position.with_leaves(_array(count, placed), _array(np.asarray([ticket], np.uint32), placed))

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


def _placement(count: Any, binding: Binding) -> jax.sharding.Sharding | None:
    """Where a state's own leaves go: where the tree has them, but over the whole mesh of the params; None: anywhere."""
    found = getattr(count, "sharding", None)
    mesh = binding.layout.mesh
    if mesh is not None and (found is None or found.device_set != set(mesh.devices.flat)):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return None if isinstance(count, jax.Array) and not count.committed else found


def _array(value: np.ndarray[Any, Any], sharding: Any) -> jax.Array:
    """A small array, where the tree has the state's."""
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


@ocp.args.register_with_handler(OffloadHandler, for_save=True)
@dataclasses.dataclass
class OffloadSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Saves a tree, offloaded states in it as the arrays of plain optax.

    What is written, tree, dtypes and metadata, is what the same optax optimizer on float32 masters would have in the place
    of each :class:`jax_mlp_offload.OffloadState`, so that Orbax and optax alone can restore it. What 16-bit params lack of
    their float32 masters is written beside the tree. Saves may be synchronous or asynchronous; training goes on during the
    latter, and the checkpoint holds the step that it was asked for. The states must be the last ones of their optimizers.
    Where the mesh spans processes, all of them have to save, to storage that all can reach.

    Attributes:
      item: the tree, such as a whole train state.
      save_args: see ``StandardSave``.
      custom_metadata: see ``StandardSave``.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@ocp.args.register_with_handler(OffloadHandler, for_restore=True)
@dataclasses.dataclass
class OffloadRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Restores a tree; what belongs to offloaded states is loaded into their stores.

    The checkpoint may come from :class:`OffloadSave` or from plain optax (of the same params, moments of any float dtype),
    from another mesh, number of processes, set of tiers or size of subgroups. ``init`` of each optimizer has to be called
    before in this process, on arrays or under ``jax.eval_shape``. What the optimizers had before is replaced; a restore that
    fails half-way leaves them broken, until they are restored or start afresh. Where a mesh spans processes, all of them
    have to restore.

    Attributes:
      item: the abstract tree (arrays or ShapeDtypeStructs with shardings), offloaded states in it as ``init`` gives them;
        None: everything comes as arrays, as plain optax has it.
      strict: see ``StandardRestore``.
      fallback_sharding: see ``StandardRestore``.
      store: the store to load into; None: that of the optimizer whose ``init`` was called last, of those that fit.

    Raises (from ``restore``):
      CheckpointError: if the checkpoint is damaged or incomplete, holds only the handle of an offloaded state, or is that
        of another optimizer.
      OffloadError: if the state cannot be stored.
    """

    item: Any = None
    strict: bool = True
    fallback_sharding: Any = None
    store: Store | None = None
