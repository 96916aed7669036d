"""How leaves become buckets, subgroups and records."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_mlp_offload.plan import (
    CELL_ELEMENTS,
    MAX_SUBGROUP_ELEMENTS,
    PAGE_BYTES,
    Layout,
    LeafSpec,
    common_bucket_elements,
    make_plan,
)

LAYOUTS = {
    "float32": Layout(4, 4, 0, guarded=False),
    "bfloat16": Layout(4, 4, 2, guarded=True),
    "float16": Layout(2, 4, 4, guarded=True),
    "sgd": Layout(0, 0, 0, guarded=False),
}

sizes = st.one_of(
    st.integers(0, 40), st.sampled_from([CELL_ELEMENTS - 1, CELL_ELEMENTS, CELL_ELEMENTS + 1]), st.integers(0, 100_000)
)
trees = st.lists(st.tuples(sizes, st.sampled_from(sorted(LAYOUTS))), max_size=12)
limits = st.one_of(st.integers(1, 50_000), st.sampled_from([CELL_ELEMENTS, 4 * CELL_ELEMENTS, 2**26]))


def plan_of(tree, limit, slot_bytes=None):
    leaves = [LeafSpec(f"leaf{i}", size, dtype) for i, (size, dtype) in enumerate(tree)]
    return make_plan(leaves, LAYOUTS, limit, slot_bytes)


def round_up(value, multiple):
    return -(-value // multiple) * multiple


@given(trees, limits)
def test_every_leaf_is_in_one_bucket_in_order(tree, limit):
    plan = plan_of(tree, limit)
    taken = [index for bucket in plan.buckets for index in bucket.leaves]
    assert sorted(taken) == [i for i, (size, _) in enumerate(tree) if size]
    for bucket in plan.buckets:
        assert list(bucket.leaves) == sorted(bucket.leaves)
        assert len({tree[i][1] for i in bucket.leaves}) == 1
    firsts = [bucket.leaves[0] for bucket in plan.buckets]
    assert firsts == sorted(firsts)


@given(trees, limits)
def test_buckets_hold_about_a_subgroup(tree, limit):
    plan = plan_of(tree, limit)
    for dtype in LAYOUTS:
        totals = [sum(tree[i][0] for i in b.leaves) for b in plan.buckets if tree[b.leaves[0]][1] == dtype]
        for bucket in plan.buckets:
            if len(bucket.leaves) > 1:
                assert sum(tree[i][0] for i in bucket.leaves) <= limit
        following = [tree[b.leaves[0]][0] for b in plan.buckets if tree[b.leaves[0]][1] == dtype][1:]
        for total, first in zip(totals, following, strict=False):
            assert total + first > limit, "two buckets that would fit in one"


@given(trees, limits)
def test_subgroups_cover_a_bucket_once_and_are_equal(tree, limit):
    for bucket in plan_of(tree, limit).buckets:
        total = sum(tree[i][0] for i in bucket.leaves)
        at = 0
        for begin, count in bucket.subgroups:
            assert begin == at
            assert count > 0
            at += count
        assert at == total
        counts = [count for _, count in bucket.subgroups]
        assert len(set(counts[:-1])) <= 1
        assert counts[-1] <= counts[0] <= round_up(limit, CELL_ELEMENTS)
        if len(counts) > 1:
            assert counts[0] % CELL_ELEMENTS == 0


def cells_of(tree, bucket, begin, count):
    """One cell for every 4096 elements of each leaf's part, counted element by element where parts begin and end."""
    cells = 0
    ends = list(itertools.accumulate(tree[i][0] for i in bucket.leaves))
    for first, end in zip([0, *ends], ends, strict=False):
        part = range(max(first, begin), min(end, begin + count))
        cells += len(part[::CELL_ELEMENTS])
    return cells


@given(trees, limits)
def test_sections_do_not_overlap(tree, limit):
    for bucket in plan_of(tree, limit).buckets:
        layout = bucket.layout
        elements = max(count for _, count in bucket.subgroups)
        cells = max(cells_of(tree, bucket, begin, count) for begin, count in bucket.subgroups)
        sections = [
            (bucket.mu_offset, elements * layout.mu_bytes),
            (bucket.nu_offset, elements * layout.nu_bytes),
            (bucket.master_offset, elements * layout.master_bytes),
            (bucket.cells_offset, 4 * cells if layout.guarded else 0),
        ]
        at = 0
        for offset, size in sections:
            assert offset % 64 == 0
            assert offset >= at
            at = offset + size
        assert at <= bucket.record_bytes
        assert bucket.record_bytes % PAGE_BYTES == 0
        assert bucket.record_bytes < at + PAGE_BYTES + 4 * 64


