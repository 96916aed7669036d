"""How a store learns its tiers' bandwidth before the first step: from profiles, else by a probe in the background."""

from __future__ import annotations

import functools
import os

import jax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import first_probe, native
from jax_mlp_offload.placement import Placement, TierSpec
from jax_mlp_offload.profile import FILE_NAME, as_json, write_profile
from jax_mlp_offload.registry import live_stores
from tests.limited import FAR_ABOVE, limited, probe_files, profile_of, wait_for
from tests.servers import threads
from tests.support import assert_bits_equal, make_params, make_step, record_gradients, run, run_and_flush

pytestmark = pytest.mark.timeout(180)

SUBGROUP = 4096  # elements
RECORD_BYTES = 8 * SUBGROUP  # of Adam: two moments in float32
RECORDS, SLOTS = 12, 4
WRITES = RECORDS - SLOTS  # of a step; too few for a tier to be found faster or slower within it
NEVER_ENDS = "64B"  # a second


@functools.cache
def host_only():
    """Params, gradients, and what becomes of both where nothing leaves memory."""
    params = make_params({"w": (RECORDS * SUBGROUP,)})
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        expected, state = run(jmo.adam(1e-2, store=store), params, grads)
        return params, grads, expected, jmo.read_state(state)


def open_store(*tiers, **more):
    return jmo.Store(*tiers, host_memory=SLOTS * RECORD_BYTES, subgroup_elements=SUBGROUP, **more)


def first_step(store):
    """The tiers' statistics after one step."""
    params, grads, *_ = host_only()
    run_and_flush(store, jmo.adam(1e-2, store=store), params, grads[:1])
    stats = store.stats()
    assert (stats["records"], stats["slots"], stats["slot_bytes"]) == (RECORDS, SLOTS, RECORD_BYTES)
    assert all(tier["bytes_written"] == tier["writes"] * RECORD_BYTES for tier in stats["tiers"])
    return stats["tiers"]


def writes(tiers):
    return [tier["writes"] for tier in tiers]


def estimates(tiers, way):
    return [tier[f"estimated_{way}_bps"] for tier in tiers]


# -- profiles


@pytest.mark.parametrize("form", ["content", "path", "entries"])
@pytest.mark.parametrize(("speeds", "split"), [((6e8, 2e8), [6, 2]), ((1e8, 7e8), [1, 7]), ((3e8, 3e8), [4, 4])])
def test_the_first_step_follows_the_profile(two_tiers, tmp_path, form, speeds, split):
    tiers = [limited(path) for path in two_tiers]
    entries = [profile_of(tier, bps) for tier, bps in zip(tiers, speeds, strict=True)]
    write_profile(tmp_path / "all.json", entries)
    profile = {"content": as_json(entries), "path": tmp_path / "all.json", "entries": entries}[form]
    with open_store(*tiers, profile=profile) as store:
        seen = first_step(store)
    assert writes(seen) == split
    assert estimates(seen, "read") == estimates(seen, "write") == list(speeds)


@pytest.mark.parametrize(
    ("limits", "read_bps", "write_bps", "split"),
    [
        ({"read_limit": "200MB", "write_limit": "200MB"}, 2e8, 2e8, [4, 4]),
        ({"write_limit": "200MB"}, 6e8, 2e8, [4, 4]),
        ({"read_limit": "200MB"}, 2e8, 6e8, [4, 4]),
        ({"read_limit": "1GB", "write_limit": "1GB"}, 6e8, 6e8, [6, 2]),
    ],
)
def test_limits_cap_a_profile(two_tiers, limits, read_bps, write_bps, split):
    tiers = [jmo.File(two_tiers[0], **limits), limited(two_tiers[1])]
    entries = [profile_of(tiers[0], 6e8), profile_of(tiers[1], 2e8)]
    with open_store(*tiers, profile=entries) as store:
        seen = first_step(store)
    assert writes(seen) == split
    assert estimates(seen, "read") == [read_bps, 2e8]
    assert estimates(seen, "write") == [write_bps, 2e8]


def test_a_profile_of_directories_on_one_device(two_tiers):
    """They are one path, and what is said of it is said of both together."""
    entries = [profile_of(jmo.File(path), 6e8) for path in two_tiers]
    with open_store(*two_tiers, profile=entries) as store:
        seen = first_step(store)
    assert writes(seen) == [4, 4]
    assert estimates(seen, "read") == estimates(seen, "write") == [3e8, 3e8]


def test_a_profile_beside_the_data(two_tiers):
    tiers = [limited(path) for path in two_tiers]
    for tier, bps in zip(tiers, (6e8, 2e8), strict=True):
        write_profile(os.path.join(tier.path, FILE_NAME), [profile_of(tier, bps)])
    with open_store(*tiers) as store:
        assert writes(first_step(store)) == [6, 2]
    # a profile that is given comes first, and where it says nothing of a tier the file beside the data does
    with open_store(*tiers, profile=[profile_of(tiers[0], 2e8)]) as store:
        assert writes(first_step(store)) == [4, 4]
    assert all(os.listdir(path) == [FILE_NAME] for path in two_tiers)


