"""Orbax's handler of arrays, taught to write and to open the leaves of offloaded states.

One handler serves jax.Array and :class:`OffloadedLeaf`, so that both have one type in the checkpoint's metadata. It relies
on modules of Orbax that are private, so the package depends on one minor version of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import jax_array_handlers, ocdbt_utils, tensorstore_utils, type_handlers, types
from orbax.checkpoint._src.serialization.type_handler_registry import create_type_handler_registry

from jax_mlp_offload.orbax import manifest
from jax_mlp_offload.orbax.chunks import shards_of, written_shape
from jax_mlp_offload.orbax.exchange import Exchange
from jax_mlp_offload.orbax.saving import Job, OffloadedLeaf, Saved, Target
from jax_mlp_offload.orbax.writes import Writes, write_zeros
from jax_mlp_offload.registry import identity_of

_CACHE_BYTES = 64 * 2**20  # of decoded chunks


@dataclasses.dataclass
class OpenArgs(ocp.RestoreArgs):  # type: ignore[misc]
    """Asks for an array that is opened, but not read."""

    restore_type: Any = OffloadedLeaf


class ArrayHandler(jax_array_handlers.ArrayHandler):  # type: ignore[misc]
    """Writes and reads jax.Arrays as its base does, and OffloadedLeafs from and into stores."""

    def __init__(self) -> None:
        super().__init__(array_metadata_store=array_metadata_store.Store())

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """See the base class."""
        args = args or [types.SaveArgs()] * len(values)
        ours = [isinstance(value, OffloadedLeaf) for value in values]
        plain = [item for item, mine in zip(zip(values, infos, args, strict=True), ours, strict=True) if not mine]
        streamed = [item for item, mine in zip(zip(values, infos, args, strict=True), ours, strict=True) if mine]
        futures = list(await super().serialize(*map(list, zip(*plain, strict=True)))) if plain else []
        if streamed:
            job = streamed[0][0].job
            job.started = True
            coroutine = self._write(job, streamed, list(futures))
            futures.append(future.CommitFutureAwaitingContractedSignals(coroutine, name="offloaded_states"))
        return futures

    async def _write(self, job: Job, streamed: list[tuple[OffloadedLeaf, Any, Any]], others: list[Any]) -> None:
        try:
            leaves, infos = [leaf for leaf, _, _ in streamed], [info for _, info, _ in streamed]
            for info in infos:
                await info.await_path_creation()
            await asyncio.to_thread(job.wait)
            opened = [await self._create(*item) for item in streamed]
            await write_job(job, infos[0].parent_dir, [(leaf, t) for leaf, (t, _) in zip(leaves, opened, strict=True)])
            for other in others:  # both write to the same files of metadata
                await asyncio.to_thread(other.result)
            await jax_array_handlers._async_serialize_shardings(
                [leaf.sharding for leaf in leaves], infos, primary_host=self._primary_host
            )
            await self._array_metadata_store.write(
                checkpoint_dir=infos[0].parent_dir,
                array_metadatas=[metadata for _, metadata in opened],
                process_index=multihost.process_index(),
            )
        except BaseException as error:
            job.peers.fail(error)
            raise
        finally:
            job.close()  # not by another thread: the interpreter may be about to end

    async def _create(self, leaf: OffloadedLeaf, info: Any, arg: Any) -> tuple[Any, Any]:
        """Makes a leaf's array; returns its TensorStore and Orbax's metadata of it."""
        write_shape = written_shape(leaf.shape, leaf.sharding, self._use_replica_parallel)
        spec = tensorstore_utils.build_array_write_spec(
            info=info,
            arg=arg,
            global_shape=leaf.shape,
            local_shape=write_shape,
            dtype=leaf.dtype,
            use_ocdbt=info.is_ocdbt_checkpoint,
            process_index=ocdbt_utils.get_process_index_for_subdir(info.is_ocdbt_checkpoint),
            metadata_key=self._metadata_key,
        )
        return await ts.open(ts.Spec(spec.json), create=True, open=True, context=info.ts_context), spec.metadata

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """See the base class; what was asked for by :class:`OpenArgs` comes as a TensorStore."""
        args = args or []
        ours = [i for i, arg in enumerate(args) if isinstance(arg, OpenArgs)]
        plain = [i for i in range(len(infos)) if i not in set(ours)]
        results: list[Any] = [None] * len(infos)
        if plain or not ours:
            found = await super().deserialize([infos[i] for i in plain], [args[i] for i in plain])
            for i, array in zip(plain, found, strict=True):
                results[i] = array
        context = caching(infos[0].ts_context) if ours else None
        for i in ours:
            results[i] = await self._open(infos[i], context)
        return results

    async def _open(self, info: Any, context: Any) -> Any:
        spec = tensorstore_utils.build_array_read_spec(
            info,
            use_ocdbt=info.is_ocdbt_checkpoint,
            metadata_key=self._metadata_key,
            raise_array_data_missing_error=info.raise_array_data_missing_error,
        )
        return await ts.open(ts.Spec(spec.json), open=True, context=context)


def caching(context: Any = None) -> Any:
    """A context whose arrays together keep some decoded chunks: a record takes a part of one."""
    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}}, parent=context)


async def write_job(job: Job, directory: Any, leaves: Sequence[tuple[OffloadedLeaf, Any]]) -> None:
    """Streams all states of a checkpoint, their masters and the manifest.

    Args:
      job: the states.
      directory: of the checkpoint's item.
      leaves: those that Orbax has a place for, each with its TensorStore.
    """
    process = jax.process_index()
    folder = directory / manifest.FOLDER
    several = job.peers.count > 1
    exchanges = [Exchange(str(folder / f"exchange.{i}")) if several else None for i in range(len(job.saved))]
    entries, shared = [manifest.Entry(keys, manifest.FRESH, 0, {}) for keys in job.fresh], []
    for number, (saved, exchange) in enumerate(zip(job.saved, exchanges, strict=True)):
        targets: dict[Target, Any] = {(leaf.leaf, leaf.section): t for leaf, t in leaves if leaf.saved is saved}
        masters = {}
        for index in saved.binding.masters():
            name = f"{number}.{index}"
            shape, dtype = saved.binding.shapes[index], saved.binding.section_dtype(index, "master")
            chunk = written_shape(shape, saved.sharding(index, None), False)
            targets[index, "master"] = await _create_master(str(folder / name), shape, chunk, dtype)
            masters[index] = name
        await asyncio.to_thread(saved.write, targets, exchange)
        shared.append(targets)
        entries.append(_entry(saved, masters))
    for leaf, target in leaves:
        if leaf.saved is None:
            await asyncio.to_thread(_write_zero_leaf, leaf, target, process, job.deadline_s)
    if several:
        await asyncio.to_thread(job.peers.tell, "shares are put down")
        for saved, exchange, targets in zip(job.saved, exchanges, shared, strict=True):
            assert exchange is not None
            await asyncio.to_thread(saved.write_shared, targets, exchange)
        await asyncio.to_thread(job.peers.tell, "shards are written")
    if process == 0:
        for number in range(len(job.saved) if several else 0):
            (folder / f"exchange.{number}").rmtree(missing_ok=True)
        await asyncio.to_thread(manifest.write, directory, entries)


def _entry(saved: Saved, masters: Mapping[int, str]) -> manifest.Entry:
    binding = saved.binding
    named = {binding.leaves[i].path: name for i, name in masters.items() if i not in saved.without_masters}
    return manifest.Entry(saved.position.keys, identity_of(binding.key), saved.count, named)


def _write_zero_leaf(leaf: OffloadedLeaf, target: Any, process: int, deadline_s: float) -> None:
    """Writes a leaf of a state that no update has been made from."""
    writes = Writes(deadline_s)
    write_zeros(target, leaf.shape, shards_of(leaf.shape, leaf.sharding, process), writes)
    writes.finish()


def _zarr(path: str) -> dict[str, Any]:
    kvstore: Any = path if "://" in path else {"driver": "file", "path": path}
    return {"driver": "zarr", "kvstore": kvstore}


async def _create_master(path: str, shape: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    metadata = {"shape": shape, "chunks": chunk, "dtype": dtype.newbyteorder("<").str, "compressor": None}
    spec = {**_zarr(path), "metadata": metadata, "store_data_equal_to_fill_value": True}
    return await ts.open(spec, create=True, open=True)


def open_master(directory: Any, name: str, context: Any) -> Any:
    """The TensorStore of a leaf's masters.

    Args:
      directory: of the checkpoint's item.
      name: of the array.
      context: see ``caching``.

    Raises:
      ValueError: if it is not there.
    """
    spec = {**_zarr(str(directory / manifest.FOLDER / name)), "fill_missing_data_reads": False}
    return ts.open(spec, open=True, context=context).result()


def make_registry() -> Any:
    """Orbax's handlers of leaves, with ours for arrays."""
    handler = ArrayHandler()
    return create_type_handler_registry(
        (int, type_handlers.ScalarHandler()),
        (float, type_handlers.ScalarHandler()),
        (bytes, type_handlers.ScalarHandler()),
        (np.number, type_handlers.ScalarHandler()),
        (np.ndarray, type_handlers.NumpyHandler()),
        (jax.Array, handler),
        (OffloadedLeaf, handler),
        (str, type_handlers.StringHandler()),
        (type(type_handlers.PLACEHOLDER), type_handlers.PlaceholderHandler()),
    )
