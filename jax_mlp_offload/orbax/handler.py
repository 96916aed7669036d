"""Orbax's ``Save`` and ``Restore`` arguments for trees with offloaded states, and the handler behind them.

The tree on disk is that of plain optax, leaf for leaf. See ``saving`` and ``restoring`` for how the states get there and
back, ``matching`` for whose they are, ``manifest`` for what is kept beside the tree.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.handlers import standard_checkpoint_handler
from orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler import BasePyTreeCheckpointHandler

from jax_mlp_offload.orbax.arrays import make_registry, write_job
from jax_mlp_offload.orbax.restoring import Request, Restoring
from jax_mlp_offload.orbax.saving import Job, OffloadedLeaf
from jax_mlp_offload.positions import find
from jax_mlp_offload.store import Store

_LEAST_CONCURRENT_BYTES = 64 * 2**20


class OffloadHandler(ocp.StandardCheckpointHandler):  # type: ignore[misc]
    """Saves and restores trees in which states of offloaded optimizers stand anywhere.

    Works wherever Orbax takes a handler; ``CheckpointManager`` finds it by the type of :class:`OffloadSave` and
    :class:`OffloadRestore`. A tree without offloaded states is saved as ``StandardSave`` does.
    """

    def __init__(self) -> None:
        super().__init__()
        registry = make_registry()
        self._arrays = BasePyTreeCheckpointHandler(
            save_concurrent_bytes=_LEAST_CONCURRENT_BYTES,
            restore_concurrent_bytes=_LEAST_CONCURRENT_BYTES,
            type_handler_registry=registry,
        )
        self._impl = ocp.PyTreeCheckpointHandler(handler_impl=self._arrays, type_handler_registry=registry)
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
        job = Job(args.item, directory, asynchronous)
        try:
            job.start()
            standard = standard_checkpoint_handler.StandardSaveArgs(job.tree, args.save_args, args.custom_metadata)
            futures = list(await super().async_save(directory, args=standard) or [])
        except BaseException as error:
            job.fail(error)
            raise
        if not job.started:  # no leaf of the tree is in a store, but masters may be
            rest = _write_rest(job, directory)
            futures.append(future.CommitFutureAwaitingContractedSignals(rest, name="offloaded_states"))
        return futures

    def restore(self, directory: Any, item: Any = None, args: OffloadRestore | None = None) -> Any:
        """See :class:`OffloadRestore`."""
        if args is None:
            args = OffloadRestore(item)
        if not find(args.item):  # a tree of plain arrays; or none, and everything comes as plain optax has it
            standard = standard_checkpoint_handler.StandardRestoreArgs(
                args.item, args.strict, fallback_sharding=args.fallback_sharding
            )
            return super().restore(directory, args=standard)
        request = Request(args.item, args.strict, args.fallback_sharding, args.store)

        def restore_tree(tree: Any, restore_args: Any) -> Any:
            self._limit_memory(tree)
            return self._impl.restore(directory, args=ocp.args.PyTreeRestore(item=tree, restore_args=restore_args))

        return Restoring(directory, self.metadata(directory), request).run(restore_tree)

    def _limit_memory(self, tree: Any) -> None:
        """Has Orbax move few of the arrays at a time that are not in stores, but any single one."""
        arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))]
        largest = max((math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays), default=0)
        most = max(_LEAST_CONCURRENT_BYTES, 2 * largest)
        self._arrays._save_concurrent_bytes = self._arrays._restore_concurrent_bytes = most


async def _write_rest(job: Job, directory: Any) -> None:
    try:
        if hasattr(directory, "await_creation"):
            directory = await directory.await_creation()
        if job.saved or job.fresh:
            await asyncio.to_thread(job.wait)
            await write_job(job, directory, [])
    except BaseException as error:
        job.peers.fail(error)
        raise
    finally:
        job.close()  # not by another thread: the interpreter may be about to end


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
