"""Where the elements of leaves lie in records: which shard of a leaf, or which share of it, each device of a job keeps.

1. A *shard* is the box of a leaf that one device has, or several replicas have; it is taken flat, row by row.
2. Replicas keep one *share* each of what they have (``replicas.Part``), so a shard's elements are a chain of *spans*, each
   on one device, at a place in one bucket.
3. A record is a range of a bucket's elements, so it holds pieces of the spans that lie there.

This is all that a checkpoint needs to know: from spans it reads shards out of records, and fills records from shards.
Pure; imports nothing of jax beyond what describes layouts. Sizes are in elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jax_mlp_offload import shardings
from jax_mlp_offload.plan import Plan
from jax_mlp_offload.replicas import Part

Box = tuple[tuple[int, int], ...]
"""Start and size along each dimension of a leaf."""

_FEW = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """What one device of the job has.

    Attributes:
      process: whose it is.
      ordinal: the number by which that process knows it.
      replicas: by part, which share of it.
      boxes: by leaf, which part of the whole leaf.
    """

    process: int
    ordinal: int
    replicas: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[begin, end)`` of a flat shard, which lie in a bucket of one device from ``at`` on."""

    holder: int
    bucket: int
    at: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """A box of a leaf, and where its elements lie, in order.

    Attributes:
      leaf: index.
      box: of the leaf.
      spans: they follow each other, and cover it.
    """

    leaf: int
    box: Box
    spans: tuple[Span, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return tuple(size for _, size in self.box)

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[begin, end)`` of a flat shard, which lie in a record from element ``at`` on."""

    leaf: int
    box: Box
    begin: int
    end: int
    at: int


@dataclasses.dataclass(frozen=True)
class Division:
    """One optimizer's leaves on the devices of a job.

    Attributes:
      parts: the operands, as a plan counts them.
      buckets: the parts of each.
      holders: the devices, in the mesh's order.
    """

    parts: tuple[Part, ...]
    buckets: tuple[tuple[int, ...], ...]
    holders: tuple[Holder, ...]

    def spans(self, bucket: int, holder: int) -> Iterator[tuple[int, Span]]:
        """(leaf, span) of all that a bucket of a device holds, in order."""
        device, at = self.holders[holder], 0
        for number in self.buckets[bucket]:
            part = self.parts[number]
            first = device.replicas[number] * part.share
            offset = 0
            for leaf, size in zip(part.leaves, part.sizes, strict=True):
                low, high = max(offset, first), min(offset + size, first + part.share)
                if low < high:
                    yield leaf, Span(holder, bucket, at + low - first, low - offset, high - offset)
                offset += size
            at += part.share

    def shards(self, bucket: int) -> list[Shard]:
        """The shards of all leaves of a bucket, over the whole job."""
        found: dict[tuple[int, Box], list[Span]] = {}
        for holder, device in enumerate(self.holders):
            for leaf, span in self.spans(bucket, holder):
                found.setdefault((leaf, device.boxes[leaf]), []).append(span)
        return [
            Shard(leaf, box, tuple(sorted(spans, key=lambda span: span.begin))) for (leaf, box), spans in found.items()
        ]

    def pieces(self, bucket: int, holder: int, first: int, count: int) -> Iterator[Piece]:
        """What elements ``[first, first + count)`` of a bucket of a device are."""
        boxes = self.holders[holder].boxes
        for leaf, span in self.spans(bucket, holder):
            low, high = max(span.at, first), min(span.at + span.end - span.begin, first + count)
            if low < high:
                begin = span.begin + low - span.at
                yield Piece(leaf, boxes[leaf], begin, begin + high - low, low - first)

    def holder_of(self, process: int, ordinal: int) -> int:
        """A device of a process, by its index here."""
        return next(i for i, h in enumerate(self.holders) if (h.process, h.ordinal) == (process, ordinal))


def divide(
    layout: shardings.Layout, plan: Plan, parts: Sequence[Part], shapes: Sequence[tuple[int, ...]], process: int
) -> Division | None:
    """How an optimizer's leaves are divided over all devices of the job; None: that cannot be told.

    Args:
      layout: where the leaves lie.
      plan: of one device.
      parts: what the plan counts as leaves.
      shapes: of the whole leaves.
      process: the number of this one.
    """
    buckets = tuple(bucket.leaves for bucket in plan.buckets)
    if not layout.specs:
        if len(layout.devices) != 1 or layout.spans:
            return None
        whole = tuple(tuple((0, size) for size in shape) for shape in shapes)
        return Division(tuple(parts), buckets, (Holder(process, layout.devices[0], (0,) * len(parts), whole),))
    assert layout.mesh is not None
    mesh, names = layout.mesh, layout.mesh.axis_names
    boxes = [
        NamedSharding(mesh, spec).devices_indices_map(shape) for spec, shape in zip(layout.specs, shapes, strict=True)
    ]
    holders = []
    for place in np.ndindex(mesh.devices.shape):
        device: Any = mesh.devices[place]
        along = dict(zip(names, place, strict=True))
        replicas = tuple(_replica(part, along, layout.sizes) for part in parts)
        mine = tuple(box_of(index[device], shape) for index, shape in zip(boxes, shapes, strict=True))
        holders.append(Holder(device.process_index, shardings.ordinal(device), replicas, mine))
    return Division(tuple(parts), buckets, tuple(holders))


def _replica(part: Part, along: dict[str, int], sizes: Mapping[str, int]) -> int:
    """Which of a part's replicas is at this place, as ``lax.axis_index`` counts them."""
    number = 0
    for axis in part.axes:
        number = number * sizes[axis] + along[axis]
    return number


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """A part of a leaf, as JAX describes it."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple((start, stop - start) for start, stop in bounds)


def boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Cuts elements ``[begin, end)`` of a flat array into boxes that follow each other, as few as there can be."""
    if begin >= end:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = begin // row, -(-end // row)
    if (begin % row == 0 and end % row == 0) or row == 1:
        yield ((first, last - first), *((0, size) for size in shape[1:]))
        return
    if last - first == 1:
        for box in boxes_of(shape[1:], begin - first * row, end - first * row):
            yield ((first, 1), *box)
        return
    head, tail = -(-begin // row) * row, end // row * row
    yield from boxes_of(shape, begin, head)
    yield from boxes_of(shape, head, tail)
    yield from boxes_of(shape, tail, end)


def chunk_shape(shape: Sequence[int], whole: Sequence[int], most: int) -> tuple[int, ...]:
    """A shape of chunks whose elements follow each other in a flat shard.

    Args:
      shape: of the shard.
      whole: of the leaf: along a dimension that is sharded, a chunk has to divide the shard.
      most: elements that a chunk may have. A shard that hardly divides (a prime number of rows) may take some times as
        many, before it is cut into very small ones.
    """
    if math.prod(shape) <= most:
        return tuple(max(1, size) for size in shape)
    dimension = next(i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= most)
    size, row = shape[dimension], math.prod(shape[dimension + 1 :])
    rows = max(1, most // row)
    if size == whole[dimension]:
        part = rows  # the last chunk may be shorter
    else:
        divisors = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
        divisors += [size // n for n in reversed(divisors)]
        part = max(n for n in divisors if n <= rows)
        larger = min(n for n in divisors if n >= rows)
        if _FEW * part < rows and larger * row <= _FEW * most:
            part = larger
    return (*([1] * dimension), part, *shape[dimension + 1 :])


def chunk_ranges(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The flat ranges of a shard's chunks, of a shape as ``chunk_shape`` gives it, in order."""
    split = max((i for i, (size, part) in enumerate(zip(shape, chunk, strict=True)) if size != part), default=None)
    if split is None:
        yield 0, math.prod(shape)
        return
    row = math.prod(shape[split + 1 :])
    for outer in range(math.prod(shape[:split])):
        for first in range(0, shape[split], chunk[split]):
            begin = (outer * shape[split] + first) * row
            yield begin, begin + min(chunk[split], shape[split] - first) * row
