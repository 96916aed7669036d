"""How fast a device is found to be, and what is counted of a tier's traffic."""

from __future__ import annotations

import pytest

from jax_mlp_offload.bandwidth import Traffic
from jax_mlp_offload.placement import Placement, TierSpec

MB = 10**6


def tiers(*speeds):
    return Placement([TierSpec(f"t{i}", None, s, s) for i, s in enumerate(speeds)])


def write(placement, tier, size_bytes, start_s, end_s, ok=True):
    placement.write_begins(tier, size_bytes, start_s)
    placement.write_ends(tier, size_bytes, end_s, ok)


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
    assert placement.devices[0].writes.bps == pytest.approx(300 * MB)
    phase(placement, 300 * MB, now_s=now_s + 100.0)
    assert placement.devices[0].writes.bps == pytest.approx(300 * MB), "idle time does not count"
    assert placement.tiers[0].written.mean_bps == pytest.approx(300 * MB)
    assert placement.tiers[0].written.bytes == 600 * MB


def test_small_changes_are_smoothed_and_large_ones_taken():
    placement = tiers(100 * MB)
    now_s = phase(placement, 105 * MB)
    assert placement.devices[0].writes.bps == pytest.approx(101.5 * MB)
    phase(placement, 50 * MB, now_s=now_s)
    assert placement.devices[0].writes.bps == pytest.approx(50 * MB)


def test_short_phases_are_ignored():
    placement = tiers(100 * MB)
    phase(placement, 900 * MB, busy_s=0.04)
    assert placement.devices[0].writes.bps == 100 * MB


def test_failed_requests_count_no_bytes():
    placement = Placement([TierSpec("a")])
    write(placement, 0, 100 * MB, 0.0, 1.0, ok=False)
    placement.end_phase(1.0)
    assert placement.devices[0].writes.bps is None
    assert placement.tiers[0].written.bytes == 0


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
        if placement.devices[0].writes.bps != 100 * MB:
            break
    assert now_s == pytest.approx(0.4, abs=0.06)
    assert placement.devices[0].writes.bps == pytest.approx(20 * MB)
    caps = [tier.cap for tier in placement.tiers]
    assert caps[0] / sum(caps) == pytest.approx(1 / 6, abs=0.02)
    assert sum(caps) == 200 - round(now_s * 20)
    placement.end_phase(now_s)
    assert placement.devices[0].writes.bps == pytest.approx(20 * MB), "what was before does not count"


def test_one_odd_window_is_not_enough():
    placement = tiers(100 * MB)
    placement.begin_phase(100, 0.0)
    now_s = 0.0
    for bps in [20 * MB] * 5 + [100 * MB] * 20 + [20 * MB] * 5 + [100 * MB] * 20:
        placement.write_begins(0, MB, now_s)
        now_s += MB / bps
        placement.write_ends(0, MB, now_s, True)
        assert placement.devices[0].writes.bps == 100 * MB


def test_unknown_bandwidth_is_taken_from_two_windows():
    placement = Placement([TierSpec("a"), TierSpec("b", None, 100 * MB, 100 * MB)])
    placement.begin_phase(100, 0.0)
    now_s = 0.0
    while placement.devices[0].writes.bps is None and now_s < 1.0:
        write(placement, 0, MB, now_s, now_s + MB / (50 * MB))
        now_s += MB / (50 * MB)
    assert now_s == pytest.approx(0.4, abs=0.05)
    assert placement.devices[0].writes.bps == pytest.approx(50 * MB)
    caps = [tier.cap for tier in placement.tiers]
    assert caps[0] / sum(caps) == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize(("before", "after"), [(2, 30), (30, 2)])
def test_requests_that_share_the_bandwidth_do_not_hide_it(before, after):
    """When more are in flight each takes longer, and what they have moved so far is not seen yet: the edges."""
    placement = tiers(200 * MB)
    placement.begin_phase(1000, 0.0)
    size, now_s, left = 16 * MB, 0.0, []
    for i in range(80):
        most = round(before + (after - before) * min(1.0, i / 40))
        while len(left) < most:
            placement.write_begins(0, size, now_s)
            left.append(float(size))
        took_s = min(left) * len(left) / (200 * MB)
        now_s += took_s
        left = [each - took_s * 200 * MB / len(left) for each in left]
        for each in [each for each in left if each < 1.0]:
            left.remove(each)
            placement.write_ends(0, size, now_s, True)
        assert placement.devices[0].writes.bps == 200 * MB


def test_device_that_is_throttled_in_slices_is_not_taken_for_faster():
    """One slice passes free after a pause: the first window of each phase sees twice the bandwidth."""
    placement = tiers(100 * MB)
    now_s = 0.0
    for _ in range(5):
        placement.begin_phase(60, now_s)
        placement.write_begins(0, MB, now_s)
        for i in range(60):
            placement.write_begins(0, MB, now_s)
            if i >= 10 and i % 10 == 0:
                now_s += 0.1
            placement.write_ends(0, MB, now_s, True)
            assert placement.devices[0].writes.bps < 125 * MB
        placement.write_ends(0, MB, now_s, True)
        now_s += 1.0


# -- traffic


def test_traffic_counts_what_ended_well():
    traffic = Traffic()
    traffic.begin(1.0)
    traffic.begin(2.0)
    traffic.end(100, 4.0, True, 0.5)
    traffic.end(300, 5.0, False, 9.0)
    assert (traffic.requests, traffic.bytes, traffic.largest_bytes) == (1, 100, 100)
    assert traffic.busy_s == pytest.approx(4.0), "with any request in flight"
    assert traffic.mean_bps == pytest.approx(25.0)
    traffic.begin(10.0)
    traffic.end(300, 11.0, True, 1.5)
    assert traffic.busy_s == pytest.approx(5.0)
    assert traffic.mean_queue_s == pytest.approx(1.0)
    assert traffic.largest_bytes == 300
    assert Traffic().mean_bps == Traffic().mean_queue_s == 0.0


def test_traffic_by_phase():
    placement = tiers(100.0)
    for step, size in enumerate((10, 20, 30)):
        placement.begin_phase(1, float(step))
        write(placement, 0, size, step, step + 0.5)
    written = placement.tiers[0].written
    assert placement.phases == 3
    assert written.last_phase_bytes == 20, "the third is not over"
    assert written.whole_phases_bytes == 30
    placement.begin_phase(1, 3.0)
    assert (written.last_phase_bytes, written.whole_phases_bytes, written.bytes) == (30, 60, 60)
