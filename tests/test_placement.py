"""Which tier a record goes to: caps, shares, queues and devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_mlp_offload.placement import QUEUE, Placement, TierSpec

MB = 10**6


def tiers(*speeds, **settings):
    return Placement([TierSpec(f"t{i}", None, s, s, **settings) for i, s in enumerate(speeds)])


def write(placement, tier, size_bytes, start_s, end_s, ok=True):
    placement.write_begins(tier, size_bytes, start_s)
    placement.write_ends(tier, size_bytes, end_s, ok)


# -- caps


@given(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=5), st.integers(0, 500))
def test_caps_cover_the_phase(speeds, writes):
    placement = tiers(*speeds)
    placement.begin_phase(writes, 0.0)
    caps = [tier.cap for tier in placement.tiers]
    assert min(caps) >= 1, "a tier that gets nothing is never measured again"
    assert sum(caps) >= writes
    assert sum(caps) <= max(writes, 0) + len(caps)
    for cap, speed in zip(caps, speeds, strict=True):
        assert cap <= speed / sum(speeds) * writes + len(caps)


@pytest.mark.parametrize(
    ("speeds", "writes", "caps"),
    [
        ((400, 200), 24, [16, 8]),
        ((800, 100), 24, [22, 2]),  # what is rounded goes where it is done first
        ((1, 1), 5, [3, 2]),
        ((1000, 1), 10, [9, 1]),
        ((1, 1, 1), 1, [1, 1, 1]),
    ],
)
def test_caps(speeds, writes, caps):
    placement = tiers(*speeds)
    placement.begin_phase(writes, 0.0)
    assert [tier.cap for tier in placement.tiers] == caps


def test_retired_tier_leaves_its_share_to_the_others():
    placement = tiers(1, 1, 2)
    placement.begin_phase(8, 0.0)
    assert placement.retire(2) == ["t0", "t1"]
    assert [tier.cap for tier in placement.tiers] == [4, 4, 0]
    assert placement.retire(0) == ["t1"]
    assert placement.retire(1) == []
    placement.begin_phase(3, 0.0)
    assert placement.choose_write(1) is None
    assert not placement.can_write(1)


def test_more_writes_extend_the_phase():
    placement = tiers(1, 1)
    placement.begin_phase(4, 0.0)
    write(placement, 0, 10, 0.0, 1.0)
    placement.extend_phase(5)
    assert [(tier.cap, tier.taken) for tier in placement.tiers] == [(4, 0), (4, 0)]


# -- writes


def begin_all(placement, size_bytes=1):
    """Gives out writes until no tier pulls; returns how many each tier has in flight."""
    begun = [0] * len(placement.tiers)
    while (tier := placement.choose_write(size_bytes)) is not None:
        placement.write_begins(tier, size_bytes, 0.0)
        begun[tier] += 1
    return begun


def drain(placement, count, size_bytes=1):
    """Writes that each end before the next begins; returns how many each tier took."""
    taken = [0] * len(placement.tiers)
    for _ in range(count):
        tier = placement.choose_write(size_bytes)
        assert tier is not None
        write(placement, tier, size_bytes, 0.0, 0.0)
        taken[tier] += 1
    return taken


def test_shares_follow_the_speeds():
    placement = tiers(400, 200)
    placement.begin_phase(24, 0.0)
    assert drain(placement, 24) == [16, 8]
    assert drain(placement, 12) == [8, 4], "and go on so when more come than were expected"


def test_tier_pulls_while_its_queue_is_short():
    placement = tiers(1, 1)
    placement.begin_phase(20, 0.0)
    assert begin_all(placement) == [QUEUE, QUEUE]


def test_unknown_tiers_pull_freely_until_all_are_known():
    placement = Placement([TierSpec("fast"), TierSpec("slow")])
    placement.begin_phase(20, 0.0)
    assert begin_all(placement) == [QUEUE, QUEUE]
    for i in range(9):
        placement.write_ends(0, 1, i + 1.0, ok=True)
        assert placement.choose_write(1) == 0, "though it had more than half of the writes"
        placement.write_begins(0, 1, i + 1.0)
    placement = Placement([TierSpec("fast", None, 9, 9), TierSpec("slow")])
    placement.begin_phase(20, 0.0)
    placement.tell(1, 1, 1)
    assert [tier.cap for tier in placement.tiers] == [18, 2]
    assert drain(placement, 20) == [18, 2]


def test_long_queue():
    placement = Placement([TierSpec("a", None, 1, 1), TierSpec("b", None, 1, 1, queue=8), TierSpec("c", queue=1)])
    placement.begin_phase(100, 0.0)
    assert begin_all(placement) == [QUEUE, 8, 1], "of which none is told of slots"
    assert placement.depth == QUEUE + 8 + 1


@pytest.mark.parametrize(
    ("slots", "writes", "queue"),
    [
        (100, 1000, 16),
        (32, 1000, 14),  # half of the slots, less the other's queue
        (4, 1000, QUEUE),
        (100, 100, 5),  # a twentieth of the phase's writes
        (100, 10, QUEUE),
    ],
)
def test_long_queue_leaves_slots_to_the_others(slots, writes, queue):
    placement = Placement([TierSpec("a", None, 1, 1), TierSpec("b", None, 1, 1, queue=16)])
    placement.add_slots(slots)
    placement.begin_phase(writes, 0.0)
    assert begin_all(placement) == [QUEUE, queue]
    placement.retire(0)
    placement.extend_phase(10**6)
    assert placement.devices[1].queue == max(QUEUE, min(16, slots // 2)), "a tier that is retired needs none"


def test_slow_tier_does_not_take_more_than_its_share():
    placement = tiers(3, 1)
    placement.begin_phase(8, 0.0)
    for _ in range(2):
        write(placement, 1, 1, 0.0, 1.0)
    placement.write_begins(0, 1, 0.0)
    placement.write_begins(0, 1, 0.0)
    assert placement.choose_write(1) is None, "the fast one is busy, the slow one had its share"


def test_capacity():
    placement = Placement([TierSpec("a", capacity_bytes=25), TierSpec("b")])
    placement.begin_phase(8, 0.0)
    assert drain(placement, 8, 10) == [2, 6]
    placement.forget(0, 10)
    assert placement.tiers[0].has_room(10)
    assert not placement.tiers[0].has_room(20)
    placement.write_begins(0, 10, 0.0)
    placement.write_ends(0, 10, 1.0, ok=False)
    assert placement.tiers[0].files.stored_bytes == 10
    placement.read_begins(0, 10, 1.0)
    placement.read_ends(0, 10, 2.0, ok=True)
    assert placement.tiers[0].files.stored_bytes == 0


def test_full_tiers_do_not_block_the_others():
    placement = Placement([TierSpec("a", 0, 1000, 1000), TierSpec("b", None, 1, 1)])
    placement.begin_phase(10, 0.0)
    assert drain(placement, 10) == [0, 10]


# -- reads


def test_read_goes_where_most_is_left():
    placement = tiers(2, 1)
    assert placement.choose_read({0: 30, 1: 10}, {}) == 0
    assert placement.choose_read({0: 30, 1: 20}, {}) == 1
    assert placement.choose_read({1: 1}, {}) == 1
    assert placement.choose_read({}, {}) is None


def test_tier_that_would_idle_is_read_first():
    placement = tiers(2, 1)
    for _ in range(QUEUE):
        placement.read_begins(1, 10, 0.0)
    assert placement.choose_read({0: 1, 1: 1000}, {}) == 0
    assert placement.choose_read({1: 1000}, {}) == 1


def test_what_operations_wait_for_comes_before_what_they_will_want():
    placement = tiers(1, 1)
    assert placement.choose_read({0: 1}, {1: 1000}) == 0
    for _ in range(QUEUE):
        placement.read_begins(0, 10, 0.0)
    assert placement.choose_read({0: 1}, {1: 1000}) == 1
    for _ in range(QUEUE):
        placement.read_begins(1, 10, 0.0)
    assert placement.choose_read({0: 1}, {1: 1000}) == 0
    assert placement.choose_read({}, {1: 1000}) is None


def test_long_queue_does_not_let_others_idle():
    placement = Placement([TierSpec("a", None, 1, 1), TierSpec("b", None, 9, 9, queue=8)])
    placement.begin_phase(100, 0.0)
    for _ in range(QUEUE):
        placement.read_begins(1, 10, 0.0)
        placement.write_begins(1, 10, 0.0)
    for _ in range(5):
        write(placement, 0, 10, 0.0, 0.0)
    assert placement.choose_read({0: 1, 1: 1000}, {}) == 0
    assert placement.choose_write(10) == 0, "5 of its share at 1 B/s are left, of the other's 88 at 9 B/s"


# -- devices


def shared(queue=QUEUE, **settings):
    """Two tiers on one device of 400 B/s, and one on another of 200."""
    specs = [
        TierSpec("a", None, 400.0, 400.0, device="nvme0", queue=queue, **settings),
        TierSpec("b", None, 400.0, 400.0, device="nvme0", **settings),
        TierSpec("c", None, 200.0, 200.0),
    ]
    return Placement(specs)


def test_tiers_of_one_device_share_its_bandwidth():
    placement = shared()
    assert placement.speeds() == [200.0, 200.0, 200.0]
    placement.begin_phase(30, 0.0)
    assert [tier.cap for tier in placement.tiers] == [10, 10, 10]
    assert [tier.write_bps for tier in placement.tiers] == [200.0] * 3
    alone = Placement([TierSpec("a", None, 400.0, 400.0), TierSpec("b", None, 400.0, 400.0)])
    assert alone.speeds() == [400.0, 400.0], "tiers that name no device have one each"
    assert len(alone.devices) == 2


def test_tiers_of_one_device_share_its_queue():
    placement = shared()
    placement.begin_phase(30, 0.0)
    begun = begin_all(placement)
    assert begun[0] + begun[1] == QUEUE
    assert begun[2] == QUEUE
    placement = shared(queue=5)
    placement.begin_phase(30, 0.0)
    begun = begin_all(placement)
    assert begun[0] + begun[1] == 5
    assert placement.depth == 5 + QUEUE


def test_tiers_of_one_device_are_measured_as_one():
    placement = Placement([TierSpec("a", device=1), TierSpec("b", device=1)])
    placement.begin_phase(2, 0.0)
    for tier in (0, 1):
        placement.write_begins(tier, 100 * MB, 0.0)
    for tier in (0, 1):
        placement.write_ends(tier, 100 * MB, 1.0, ok=True)
    placement.end_phase(1.0)
    assert placement.devices[0].writes.bps == pytest.approx(200 * MB)
    assert [tier.written.bytes for tier in placement.tiers] == [100 * MB, 100 * MB], "what each moved is its own"
    assert [tier.written.mean_bps for tier in placement.tiers] == pytest.approx([100 * MB, 100 * MB])


def test_tier_of_a_device_that_fails_leaves_it_to_the_others():
    placement = shared()
    placement.begin_phase(30, 0.0)
    assert placement.retire(0) == ["b", "c"]
    assert placement.speeds()[1:] == [400.0, 200.0]
    assert [tier.cap for tier in placement.tiers] == [0, 20, 10]
    placement.retire(1)
    assert placement.speeds()[2] == 200.0
    assert placement.tiers[2].cap == 30


def test_request_without_answer_leaves_its_place_to_the_others():
    placement = shared()
    placement.begin_phase(30, 0.0)
    for _ in range(QUEUE):
        placement.write_begins(0, 10, 0.0)
    placement.retire(0)
    for _ in range(QUEUE):
        placement.abandon(0, 10, reading=False, now_s=100.0)
    assert begin_all(placement)[1] == QUEUE
    placement.write_ends(0, 10, 200.0, ok=True, abandoned=True)
    assert placement.choose_write(10) is None, "it counts no more when it ends after all"
    assert placement.devices[0].writes.bps == 400.0, "nor does the time that it took"
    assert placement.tiers[0].written.requests == 0


def test_device_with_most_left_is_read_first():
    placement = shared()
    for tier in range(2):
        placement.read_begins(tier, 10, 0.0)
        placement.read_begins(2, 10, 0.0)
    assert placement.choose_read({0: 100, 1: 90, 2: 100}, {}) == 2, "110 at 400 B/s and 120 at 200"
    assert placement.choose_read({0: 100, 1: 190, 2: 100}, {}) == 1, "310 at 400 B/s"
