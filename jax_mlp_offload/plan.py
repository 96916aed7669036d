"""How leaves become buckets, subgroups and records.

1. Leaves are taken in tree order; consecutive ones of one dtype form a bucket until it holds a subgroup's worth. A
   bucket is one op in the compiled program. Processes that run one program agree on buckets: there these depend on the
   leaves only, and each process cuts them into subgroups of its own size.
2. A bucket is cut into equal subgroups of at most ``subgroup_elements``; only its last one may be shorter. A
   subgroup's record is one contiguous range of bytes ``[mu | nu | master or remainder | cells]``, padded to 4096.
3. Records of a bucket have one size. All slots of a store have one size, that of its largest record.

Everything here is per device: sizes are those of a device's shard. Pure; imports nothing of jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

PAGE_BYTES = 4096
SECTIONS = ("mu", "nu", "master")  # of a record, before its cells
CELL_ELEMENTS = 4096
_SECTION_BYTES = 64
MAX_SUBGROUP_ELEMENTS = 64 * 2**20
MIN_RECORD_BYTES = 2**20
_COMMON_BUCKETS = 64
_COMMON_LEAST_ELEMENTS = 2**17  # 1 MiB of moments


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSpec:
    """A leaf as the plan needs it: its name, the elements of one device's shard, its dtype, and whether it decays."""

    path: str
    elements: int
    dtype: str
    decay: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What a record holds for each element, in bytes (0: that section does not exist)."""

    mu_bytes: int
    nu_bytes: int
    master_bytes: int
    guarded: bool  # 16-bit params: a 4-byte hash for each cell

    @property
    def element_bytes(self) -> int:
        """Bytes of state an element, without hashes and padding."""
        return self.mu_bytes + self.nu_bytes + self.master_bytes

    def offsets(self, elements: int, cells: int) -> tuple[int, int, int, int, int]:
        """Byte offsets of mu, nu, master and cells, and the record's size, for a subgroup of ``elements``."""
        mu = 0
        nu = _round_up(mu + elements * self.mu_bytes, _SECTION_BYTES)
        master = _round_up(nu + elements * self.nu_bytes, _SECTION_BYTES)
        cells_at = _round_up(master + elements * self.master_bytes, _SECTION_BYTES)
        end = cells_at + (4 * cells if self.guarded else 0)
        return mu, nu, master, cells_at, _round_up(end, PAGE_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class BucketPlan:
    """One op: its leaves (indices into the plan's), its subgroups as (begin, count), and its record."""

    leaves: tuple[int, ...]
    subgroups: tuple[tuple[int, int], ...]
    layout: Layout
    mu_offset: int
    nu_offset: int
    master_offset: int
    cells_offset: int
    record_bytes: int

    def offset(self, section: str) -> int:
        """Where a section (mu, nu or master) begins in a record, in bytes."""
        return {"mu": self.mu_offset, "nu": self.nu_offset, "master": self.master_offset}[section]

    def has(self, section: str) -> bool:
        """Whether records have a section (mu, nu or master)."""
        layout = self.layout
        return {"mu": layout.mu_bytes, "nu": layout.nu_bytes, "master": layout.master_bytes}[section] > 0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All buckets of one optimizer on each of its devices."""

    leaves: tuple[LeafSpec, ...]
    buckets: tuple[BucketPlan, ...]

    @property
    def records(self) -> int:
        """Records on one device."""
        return sum(len(bucket.subgroups) for bucket in self.buckets)

    @property
    def state_bytes(self) -> int:
        """Bytes of all records on one device."""
        return sum(len(bucket.subgroups) * bucket.record_bytes for bucket in self.buckets)

    @property
    def largest_record_bytes(self) -> int:
        """The slot size this plan needs."""
        return max((bucket.record_bytes for bucket in self.buckets), default=PAGE_BYTES)

    def paths(self, bucket: int, subgroup: int) -> list[str]:
        """Names of the leaves that a subgroup covers, in part or whole."""
        plan = self.buckets[bucket]
        begin, count = plan.subgroups[subgroup]
        names, at = [], 0
        for index in plan.leaves:
            leaf = self.leaves[index]
            if at < begin + count and at + leaf.elements > begin:
                names.append(leaf.path)
            at += leaf.elements
        return names


def common_bucket_elements(leaves: Sequence[LeafSpec]) -> int:
    """A bucket's size that every process of a job comes to, whatever memory and tiers it has.

    They have to run one program, so the same ops. 64 of them leave the backward pass something to overlap with.
    """
    elements = sum(leaf.elements for leaf in leaves)
    return min(max(elements // _COMMON_BUCKETS, _COMMON_LEAST_ELEMENTS), MAX_SUBGROUP_ELEMENTS)


def make_plan(
    leaves: Sequence[LeafSpec],
    layouts: dict[str, Layout],
    subgroup_elements: int,
    slot_bytes: int | None = None,
    bucket_elements: int | None = None,
) -> Plan:
    """Cuts leaves into buckets and subgroups.

    Args:
      leaves: in tree order; leaves without elements take part in no bucket.
      layouts: a record's layout by the param's dtype.
      subgroup_elements: most elements of a subgroup; where a bucket is cut, rounded up to ``CELL_ELEMENTS``.
      slot_bytes: where slots exist already, the size that no record may exceed.
      bucket_elements: how many make up a bucket; None: as many as a subgroup has.

    Raises:
      ValueError: if ``subgroup_elements`` is not positive, or the smallest record is larger than a slot.
    """
    if subgroup_elements < 1:
        raise ValueError(f"subgroup_elements={subgroup_elements!r} must be 1 or more")
    open_buckets: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    closed: list[list[int]] = []
    for index, leaf in enumerate(leaves):
        if leaf.elements == 0:
            continue
        bucket = open_buckets.setdefault(leaf.dtype, [])
        if bucket and sizes[leaf.dtype] + leaf.elements > (bucket_elements or subgroup_elements):
            closed.append(bucket)
            bucket = open_buckets[leaf.dtype] = []
        sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.elements if bucket else leaf.elements
        bucket.append(index)
    closed.extend(bucket for bucket in open_buckets.values() if bucket)
    closed.sort(key=lambda bucket: bucket[0])
    buckets = [
        _cut(bucket, leaves, layouts[leaves[bucket[0]].dtype], subgroup_elements, slot_bytes) for bucket in closed
    ]
    return Plan(tuple(leaves), tuple(buckets))


def _cut(
    indices: list[int], leaves: Sequence[LeafSpec], layout: Layout, subgroup_elements: int, slot_bytes: int | None
) -> BucketPlan:
    sizes = [leaves[index].elements for index in indices]
    total = sum(sizes)
    number = -(-total // subgroup_elements)
    while True:
        # equal ranges on cell boundaries, so that a whole leaf's cells start where its subgroups do
        count = -(-total // number)
        if number > 1:
            count = _round_up(count, CELL_ELEMENTS)
        subgroups = tuple((begin, min(count, total - begin)) for begin in range(0, total, count))
        cells = max(_cells(sizes, begin, length) for begin, length in subgroups)
        mu, nu, master, cells_at, record_bytes = layout.offsets(min(count, total), cells)
        if slot_bytes is None or record_bytes <= slot_bytes:
            return BucketPlan(tuple(indices), subgroups, layout, mu, nu, master, cells_at, record_bytes)
        if count <= CELL_ELEMENTS:
            raise ValueError(
                f"a record of {count} elements takes {record_bytes} bytes, more than the store's slots of {slot_bytes}; "
                "give the optimizers of one store similar sizes, or each its own store"
            )
        number = max(number + 1, number * record_bytes // slot_bytes)


def _cells(sizes: Sequence[int], begin: int, count: int) -> int:
    """Hash cells of a subgroup: each leaf's part has its own."""
    cells, at = 0, 0
    for size in sizes:
        part = min(at + size, begin + count) - max(at, begin)
        if part > 0:
            cells += -(-part // CELL_ELEMENTS)
        at += size
    return cells


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
