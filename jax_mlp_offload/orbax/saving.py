"""Streaming offloaded states into a checkpoint, record by record, while training may go on.

1. ``Job`` takes hold of the records of all states at one moment (``capture``), and tells what stands in their place in the
   tree: :class:`OffloadedLeaf`.
2. Once Orbax has a place for every leaf, buckets are written one after another, those whose records are held first:
   each record is read once, its sections go into the open chunks of their leaves, and whole chunks go to TensorStore.
3. What the params lack of float32 masters goes into arrays of its own, beside the tree (``manifest``).

What always holds: memory is bounded by one record, a chunk of each section and ``IN_FLIGHT_BYTES``.
Thread contract: made on the user's thread; ``write`` and ``close`` on any one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jax_mlp_offload import shardings
from jax_mlp_offload.binding import Binding
from jax_mlp_offload.capture import Capture, Key
from jax_mlp_offload.division import Shard, boxes_of
from jax_mlp_offload.orbax.leaves import OffloadedLeaf, ranges_of, shards_of
from jax_mlp_offload.plan import SECTIONS
from jax_mlp_offload.positions import Position, find, nested, replace
from jax_mlp_offload.read import find_optimizer, initial_state, optax_state, ticket_of

IN_FLIGHT_BYTES = 32 * 2**20  # that TensorStore may still have to write
_CACHE_BYTES = 32 * 2**20
Target = tuple[int, str]
"""A leaf's index, and a section."""


class Job:
    """Everything of a tree that is in stores, on its way into one checkpoint.

    Args:
      tree: with offloaded states anywhere.

    Raises:
      OffloadError: if a state cannot be read (it is not the last one, or its update failed).
      ValueError: if no open store holds it, or how it is divided cannot be told.
    """

    def __init__(self, tree: Any) -> None:
        self.saved: list[Saved] = []
        self.started = False  # whether the leaves have come back from Orbax
        try:
            places = [self._place(position) for position in find(tree)]
        except BaseException:
            self.close()
            raise
        self.tree = replace(tree, places.__getitem__)

    def _place(self, position: Position) -> Any:
        """What plain optax would have there, with OffloadedLeafs in the place of moments."""
        state = position.state
        count, ticket = int(np.asarray(state.count)), ticket_of(state)
        if ticket == 0 and count == 0:
            tree = jax.tree.map(lambda leaf: self._zero(leaf, state.count), initial_state())
        else:
            store, binding = find_optimizer(state)
            saved = Saved(position, binding, count)
            if ticket:
                saved.capture = store.engine.capture({binding.number: ticket})[binding.number]
            self.saved.append(saved)
            tree = optax_state(binding, state.count, lambda section: saved.leaves(self, section, state.count))
        tree = jax.tree.map(position.wrap, tree)
        return tree if position.named else nested(tree)

    def _zero(self, leaf: Any, count: Any) -> Any:
        """A leaf of a state that no update has been made from."""
        if leaf.ndim == 0 and np.issubdtype(leaf.dtype, np.integer):
            return count
        return OffloadedLeaf(leaf.shape, leaf.dtype, leaf.sharding or _sharding_of(count), self)

    def close(self) -> None:
        """Lets go of all records. Idempotent."""
        for saved in self.saved:
            if saved.capture is not None:
                saved.capture.close()


class Saved:
    """One optimizer's state on its way into a checkpoint.

    Args:
      position: in the tree.
      binding: the optimizer.
      count: updates so far.
    """

    def __init__(self, position: Position, binding: Binding, count: int) -> None:
        self.position, self.binding, self.count = position, binding, count
        self.capture: Capture | None = None
        self.process = jax.process_index()
        self.division = binding.division()

    def leaves(self, job: Job, section: str, count: Any) -> list[OffloadedLeaf]:
        """What stands in the place of a section's moments."""
        return [
            OffloadedLeaf(
                shape,
                _as_optax(section, self.dtype(leaf, section)),
                self.sharding(leaf, count),
                job,
                self,
                leaf,
                section,
            )
            for leaf, shape in enumerate(self.binding.shapes)
        ]

    def dtype(self, leaf: int, section: str) -> np.dtype[Any]:
        """Of a section in the records."""
        return self.binding.section_dtype(leaf, section)

    def sharding(self, leaf: int, count: Any) -> jax.sharding.Sharding:
        """Of a leaf, as its param's."""
        layout = self.binding.layout
        if layout.mesh is None or not layout.specs:
            device = next((d for d in jax.local_devices() if shardings.ordinal(d) == layout.devices[0]), None)
            return jax.sharding.SingleDeviceSharding(device) if device is not None else _sharding_of(count)
        return jax.sharding.NamedSharding(layout.mesh, layout.specs[leaf])

    # -- the stream

    def write(self, targets: Mapping[Target, Any]) -> None:
        """Writes all that this process has of the state.

        Args:
          targets: the TensorStore of each leaf's section.

        Raises:
          errors.OffloadError: if a record cannot be read.
        """
        writes = Writes()
        written: set[int] = set()
        buckets = range(len(self.binding.plan.buckets))
        held = {key.bucket for key in self.capture.held} if self.capture is not None else set()
        for bucket in sorted(buckets, key=lambda number: number not in held):
            records = _Records(self, bucket)
            for shard in self.division.shards(bucket):
                written.add(shard.leaf)
                if self.owner(shard) == self.process:
                    self._write_shard(shard, records, targets, writes)
            if self.capture is not None:
                self.capture.let_go(records.keys())
        for (leaf, _), target in targets.items():
            if leaf not in written:  # no record has anything of it
                write_zeros(target, self.binding.shapes[leaf], self._whole(leaf), writes)
        writes.finish()

    def owner(self, shard: Shard) -> int:
        """The process that writes a shard: that of the first device which has it."""
        return next(h.process for h in self.division.holders if h.boxes[shard.leaf] == shard.box)

    def _whole(self, leaf: int) -> list[Shard]:
        boxes = dict.fromkeys(holder.boxes[leaf] for holder in self.division.holders)
        shards = [Shard(leaf, box, ()) for box in boxes]
        return [shard for shard in shards if self.owner(shard) == self.process]

    def _write_shard(self, shard: Shard, records: _Records, targets: Mapping[Target, Any], writes: Writes) -> None:
        sections = {
            section: target for section in SECTIONS if (target := targets.get((shard.leaf, section))) is not None
        }
        for begin, end in ranges_of(shard, self.binding.shapes[shard.leaf]):
            arrays = {section: np.zeros(end - begin, self.dtype(shard.leaf, section)) for section in sections}
            records.gather(shard, begin, end, arrays)
            for section, target in sections.items():
                writes.add(target, shard, begin, end, arrays[section])