@pytest.mark.parametrize(
    "content", ["{", '{"format": 2, "tiers": []}', None], ids=["cut off", "of another", "directory"]
)
def test_a_broken_profile_beside_the_data(two_tiers, caplog, content):
    tiers = [limited(path) for path in two_tiers]
    broken = os.path.join(two_tiers[0], FILE_NAME)
    if content is None:
        os.mkdir(broken)
    else:
        with open(broken, "w", encoding="utf-8") as file:
            file.write(content)
    params, grads, expected, moments = host_only()
    with open_store(*tiers) as store:
        (record,) = caplog.records
        assert record.levelname == "WARNING" and broken in record.getMessage() and "ignored" in record.getMessage()
        new, state = run(jmo.adam(1e-2, store=store), params, grads)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), moments)
    assert [os.listdir(path) for path in two_tiers] == [[FILE_NAME], []]  # it is the user's


@pytest.mark.parametrize(
    ("profile", "error", "message"),
    [
        ("{tmp}/none.json", ValueError, "none.json' cannot be read: No such file"),
        ("{tmp}", ValueError, "cannot be read: Is a directory"),
        ("{tmp}/bad.json", ValueError, "bad.json' is no JSON"),
        ({"format": 1}, ValueError, "is no profile"),
        ({"format": 1, "tiers": [{"name": "x"}]}, ValueError, "tier 0 has no read_bps"),
        (7, TypeError, "profile is 7"),
    ],
)
def test_a_bad_profile_that_is_given(two_tiers, tmp_path, profile, error, message):
    (tmp_path / "bad.json").write_text("{")
    if isinstance(profile, str):
        profile = profile.format(tmp=tmp_path)
    with pytest.raises(error, match=message):
        open_store(*two_tiers, profile=profile)
    assert all(os.listdir(path) == [] for path in two_tiers)
    assert not live_stores() and not threads()


# -- the probe in the background


@pytest.fixture
def measured(monkeypatch):
    """Names of the tiers that were probed, of which a small state is worth it now."""
    names = []

    def measure_briefly(tier, *args, **options):
        names.append(tier.name)
        return measure(tier, *args, **options)

    measure = first_probe.measure_briefly
    monkeypatch.setattr(first_probe, "measure_briefly", measure_briefly)
    monkeypatch.setattr("jax_mlp_offload.engine.LEAST_BYTES", RECORD_BYTES)
    return names


def probing():
    return any(name.startswith("jmo-probe") for name in threads())


def register(store, name=None):
    """Traces a step without running it; returns step and state."""
    params, grads, *_ = host_only()
    tx = jmo.adam(1e-2, store=store, name=name)
    step, state = make_step(tx), tx.init(params)
    step.lower(params, state, grads[0])
    return step, state


def train(step, state):
    """Runs the rest, and compares it with what becomes of the params in memory only."""
    params, grads, expected, moments = host_only()
    for grad in grads:
        params, state = step(params, state, grad)
    assert_bits_equal(jax.block_until_ready(params), expected)
    assert_bits_equal(jmo.read_state(state), moments)


def test_what_a_probe_tells_counts_at_once():
    """In the midst of a step too, though not against what a tier's own traffic or its limits have told."""
    placement = Placement([TierSpec("a"), TierSpec("b", read_bps=1e8)])
    placement.begin_phase(12, now_s=0.0)
    placement.tell(0, 4e8, 3e8)
    placement.tell(1, 9e8, 2e8)
    assert [(tier.read_bps, tier.write_bps) for tier in placement.tiers] == [(4e8, 3e8), (1e8, 2e8)]
    assert [tier.cap for tier in placement.tiers] == [9, 3]


def test_tiers_of_unknown_bandwidth_are_probed(tmp_path, measured):
    with open_store(tmp_path, "memory://unknown") as store:
        assert estimates(store.stats()["tiers"], "read") == [None, None]
        step, state = register(store)
        wait_for(lambda: not probing())
        assert sorted(measured) == [str(tmp_path), "memory://unknown"]
        assert len(os.listdir(tmp_path)) == 1  # the store's own folder
        told = store.stats()["tiers"]
        assert all(estimates(told, "read") + estimates(told, "write"))
        speeds = list(map(min, estimates(told, "read"), estimates(told, "write")))
        params, grads, *_ = host_only()
        jax.block_until_ready(step(params, state, grads[0]))
        store.flush()
        split = writes(store.stats()["tiers"])
        assert sum(split) == WRITES
        assert all(abs(n - WRITES * bps / sum(speeds)) <= 1 for n, bps in zip(split, speeds, strict=True))
        train(step, state)
    assert os.listdir(tmp_path) == []


