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

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jax_mlp_offload import shardings
from jax_mlp_offload.binding import Binding
from jax_mlp_offload.capture import Capture
from jax_mlp_offload.division import Shard
from jax_mlp_offload.orbax.chunks import ranges_of
from jax_mlp_offload.orbax.exchange import Exchange
from jax_mlp_offload.orbax.records import Records
from jax_mlp_offload.orbax.writes import Writes, result_of, write_zeros
from jax_mlp_offload.peers import Peers, topic_of
from jax_mlp_offload.plan import SECTIONS
from jax_mlp_offload.positions import Keys, Position, find, nested, replace
from jax_mlp_offload.read import find_optimizer, initial_state, optax_state, ticket_of

_LEAST_DEADLINE_S = 600.0
Target = tuple[int, str]
"""A leaf's index, and a section."""

Gather = Callable[[Shard, int, int, Mapping[str, np.ndarray[Any, Any]]], None]
"""Puts elements of a shard into an array of zeros for each section."""


@dataclasses.dataclass(frozen=True, eq=False)
class OffloadedLeaf:
    """Stands in a tree where plain optax has an array.

    Attributes:
      shape: of the whole leaf.
      dtype: of the array in the checkpoint.
      sharding: as a param's.
      job: the checkpoint that it is for.
      saved: the state that it is of; None: it is zero.
      leaf: its index in that.
      section: ``"mu"`` or ``"nu"``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding
    job: Job
    saved: Saved | None = None
    leaf: int = 0
    section: str = ""

    @property
    def ndim(self) -> int:
        """Its dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in the checkpoint, before compression."""
        return self.size * self.dtype.itemsize


class Job:
    """Everything of a tree that is in stores, on its way into one checkpoint.

    Args:
      tree: with offloaded states anywhere.
      directory: of the checkpoint's item.
      asynchronous: whether training goes on while it is written.

    Raises:
      OffloadError: if a state cannot be read (it is not the last one, or its update failed).
      ValueError: if no open store holds it, or how it is divided cannot be told.
    """

    def __init__(self, tree: Any, directory: Any, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._setting_down: Future[None] | None = None
        self.deadline_s = _LEAST_DEADLINE_S  # the longest of the stores
        self.saved: list[Saved] = []
        self.started = False  # whether the leaves have come back from Orbax
        self.fresh: list[Keys] = []  # where states stand that no update has been made from
        self.peers = Peers(topic_of("save", directory), together=jax.process_count() > 1)
        try:
            places = [self._place(position) for position in find(tree)]
        except BaseException as error:
            self.fail(error)
            raise
        self.tree = replace(tree, places.__getitem__)

    def _place(self, position: Position) -> Any:
        """What plain optax would have there, with OffloadedLeafs in the place of moments."""
        state = position.state
        count, ticket = int(np.asarray(state.count)), ticket_of(state)
        if ticket == 0 and count == 0:
            self.fresh.append(position.keys)
            tree = jax.tree.map(lambda leaf: self._zero(leaf, state.count), initial_state())
        else:
            store, binding = find_optimizer(state)
            self.deadline_s = max(self.deadline_s, store.engine.deadline_s)
            saved = Saved(position, binding, count, store.engine.deadline_s)
            self.saved.append(saved)
            if ticket:
                saved.capture = store.engine.states.capture({binding.number: ticket})[binding.number]
            tree = optax_state(binding, state.count, lambda section: saved.leaves(self, section, state.count))
        tree = jax.tree.map(position.wrap, tree)
        return tree if position.named else nested(tree)

    def _zero(self, leaf: Any, count: Any) -> Any:
        """A leaf of a state that no update has been made from."""
        if leaf.ndim == 0 and np.issubdtype(leaf.dtype, np.integer):
            return count
        return OffloadedLeaf(leaf.shape, leaf.dtype, leaf.sharding or sharding_of(count), self)

    def start(self) -> None:
        """Begins to set down what the next updates would wait for, where tiers take a copy and training goes on.

        At once, whatever the checkpoint's storage does.
        """
        captures = [saved.capture for saved in self.saved if saved.capture is not None]
        if self.asynchronous and captures:
            thread = ThreadPoolExecutor(1, "jmo-set-down")
            self._setting_down = thread.submit(_set_down, captures)
            thread.shutdown(wait=False)

    def wait(self) -> None:
        """Waits for that.

        Raises:
          OffloadError: if a record could not be read.
        """
        if self._setting_down is not None:
            self._setting_down.result()

    def fail(self, error: BaseException) -> None:
        """Tells other processes that there will be no checkpoint, and closes."""
        self.peers.fail(error)
        self.close()

    def close(self) -> None:
        """Lets go of all records. Idempotent."""
        with contextlib.ExitStack() as stack:  # all of them, whatever one raises
            for saved in self.saved:
                if saved.capture is not None:
                    stack.callback(saved.capture.close)
            if self._setting_down is not None:
                concurrent.futures.wait([self._setting_down], self.deadline_s)


class Saved:
    """One optimizer's state on its way into a checkpoint.

    Args:
      position: in the tree.
      binding: the optimizer.
      count: updates so far.
      deadline_s: how long the checkpoint's storage may take for one chunk.
    """

    def __init__(self, position: Position, binding: Binding, count: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.position, self.binding, self.count = position, binding, count
        self.capture: Capture | None = None
        self.without_masters: set[int] = set()  # leaves whose params are the masters; known once they are written
        self.process = jax.process_index()
        self.division = binding.division()

    def leaves(self, job: Job, section: str, count: Any) -> list[OffloadedLeaf]:
        """What stands in the place of a section's moments."""
        return [
            OffloadedLeaf(
                shape,
                _as_optax(section, self.binding.section_dtype(leaf, section)),
                self.sharding(leaf, count),
                job,
                self,
                leaf,
                section,
            )
            for leaf, shape in enumerate(self.binding.shapes)
        ]

    def sharding(self, leaf: int, count: Any) -> jax.sharding.Sharding:
        """Of a leaf, as its param's."""
        layout = self.binding.layout
        if layout.mesh is None or not layout.specs:
            device = next((d for d in jax.local_devices() if shardings.ordinal(d) == layout.devices[0]), None)
            return jax.sharding.SingleDeviceSharding(device) if device is not None else sharding_of(count)
        entries = list(layout.specs[leaf])
        if jax.sharding.AxisType.Explicit not in layout.mesh.axis_types:  # as JAX writes it, and so Orbax
            while entries and entries[-1] is None:
                entries.pop()
        return jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec(*entries))

    # -- the stream

    def write(self, targets: Mapping[Target, Any], exchange: Exchange | None) -> None:
        """Writes all that this process has of the state, but for shards that are shared with others.

        Args:
          targets: the TensorStore of each leaf's section.
          exchange: where to put down shares of those; None: there are no other processes.

        Raises:
          errors.OffloadError: if a record cannot be read.
        """
        writes = Writes(self.deadline_s)
        written: set[int] = set()
        buckets = range(len(self.binding.plan.buckets))
        held = {key.bucket for key in list(self.capture.held)} if self.capture is not None else set()
        for bucket in sorted(buckets, key=lambda number: number not in held):
            records = Records(self.binding, self.division, self.capture, self.process, bucket)
            for shard in self.division.shards(bucket):
                written.add(shard.leaf)
                if self._is_shared(shard):
                    assert exchange is not None
                    self._put_down(shard, records, targets, exchange)
                elif self.owner(shard) == self.process:
                    self._write_shard(shard, records.gather, targets, writes)
            if records.without_masters:
                parts = self.binding.plan.buckets[bucket].leaves
                self.without_masters.update(leaf for part in parts for leaf in self.binding.parts[part].leaves)
            if self.capture is not None:
                self.capture.let_go(records.keys())
        for (leaf, _), target in targets.items():
            if leaf not in written:  # no record has anything of it
                write_zeros(target, self.binding.shapes[leaf], self._whole(leaf), writes)
        writes.finish()

    def write_shared(self, targets: Mapping[Target, Any], exchange: Exchange) -> None:
        """Writes shards that are shared with others, once all have put down what they have."""
        gather = functools.partial(exchange.get, timeout_s=self.deadline_s)
        writes = Writes(self.deadline_s)
        for bucket in range(len(self.binding.plan.buckets)):
            for shard in self.division.shards(bucket):
                if self._is_shared(shard) and self.owner(shard) == self.process:
                    self._write_shard(shard, gather, targets, writes)
        writes.finish()

    def _is_shared(self, shard: Shard) -> bool:
        """Whether another process than the one that writes the shard has a share of it."""
        return {self.division.holders[span.holder].process for span in shard.spans} != {self.owner(shard)}

    def _put_down(self, shard: Shard, records: Records, targets: Mapping[Target, Any], exchange: Exchange) -> None:
        for begin, end in ranges_of(shard, self.binding.shapes[shard.leaf]):
            arrays = self._arrays(shard, targets, end - begin)
            records.gather(shard, begin, end, arrays)
            puts = []
            for span in shard.spans:
                low, high = max(begin, span.begin), min(end, span.end)
                if low < high and self.division.holders[span.holder].process == self.process:
                    for section, array in arrays.items():
                        puts.append(exchange.put(shard, section, span, low, array[low - begin : high - begin]))
            for put in puts:
                result_of(put, self.deadline_s)

    def _arrays(self, shard: Shard, targets: Mapping[Target, Any], size: int) -> dict[str, np.ndarray[Any, Any]]:
        """Zeros for each section that is written of a shard's leaf."""
        sections = [section for section in SECTIONS if (shard.leaf, section) in targets]
        return {section: np.zeros(size, self.binding.section_dtype(shard.leaf, section)) for section in sections}

    def owner(self, shard: Shard) -> int:
        """The process that writes a shard: that of the first device which has it."""
        return next(h.process for h in self.division.holders if h.boxes[shard.leaf] == shard.box)

    def _whole(self, leaf: int) -> list[Shard]:
        boxes = dict.fromkeys(holder.boxes[leaf] for holder in self.division.holders)
        shards = [Shard(leaf, box, ()) for box in boxes]
        return [shard for shard in shards if self.owner(shard) == self.process]

    def _write_shard(self, shard: Shard, gather: Gather, targets: Mapping[Target, Any], writes: Writes) -> None:
        for begin, end in ranges_of(shard, self.binding.shapes[shard.leaf]):
            arrays = self._arrays(shard, targets, end - begin)
            gather(shard, begin, end, arrays)
            for section, array in arrays.items():
                writes.add(targets[shard.leaf, section], shard, begin, end, array)


def _set_down(captures: Sequence[Capture]) -> None:
    for capture in captures:
        capture.set_down()


def _as_optax(section: str, stored: np.dtype[Any]) -> np.dtype[Any]:
    """Plain optax has no ``nu_dtype``: its second moments are float32."""
    return np.dtype(np.float32) if section == "nu" and stored == ml_dtypes.bfloat16 else stored


def sharding_of(count: Any) -> jax.sharding.Sharding:
    """Where a state's count lies."""
    found = getattr(count, "sharding", None)
    return found if found is not None else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
