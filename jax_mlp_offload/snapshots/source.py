"""Whole leaves, read from the records of a snapshot.

1. Where an optimizer is planned and divided as it was, records are read as they are (``copy``).
2. Else a section of a leaf is a :class:`Source`: a box of it is put together from the shards, the shards from spans of
   records. So a snapshot can be restored on another mesh, in other processes, with other subgroups.

What always holds: a record's CRC32C is compared, once, before any of its bytes is used.
Thread contract: any thread, several at once.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jax_mlp_offload import native
from jax_mlp_offload.binding import Binding
from jax_mlp_offload.capture import Key
from jax_mlp_offload.division import Division, Shard
from jax_mlp_offload.errors import CorruptRecordError
from jax_mlp_offload.filling import Arrays
from jax_mlp_offload.snapshots.manifest import Bucket, Optimizer, Snapshot, optimizer_folder, record_name

_ENCLOSING_ELEMENTS = 2**18  # so many are read at once although not all are wanted
_CELL_BYTES = 4
Bytes = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What one process has of an optimizer."""

    folder: pathlib.Path
    optimizer: Optimizer


class Records:
    """One optimizer's records, over all processes of a snapshot.

    Args:
      snapshot: as read.
      identity: the optimizer's.
    """

    def __init__(self, snapshot: Snapshot, identity: str) -> None:
        self._parts = {
            process: _Part(optimizer_folder(snapshot.path, process, number), optimizer)
            for process, optimizers in snapshot.processes.items()
            for number, optimizer in enumerate(optimizers)
            if optimizer.identity == identity
        }
        mine = jax.process_index()
        if not self.optimizer.spans and len(self._parts) > 1:
            # each process has one of its own by that name
            one = mine if mine in self._parts else min(self._parts)
            self._parts = {one: self._parts[one]}
        self._verified: set[pathlib.Path] = set()
        self._lock = threading.Lock()
        self._buffer = np.empty(0, np.uint8)  # for what is verified; the lock's

    @property
    def optimizer(self) -> Optimizer:
        """What the first of its processes says of it."""
        return self._parts[min(self._parts)].optimizer

    @property
    def division(self) -> Division:
        """How it is divided over the snapshot's devices."""
        return self.optimizer.division()

    @property
    def empty(self) -> bool:
        """Whether no record has anything: the state is a fresh one."""
        return all(
            crc is None for part in self._parts.values() for row in part.optimizer.records.values() for crc in row
        )

    def bucket(self, process: int, number: int) -> Bucket:
        """A bucket, as a process cuts it."""
        return self._parts[process].optimizer.buckets[number]

    # -- as they are

    def fit(self, binding: Binding) -> bool:
        """Whether an optimizer has the same records in this process."""
        part = self._parts.get(jax.process_index())
        return (
            part is not None
            and part.optimizer.buckets == tuple(Bucket.of(binding, i) for i in range(len(binding.plan.buckets)))
            and self.division == binding.division()
        )

    def copy(self, key: Key, target: Bytes) -> None:
        """Fills in a record of an optimizer that they fit.

        Raises:
          errors.CorruptRecordError: if it cannot be read as it was written.
        """
        part = self._parts[jax.process_index()]
        crc = part.optimizer.records[key.bucket, key.device][key.subgroup]
        if crc is not None:
            _read(part, part.folder / record_name(*key), target, crc)
            return
        target[:] = 0
        if (cells := part.optimizer.buckets[key.bucket].cells) is not None:
            target[cells:].view(np.uint32)[:] = native.CELL_WITHOUT_MASTERS

    # -- in pieces

    def gather(self, process: int, key: Key, offset: int, target: Bytes) -> None:
        """Copies bytes of a record, from ``offset`` on; zeros if it has nothing.

        Raises:
          errors.CorruptRecordError: if it cannot be read as it was written.
        """
        part = self._parts[process]
        crc = part.optimizer.records[key.bucket, key.device][key.subgroup]
        if crc is None:
            target[:] = 0
            return
        path = part.folder / record_name(*key)
        with self._lock:
            if path not in self._verified:
                size = part.optimizer.buckets[key.bucket].record_bytes
                if self._buffer.size < size:
                    self._buffer = np.empty(size, np.uint8)
                _read(part, path, self._buffer[:size], crc, direct=False)  # the pages are wanted again
                self._verified.add(path)
        _read_range(part, path, offset, target)

    def lack_masters(self, bucket: int) -> bool:
        """Whether some record of a bucket says that it has no masters, as one that was loaded without them does."""
        first = np.empty(_CELL_BYTES, np.uint8)
        for part in self._parts.values():
            cells = part.optimizer.buckets[bucket].cells
            if cells is None:
                return False
            for (number, device), row in part.optimizer.records.items():
                for subgroup, crc in enumerate(row if number == bucket else ()):
                    if crc is None:
                        return True
                    _read_range(part, part.folder / record_name(bucket, device, subgroup), cells, first)
                    if first.view(np.uint32)[0] == native.CELL_WITHOUT_MASTERS:
                        return True
        return False