def test_training_beside_the_probe(tmp_path, measured):
    """It need not be over for a step to run, nor do they meet."""
    with open_store(tmp_path, "memory://beside") as store:
        step, state = register(store)
        train(step, state)
        wait_for(lambda: not probing())
        assert sorted(measured) == [str(tmp_path), "memory://beside"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tiers", "probed"),
    [
        (["memory://single"], []),
        (["{limited}", "{other limited}"], []),
        (["{limited}", "memory://known and unknown"], ["memory://known and unknown"]),
        (["{profiled}", "memory://profiled and unknown"], ["memory://profiled and unknown"]),
        (["{limited one way}", "memory://half known"], ["{limited one way}", "memory://half known"]),
        (["{directory}", "{other directory}"], []),
        (["{directory}", "{other directory}", "memory://three"], ["{directory}", "memory://three"]),
    ],
    ids=["a single tier", "known", "one known", "one profiled", "half known", "one device", "two devices"],
)
def test_which_tiers_are_probed(two_tiers, measured, tiers, probed):
    given = {
        "{limited}": limited(two_tiers[0]),
        "{other limited}": limited(two_tiers[1]),
        "{limited one way}": jmo.File(two_tiers[0], read_limit=FAR_ABOVE),
        "{profiled}": jmo.File(two_tiers[0]),
        "{directory}": jmo.File(two_tiers[0]),
        "{other directory}": jmo.File(two_tiers[1]),
    }
    profile = [profile_of(given["{profiled}"], 1e9)] if "{profiled}" in tiers else None
    with open_store(*(given.get(tier, tier) for tier in tiers), profile=profile) as store:
        register(store)
        wait_for(lambda: not probing())
        assert sorted(measured) == [given[name].name if name in given else name for name in probed]


def test_how_much_a_step_has_to_move(tmp_path, measured, monkeypatch):
    """A state that mostly stays in memory is not worth it; nor is it measured twice for a second optimizer."""
    monkeypatch.setattr("jax_mlp_offload.engine.LEAST_BYTES", WRITES * RECORD_BYTES // 2 + 1)
    with open_store(tmp_path, "memory://small") as store:
        register(store, "first")
        wait_for(lambda: not probing())
        assert measured == []
        monkeypatch.setattr("jax_mlp_offload.engine.LEAST_BYTES", WRITES * RECORD_BYTES // 2)
        for name in ("second", "third"):
            register(store, name)
            wait_for(lambda: not probing())
            assert sorted(measured) == [str(tmp_path), "memory://small"]


@pytest.mark.parametrize("slow_first", [True, False])
def test_closing_a_store_ends_its_probe(tmp_path, measured, caplog, slow_first):
    slow = jmo.File(tmp_path, write_limit=NEVER_ENDS)  # how fast it reads is unknown
    with open_store(*([slow, "memory://close"] if slow_first else ["memory://close", slow])) as store:
        register(store)
        wait_for(lambda: probe_files(tmp_path))
        register(store, "another")  # starts no second one
        assert probing()
    wait_for(lambda: not probing())
    assert measured[-1] == str(tmp_path) and len(set(measured)) == len(measured)
    assert not caplog.records
    assert os.listdir(tmp_path) == []


def test_closing_a_store_at_once(tmp_path, measured, caplog):
    """Wherever the probe is by then, also in setting out."""
    for _ in range(5):
        with open_store(tmp_path, "memory://at once") as store:
            register(store)
        wait_for(lambda: not probing())
        assert os.listdir(tmp_path) == []
    assert not caplog.records


@pytest.mark.parametrize("is_write", [True, False])
def test_a_probe_that_fails(tmp_path, measured, caplog, is_write):
    """It is said of which tier, the other is probed, and training goes on with both."""
    native.inject_fault(str(tmp_path), is_write, fail_count=1, error_number=5)
    with open_store(tmp_path, "memory://other") as store:
        step, state = register(store)
        wait_for(lambda: not probing())
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().startswith(f"tier {str(tmp_path)!r} could not be probed: ")
        assert "Input/output error" in record.getMessage()
        assert sorted(measured) == [str(tmp_path), "memory://other"]
        told = store.stats()["tiers"]
        assert estimates(told, "read")[0] is estimates(told, "write")[0] is None
        assert estimates(told, "read")[1] and estimates(told, "write")[1]
        train(step, state)
        seen = store.stats()["tiers"]
        assert all(tier["bytes_written"] and not tier["retired"] for tier in seen)
    assert os.listdir(tmp_path) == []


def test_a_tier_too_small_for_a_probe(tmp_path, measured, caplog):
    small = jmo.File(tmp_path, capacity="12KiB")
    with open_store(small, "memory://large") as store:
        step, state = register(store)
        wait_for(lambda: not probing())
        assert f"{str(tmp_path)!r} could not be probed" in caplog.text and "12.0 KiB are free" in caplog.text
        train(step, state)
    assert os.listdir(tmp_path) == []