class _Records:
    """The records of one bucket, read as they are asked for.

    Args:
      saved: the state.
      bucket: number.
    """

    def __init__(self, saved: Saved, bucket: int) -> None:
        self._saved, self._bucket = saved, bucket
        self._plan = saved.binding.plan.buckets[bucket]
        self._most = max(1, _CACHE_BYTES // self._plan.record_bytes)
        self._read: OrderedDict[Key, np.ndarray[Any, Any] | None] = OrderedDict()

    def keys(self) -> Iterator[Key]:
        """All of them."""
        for device in self._saved.binding.layout.devices:
            for subgroup in range(len(self._plan.subgroups)):
                yield Key(self._bucket, device, subgroup)

    def gather(self, shard: Shard, begin: int, end: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Puts elements ``[begin, end)`` of a shard into an array for each section (which holds zeros)."""
        for span in shard.spans:
            low, high = max(begin, span.begin), min(end, span.end)
            if low >= high:
                continue
            ordinal = self._saved.division.holders[span.holder].ordinal
            size = self._plan.subgroups[0][1]  # of all but the last
            at = span.at - span.begin  # from places in the shard to those in the bucket
            for subgroup in range((low + at) // size, -(-(high + at) // size)):
                first, count = self._plan.subgroups[subgroup]
                shift = at - first
                start, stop = max(low + shift, 0), min(high + shift, count)
                record = self._get(Key(self._bucket, ordinal, subgroup))
                if record is None:
                    continue
                for section, array in arrays.items():
                    offset = self._plan.offset(section) + start * array.itemsize
                    part = record[offset : offset + (stop - start) * array.itemsize].view(array.dtype)
                    array[start - shift - begin : stop - shift - begin] = part

    def _get(self, key: Key) -> np.ndarray[Any, Any] | None:
        if key not in self._read:
            target = self._read.popitem(last=False)[1] if len(self._read) >= self._most else None
            capture = self._saved.capture
            if capture is None or not capture.has(key):
                self._read[key] = None
            else:
                target = np.empty(self._plan.record_bytes, np.uint8) if target is None else target
                capture.read(key, target)
                self._read[key] = target
        return self._read[key]


class Writes:
    """Writes that TensorStore has not ended yet."""

    def __init__(self) -> None:
        self._open: deque[tuple[Any, int]] = deque()
        self._bytes = 0

    def add(self, target: Any, shard: Shard, begin: int, end: int, array: np.ndarray[Any, Any]) -> None:
        """Writes elements ``[begin, end)`` of a shard; waits until there is room for it."""
        for box in boxes_of(shard.shape, begin, end):
            index = tuple(slice(o + s, o + s + n) for (o, _), (s, n) in zip(shard.box, box, strict=True))
            shape = tuple(size for _, size in box)
            values = array.reshape(shape).astype(target.dtype.numpy_dtype, copy=False)
            self._open.append((target[index].write(values, can_reference_source_data_indefinitely=True), values.nbytes))
            self._bytes += values.nbytes
        while self._bytes > IN_FLIGHT_BYTES:
            self._end_one()

    def finish(self) -> None:
        """Waits for all."""
        while self._open:
            self._end_one()

    def _end_one(self) -> None:
        write, size_bytes = self._open.popleft()
        write.result()
        self._bytes -= size_bytes


def write_zeros(target: Any, whole: tuple[int, ...], shards: Sequence[Shard], writes: Writes) -> None:
    """Writes shards of which no record has anything."""
    for shard in shards:
        for begin, end in ranges_of(shard, whole):
            writes.add(target, shard, begin, end, np.zeros(end - begin, target.dtype.numpy_dtype))


def write_zero_leaf(leaf: OffloadedLeaf, target: Any, process: int) -> None:
    """Writes a leaf of a state that no update has been made from."""
    writes = Writes()
    write_zeros(target, leaf.shape, shards_of(leaf, process), writes)
    writes.finish()


def _as_optax(section: str, stored: np.dtype[Any]) -> np.dtype[Any]:
    """Plain optax has no ``nu_dtype``: its second moments are float32."""
    return np.dtype(np.float32) if section == "nu" and stored == ml_dtypes.bfloat16 else stored


def _sharding_of(count: Any) -> jax.sharding.Sharding:
    found = getattr(count, "sharding", None)
    return found if found is not None else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
