"""What a store tells of itself."""

from __future__ import annotations

import json

import jax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import stats
from jax_mlp_offload.placement import Placement, TierSpec
from tests.support import make_params, make_step, record_gradients

SHAPES = {"a": (300, 41), "b": (7,), "c": (4097,), "d": ()}
STEPS = 4


@pytest.fixture(params=["fp32", "bf16"])
def counted(request, two_tiers):
    """The statistics of a store with two tiers after some steps, and the elements of its state."""
    params = make_params(SHAPES, "bfloat16" if request.param == "bf16" else "float32")
    tiers = [jmo.File(two_tiers[0], capacity="1GB", endurance="1TB"), jmo.File(two_tiers[1], write_limit="1GB")]
    with jmo.Store(*tiers, host_memory="110KB", subgroup_elements=4096) as store:
        tx = jmo.adamw(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        for grads in record_gradients(params, STEPS):
            params, state = step(params, state, grads)
        jax.block_until_ready(params)
        store.flush()
        yield store.stats()


def is_plain(value):
    if type(value) is dict:
        return all(type(key) is str and is_plain(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def test_statistics_are_plain(counted):
    assert is_plain(counted)
    json.dumps(counted)


def test_hits_and_traffic_add_up(counted):
    assert counted["steps"] == STEPS
    assert counted["hits"] + counted["misses"] == counted["records"] * (STEPS - 1), "the first step reads nothing"
    assert counted["hit_rate"] == pytest.approx(counted["hits"] / (counted["hits"] + counted["misses"]))
    tiers = counted["tiers"]
    assert counted["misses"] == sum(tier["reads"] for tier in tiers) > 0
    for what in ("bytes_read", "bytes_written"):
        assert counted[what] == sum(tier[what] for tier in tiers) > 0
    assert sum(tier["share"] for tier in tiers) == pytest.approx(1.0)
    assert sum(tier["read_share"] for tier in tiers) == pytest.approx(1.0)
    stored = counted["bytes_written"] - counted["bytes_read"]
    assert sum(tier["stored_bytes"] for tier in tiers) == stored, "what was written and not read back is there"


def test_tiers_tell_what_they_do(counted):
    first, second = counted["tiers"]
    for tier in (first, second):
        assert tier["retries"] == 0
        assert not tier["retired"]
        assert 0 < tier["stored_bytes"] <= tier["held_bytes"]
        assert tier["free_bytes"] > 0
        for way, count in (("read", "reads"), ("write", "writes")):
            moved = tier["bytes_read" if way == "read" else "bytes_written"]
            assert tier[f"{way}_bps"] == pytest.approx(moved / tier[f"{way}_busy_s"])
            assert 0 <= tier[f"{way}_queue_s"] <= tier[f"{way}_busy_s"]
            assert tier[f"largest_{way}_bytes"] * tier[count] >= moved
    assert (first["capacity_bytes"], second["capacity_bytes"]) == (10**9, None)
    assert second["estimated_write_bps"] is not None
    assert (second["endurance"], first["endurance"]["rated_bytes"]) == (None, 10**12)
    assert first["endurance"]["written_bytes"] == first["bytes_written"]
    assert first["endurance"]["left_at_this_rate_s"] > 0
    whole = [tier["mean_bytes_written_per_step"] * (STEPS - 1) for tier in (first, second)]
    assert sum(whole) <= counted["bytes_written"]
    assert sum(tier["bytes_written_per_step"] for tier in (first, second)) > 0


def test_store_without_tiers_and_without_steps():
    with jmo.Store() as store:
        counted = store.stats()
    assert is_plain(counted)
    assert counted["tiers"] == []
    assert (counted["hit_rate"], counted["bytes_read"], counted["bytes_written"]) == (0.0, 0, 0)


def test_tiers_by_hand():
    specs = [
        TierSpec("a", 1000, 40.0, 80.0, device=(8, 1), free_bytes=500),
        TierSpec("b", device=(8, 1)),
        TierSpec("c"),
    ]
    placement = Placement(specs)
    for step, sizes in enumerate([(100, 50), (20, 20), (7, 7)]):
        placement.begin_phase(2, float(step))
        for tier, size in enumerate(sizes):
            placement.write_begins(tier, size, step)
            placement.write_ends(tier, size, step + 0.5, True, queue_s=0.1)
        placement.read_begins(0, sizes[0], step + 0.5)
        placement.read_ends(0, sizes[0], step + 0.75, True)
    a, b, c = stats.of_tiers(placement)
    assert (a["bytes_written"], a["bytes_read"], b["bytes_written"], c["bytes_written"]) == (127, 127, 77, 0)
    assert a["share"] == pytest.approx(127 / 204)
    assert (a["read_share"], b["read_share"]) == (1.0, 0.0)
    assert (a["bytes_written_per_step"], a["mean_bytes_written_per_step"]) == (20, 60), "the third step is not over"
    assert (a["bytes_read_per_step"], b["bytes_read_per_step"]) == (20, 0)
    assert (a["read_bps"], a["write_bps"]) == (pytest.approx(127 / 0.75), pytest.approx(127 / 1.5))
    assert a["write_queue_s"] == pytest.approx(0.1)
    assert a["read_queue_s"] == 0.0
    assert a["estimated_read_bps"] == b["estimated_read_bps"], "half of what their device does"
    assert (c["estimated_read_bps"], c["estimated_write_bps"]) == (None, None)
    assert (a["stored_bytes"], a["held_bytes"], a["capacity_bytes"]) == (0, 127, 1000)
    assert a["device"] == b["device"] == "(8, 1)"
    assert is_plain([a, b, c])


def test_endurance():
    assert stats.endurance(None, 10, 1.0) is None
    assert stats.endurance(1000, 0, 60.0) == {
        "rated_bytes": 1000,
        "written_bytes": 0,
        "used": 0.0,
        "left_at_this_rate_s": None,
    }
    used = stats.endurance(1000, 250, 60.0)
    assert (used["used"], used["left_at_this_rate_s"]) == (0.25, pytest.approx(180.0))
    assert stats.endurance(1000, 2000, 60.0)["left_at_this_rate_s"] == 0.0