@given(trees, limits, st.integers(1, 60))
def test_slots_bound_the_records(tree, limit, pages):
    slot_bytes = pages * PAGE_BYTES
    if slot_bytes < max(layout.offsets(CELL_ELEMENTS, 64)[4] for layout in LAYOUTS.values()):
        slot_bytes = None  # a record of one cell might not fit
    plan = plan_of(tree, limit, slot_bytes)
    assert slot_bytes is None or all(bucket.record_bytes <= slot_bytes for bucket in plan.buckets)
    for bucket in plan.buckets:
        assert sum(count for _, count in bucket.subgroups) == sum(tree[i][0] for i in bucket.leaves)


def test_slots_smaller_than_a_cell_are_refused():
    with pytest.raises(ValueError, match="more than the store's slots of 4096"):
        plan_of([(CELL_ELEMENTS, "float32")], 2**26, 4096)


def test_small_slots_for_a_large_leaf_are_found_quickly():
    plan = plan_of([(2**31 + 3, "bfloat16")], 2**26, 2**20)
    (bucket,) = plan.buckets
    assert bucket.record_bytes <= 2**20
    assert bucket.record_bytes > 0.9 * 2**20
    assert sum(count for _, count in bucket.subgroups) == 2**31 + 3


@given(trees, limits)
def test_paths(tree, limit):
    plan = plan_of(tree, limit)
    for number, bucket in enumerate(plan.buckets):
        owners = [i for i in bucket.leaves for _ in range(tree[i][0])]
        for subgroup, (begin, count) in enumerate(bucket.subgroups):
            covered = [f"leaf{i}" for i in sorted(set(owners[begin : begin + count]))]
            assert plan.paths(number, subgroup) == covered


def test_totals():
    plan = plan_of([(5000, "float32"), (9000, "bfloat16")], 4096)
    assert plan.records == 2 + 3
    assert plan.state_bytes == sum(len(b.subgroups) * b.record_bytes for b in plan.buckets)
    assert plan.largest_record_bytes == max(b.record_bytes for b in plan.buckets)
    assert plan_of([], 10).buckets == ()
    assert plan_of([(0, "float32")], 10).records == 0
    assert plan_of([], 10).largest_record_bytes == PAGE_BYTES


def test_bytes_an_element():
    plan = plan_of([(2**22, "bfloat16")], 2**26)
    assert plan.state_bytes / 2**22 == pytest.approx(10, rel=1e-3), "design section 1: the byte account"
    assert plan_of([(2**22, "float32")], 2**26).state_bytes == 8 * 2**22


@pytest.mark.parametrize("limit", [0, -1])
def test_no_subgroup(limit):
    with pytest.raises(ValueError, match="subgroup_elements"):
        plan_of([(10, "float32")], limit)


@given(trees, limits, limits, st.integers(CELL_ELEMENTS, 50_000))
def test_processes_with_other_memory_have_the_same_buckets(tree, one, other, common):
    leaves = [LeafSpec(f"leaf{i}", size, dtype) for i, (size, dtype) in enumerate(tree)]
    plans = [make_plan(leaves, LAYOUTS, limit, bucket_elements=common) for limit in (one, other)]
    assert [bucket.leaves for bucket in plans[0].buckets] == [bucket.leaves for bucket in plans[1].buckets]
    for plan, limit in zip(plans, (one, other), strict=True):
        for bucket in plan.buckets:
            assert max(count for _, count in bucket.subgroups) <= max(round_up(limit, CELL_ELEMENTS), 1)


def test_common_buckets_are_a_64th_of_the_leaves_within_bounds():
    def of(*sizes):
        return common_bucket_elements([LeafSpec("w", size, "float32") for size in sizes])

    assert of(64 * 2**20, 64 * 2**20) == 2 * 2**20
    assert of(1000) == 2**17
    assert of(2**40) == MAX_SUBGROUP_ELEMENTS
