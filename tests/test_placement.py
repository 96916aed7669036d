"""Which tier a record goes to, and how fast each tier is found to be."""

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
    chosen = []
    while (tier := placement.choose_write(1)) is not None:
        chosen.append(tier)
        placement.write_begins(tier, 1, 0.0)
    assert sorted(chosen) == [0] * QUEUE + [1] * QUEUE


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
    assert placement.tiers[0].stored_bytes == 10
    placement.read_begins(0, 10, 1.0)
    placement.read_ends(0, 10, 2.0, ok=True)
    assert placement.tiers[0].stored_bytes == 0


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


# -- estimator


def phase(placement, bps, busy_s=1.0, now_s=0.0, requests=10):
    """A phase of writes to tier 0 that are queued two deep."""
    size = int(bps * busy_s / requests)
    placement.begin_phase(requests, now_s)
    placement.write_begins(0, size, now_s)
    for i in range(1, requests + 1):
        if i < requests:
            placement.write_begins(0, size, now_s)
        now_s += busy_s / requests
        placement.write_ends(0, size, now_s, True)
    placement.end_phase(now_s)
    return now_s


def test_bandwidth_is_bytes_per_busy_time():
    placement = Placement([TierSpec("a")])
    now_s = phase(placement, 300 * MB)
    assert placement.tiers[0].writes.bps == pytest.approx(300 * MB)
    phase(placement, 300 * MB, now_s=now_s + 100.0)
    assert placement.tiers[0].writes.bps == pytest.approx(300 * MB), "idle time does not count"
    assert placement.tiers[0].writes.mean_bps == pytest.approx(300 * MB)
    assert placement.tiers[0].writes.bytes == 600 * MB


def test_small_changes_are_smoothed_and_large_ones_taken():
    placement = tiers(100 * MB)
    now_s = phase(placement, 105 * MB)
    assert placement.tiers[0].writes.bps == pytest.approx(101.5 * MB)
    phase(placement, 50 * MB, now_s=now_s)
    assert placement.tiers[0].writes.bps == pytest.approx(50 * MB)


def test_short_phases_are_ignored():
    placement = tiers(100 * MB)
    phase(placement, 900 * MB, busy_s=0.04)
    assert placement.tiers[0].writes.bps == 100 * MB


def test_failed_requests_count_no_bytes():
    placement = Placement([TierSpec("a")])
    write(placement, 0, 100 * MB, 0.0, 1.0, ok=False)
    placement.end_phase(1.0)
    assert placement.tiers[0].writes.bps is None
    assert placement.tiers[0].writes.bytes == 0


def test_slower_direction_counts():
    placement = Placement([TierSpec("a", None, 400.0, 100.0), TierSpec("b", None, None, 300.0), TierSpec("c")])
    assert placement.speeds() == [100.0, 300.0, 200.0]
    assert Placement([TierSpec("a"), TierSpec("b")]).speeds() == [1.0, 1.0]


def test_change_in_mid_phase_is_taken_up_after_two_windows():
    placement = tiers(100 * MB, 100 * MB)
    placement.begin_phase(200, 0.0)
    now_s, size = 0.0, MB
    for _ in range(60):  # 60 records at 20 MB/s are 3 s
        placement.write_begins(0, size, now_s)
        now_s += size / (20 * MB)
        placement.write_ends(0, size, now_s, True)
        if placement.tiers[0].writes.bps != 100 * MB:
            break
    assert now_s == pytest.approx(0.4, abs=0.06)
    assert placement.tiers[0].writes.bps == pytest.approx(20 * MB)
    caps = [tier.cap for tier in placement.tiers]
    assert caps[0] / sum(caps) == pytest.approx(1 / 6, abs=0.02)
    assert sum(caps) == 200 - round(now_s * 20)
    placement.end_phase(now_s)
    assert placement.tiers[0].writes.bps == pytest.approx(20 * MB), "what was before does not count"


def test_one_odd_window_is_not_enough():
    placement = tiers(100 * MB)
    placement.begin_phase(100, 0.0)
    now_s = 0.0
    for bps in [20 * MB] * 5 + [100 * MB] * 20 + [20 * MB] * 5 + [100 * MB] * 20:
        placement.write_begins(0, MB, now_s)
        now_s += MB / bps
        placement.write_ends(0, MB, now_s, True)
        assert placement.tiers[0].writes.bps == 100 * MB