def _read(part: _Part, path: pathlib.Path, target: Bytes, crc: int, direct: bool = True) -> None:
    try:
        native.read_file(str(path), target, crc, direct)
    except RuntimeError as error:
        raise _corrupt(part, str(error)) from error


def _read_range(part: _Part, path: pathlib.Path, offset: int, target: Bytes) -> None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < target.size:
                count = os.preadv(file, [target[done:].data], offset + done)
                if count == 0:
                    raise _corrupt(part, f"read of {path}: the file ends at {offset + done} bytes")
                done += count
        finally:
            os.close(file)
    except OSError as error:
        raise _corrupt(part, f"read of {path}: {error.strerror}") from error


def _corrupt(part: _Part, what: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"{what}; optimizer {part.optimizer.name!r}: the snapshot is damaged, restore another one (until then this "
        "optimizer can only start afresh)"
    )


class _Elements:
    """A part of a leaf that was read; as the future of a TensorStore."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def read(self) -> _Elements:
        return self

    def result(self, timeout_s: float | None = None) -> np.ndarray[Any, Any]:
        return self._array


class Section:
    """A section of a whole leaf: a :class:`Source`.

    Args:
      records: of the optimizer.
      bucket: that the leaf is in.
      shards: of the leaf.
      name: of the section.
      dtype: of its elements.
    """

    def __init__(self, records: Records, bucket: int, shards: list[Shard], name: str, dtype: np.dtype[Any]) -> None:
        self._records, self._bucket, self._shards, self._name = records, bucket, shards, name
        self._holders = records.division.holders
        self.dtype = dtype

    def __getitem__(self, index: tuple[slice, ...]) -> _Elements:
        """A part, which is read at once."""
        whole = np.empty([part.stop - part.start for part in index], self.dtype)
        for shard in self._shards:
            lows = [max(part.start, start) for part, (start, _) in zip(index, shard.box, strict=True)]
            highs = [min(part.stop, start + size) for part, (start, size) in zip(index, shard.box, strict=True)]
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                inside = tuple(slice(a - p.start, b - p.start) for a, b, p in zip(lows, highs, index, strict=True))
                target = whole[inside] if inside else whole  # a view, also of a scalar
                self._read_box(shard, [low - start for low, (start, _) in zip(lows, shard.box, strict=True)], target)
        return _Elements(whole)

    def _read_box(self, shard: Shard, begin: list[int], target: np.ndarray[Any, Any]) -> None:
        """Fills ``target`` with the box of a shard that begins there."""
        strides = [math.prod(shard.shape[i + 1 :]) for i in range(len(shard.shape))]
        first = sum(at * stride for at, stride in zip(begin, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(target.shape, strides, strict=True))
        if last - first + 1 > max(target.size, _ENCLOSING_ELEMENTS):
            split = next(i for i, size in enumerate(target.shape) if size > 1)
            half = target.shape[split] // 2
            at = (slice(None),) * split
            self._read_box(shard, begin, target[(*at, slice(None, half))])
            begin = [b + half if i == split else b for i, b in enumerate(begin)]
            self._read_box(shard, begin, target[(*at, slice(half, None))])
            return
        flat = np.empty(last - first + 1, self.dtype)
        self._read_run(shard, first, flat)
        steps = [stride * flat.itemsize for stride in strides]
        target[...] = np.lib.stride_tricks.as_strided(flat, target.shape, steps)

    def _read_run(self, shard: Shard, begin: int, flat: np.ndarray[Any, Any]) -> None:
        """Fills ``flat`` with the elements of a flat shard that begin there."""
        end = begin + flat.size
        for span in shard.spans:
            low, high = max(begin, span.begin), min(end, span.end)
            if low >= high:
                continue
            holder = self._holders[span.holder]
            bucket = self._records.bucket(holder.process, self._bucket)
            offset = next(at for name, at, _ in bucket.sections if name == self._name)
            size = bucket.subgroups[0][1]  # of all but the last
            at = span.at - span.begin  # from places in the shard to those in the bucket
            for subgroup in range((low + at) // size, -(-(high + at) // size)):
                first, count = bucket.subgroups[subgroup]
                start, stop = max(low + at, first), min(high + at, first + count)
                self._records.gather(
                    holder.process,
                    Key(self._bucket, holder.ordinal, subgroup),
                    offset + (start - first) * flat.itemsize,
                    flat[start - at - begin : stop - at - begin].view(np.uint8),
                )


def sections(records: Records) -> Arrays:
    """The source of each (leaf, section) of an optimizer; leaves whose records lack masters have none."""
    division = records.division
    found: dict[tuple[int, str], Section] = {}
    for number, bucket in enumerate(records.optimizer.buckets):
        by_leaf: dict[int, list[Shard]] = {}
        for shard in division.shards(number):
            by_leaf.setdefault(shard.leaf, []).append(shard)
        without = records.lack_masters(number)
        for name, _, dtype in bucket.sections:
            if name == "master" and without:
                continue
            for leaf, shards in by_leaf.items():
                found[leaf, name] = Section(records, number, shards, name, _dtype(dtype))
    return found


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
