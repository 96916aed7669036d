"""The benchmarks: their limits and traces as pure functions, and that they run."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

import jax_mlp_offload as jmo
from benchmarks import adapt, equal, exclusive, kernel, report, scaling
from benchmarks.limit import (
    Bandwidth,
    Overlap,
    ideal_shares,
    iteration_limit,
    moved_bytes,
    update_limit,
)
from benchmarks.pump import measure_tiers
from benchmarks.step import split_tier
from benchmarks.trace import READ, UPDATE, Span, activity, busy_s

ROOT = pathlib.Path(__file__).parents[1]
MB = 10**6


# -- limits


def test_duplex_device_sustains_its_slower_direction():
    assert Bandwidth(400.0, 300.0).sustained_bps == 300.0


def test_shared_budget_is_split_between_the_directions():
    assert Bandwidth(400.0, 400.0, duplex=False).sustained_bps == pytest.approx(200.0)
    assert Bandwidth(600.0, 300.0, duplex=False).sustained_bps == pytest.approx(200.0)


@pytest.mark.parametrize("bandwidth", [Bandwidth(0.0, 1.0), Bandwidth(1.0, -1.0)])
def test_bandwidth_of_nothing_is_refused(bandwidth):
    with pytest.raises(ValueError, match="more than 0"):
        _ = bandwidth.sustained_bps


@pytest.mark.parametrize(("slots", "moved"), [(0, 100), (4, 60), (10, 0), (12, 0)])
def test_what_does_not_fit_is_moved(slots, moved):
    assert moved_bytes([10] * 10, slots) == moved


def test_largest_records_stay():
    assert moved_bytes([5, 20, 10], 1) == 15


def test_update_takes_the_longer_of_transfers_and_kernel():
    devices = [Bandwidth(400e6, 400e6), Bandwidth(200e6, 250e6)]
    records = [10 * MB] * 100
    limit = update_limit(records, 40, devices, kernel_s=0.3)
    assert limit.moved_bytes == 600 * MB
    assert limit.io_s == pytest.approx(1.0)
    assert limit.update_s == limit.io_s
    assert update_limit(records, 40, devices, kernel_s=2.0).update_s == 2.0
    assert ideal_shares(devices) == pytest.approx([2 / 3, 1 / 3])


def test_update_in_memory_is_the_kernel():
    assert update_limit([10] * 4, 4, [], 0.5).update_s == 0.5
    with pytest.raises(ValueError, match="no tier"):
        update_limit([10] * 4, 3, [], 0.5)


@pytest.mark.parametrize(
    ("overlap", "update_s", "expected_s"),
    [
        (Overlap.GIVEN, 5.0, 5.0),
        (Overlap.BARRIER, 5.0, 4.0 + 5.0),
        (Overlap.BACKWARD, 5.0, 1.5 + 5.0),
        (Overlap.BACKWARD, 2.0, 4.0),
    ],
)
def test_iteration(overlap, update_s, expected_s):
    assert iteration_limit(overlap, update_s, passes_s=4.0, first_gradient_s=1.5) == expected_s


# -- traces


def _span(begin_s: float, end_s: float, kind: str = READ, tier: int | None = 0) -> Span:
    return Span(kind, tier, 0, 10, begin_s, end_s)


def test_busy_time_counts_overlaps_once():
    assert busy_s([]) == 0.0
    assert busy_s([_span(0, 2), _span(1, 3), _span(1.5, 2), _span(5, 6)]) == pytest.approx(4.0)


def test_activity_of_one_tier():
    spans = [_span(11, 12), _span(13, 15), _span(10, 20, tier=1), _span(10, 20, UPDATE, None)]
    found = activity(spans, READ, 0, begin_s=10.0)
    assert (found.requests, found.size_bytes) == (2, 20)
    assert (found.busy_s, found.first_s, found.last_s) == pytest.approx((3.0, 1.0, 5.0))
    assert activity(spans, READ, 2, begin_s=10.0).requests == 0


# -- bandwidth of tiers


def test_pump_finds_the_limits(two_tiers):
    limits_bps = zip(two_tiers, (60e6, 20e6), strict=True)
    fast, slow = (jmo.File(path, read_limit=bps, write_limit=bps) for path, bps in limits_bps)
    found = measure_tiers([fast, slow], seconds=1.0, record_bytes=2**20)
    assert all(not any(pathlib.Path(path).iterdir()) for path in two_tiers)
    # a busy machine may give less
    assert 5e6 < found[0].sustained_bps < 72e6
    assert 2e6 < found[1].sustained_bps < 24e6


# -- arguments and reports


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/b", ("/a/b", None)),
        ("/a/b:400", ("/a/b", 400e6)),
        ("/a:b", ("/a:b", None)),
        ("/a:b:0.5", ("/a:b", 5e5)),
    ],
)
def test_split_tier(text, expected):
    assert split_tier(text) == expected


def test_shares_after_a_change():
    change = adapt.Change.parse("2:0:100:echo 1:2")
    assert change == adapt.Change(2, 0, 100e6, "echo 1:2")
    ideal = adapt.ideals([400e6, 200e6], [change], 6)
    assert ideal == [[pytest.approx(x), pytest.approx(1 - x)] for x in [2 / 3] * 2 + [1 / 3] * 4]
    for shares, after in [([0.67, 0.66, 0.5, 0.33, 0.34, 0.33], 1), ([1 / 3] * 6, 0), ([0.5] * 6, None)]:
        assert adapt.settled_after([[x, 1 - x] for x in shares], ideal, 2, 6) == after


def test_bytes_until_a_time():
    moments = [[1.0, 10.0], [2.0, 30.0], [4.0, 40.0]]
    assert [exclusive.bytes_at(moments, time_s) for time_s in (1.0, 1.5, 3.0, 4.0)] == [10, 20, 35, 40]


def test_bytes_of_the_kernel():
    assert kernel.bytes_per_param("float32", decay=True) == 28
    assert kernel.bytes_per_param("float32", decay=False) == 24
    assert kernel.bytes_per_param("bfloat16", decay=True) == 26


def test_json_says_where_and_with_what(tmp_path):
    report.write_json(tmp_path / "new" / "a.json", "name", {"size": 1}, {"x": 2.0})
    content = json.loads((tmp_path / "new" / "a.json").read_text())
    assert content["figures"] == {"x": 2.0}
    assert content["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert {"python", "jax", "numpy"} <= content["versions"].keys()


def test_peak_of_memory_begins_anew():
    block = bytearray(64 * MB)
    for page in range(0, len(block), 4096):
        block[page] = 1
    before = report.resident_bytes()[1]
    del block
    report.reset_peak()
    now, peak = report.resident_bytes()
    assert peak >= now
    assert peak <= before - 32 * MB


def _result(ends_s):
    return scaling.Result(ends_s, 30 * MB, 4, 0.5, 2.0, [10 * MB] * 3, 1, ["not asked for"])


def test_processes_share_devices_and_wait_for_the_slowest():
    results = [_result([1.0, 2.0, 4.0]), _result([1.5, 2.5, 3.5])]
    figures = scaling.run_figures(results, [Bandwidth(30e6, 30e6), Bandwidth(10e6, 10e6)], 2 * MB, kernel_s=0.1)
    assert figures["step_s"] == [1.0, 1.5]
    assert figures["limit_s"] == pytest.approx(2 * 20 / 40)  # two records of each process, by both devices
    assert figures["ratio"] == pytest.approx(1.25)
    assert figures["s_per_gparam"] == pytest.approx(1.25 / 4e-3)
    assert figures["share_of_bandwidth"] == pytest.approx(60 / 2.5 / 40)
    busy = scaling.run_figures(results, [Bandwidth(30e6, 30e6), Bandwidth(10e6, 10e6)], 2 * MB, kernel_s=0.9)
    assert busy["limit_s"] == pytest.approx(1.8)
    rows = scaling.jobs({2: [figures], 4: [{**figures, "s_per_gparam": 2 * figures["s_per_gparam"]}]})
    assert [row["to_first"] for row in rows] == [1.0, 2.0]


# -- runs


def _run(module: str, *arguments: str) -> dict[str, object]:
    target = arguments[arguments.index("--json") + 1]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures: dict[str, object] = json.loads(pathlib.Path(target).read_text())["figures"]
    return figures


def test_kernel_runs(tmp_path):
    figures = _run("benchmarks.kernel", "--elements", "2e5", "--rounds", "1", "--json", str(tmp_path / "a.json"))
    for row in figures["rows"]:
        assert "missing" in row or (row["params_per_s"] > 0 and math.isfinite(row["times_optax"])), row


@pytest.mark.parametrize("mode", ["given", "backward", "devices"])
def test_step_runs(tmp_path, two_tiers, mode):
    fast, slow = two_tiers
    options = {
        "given": ["--memory-report", "--tier", f"{fast}:200", "--tier", f"{slow}:100"],
        "backward": ["--arrival", "backward", "--tier", fast, "--read-limit", "200MB", "--write-limit", "200MB"],
        "devices": ["--devices", "2", "--backward", "real", "--arrival", "all", "--tier", f"{fast}:200"],
    }[mode]
    figures = _run(
        "benchmarks.step", "--params", "1e6", "--layers", "4", "--host-memory", "4MB", "--steps", "4",
        "--json", str(tmp_path / "a.json"), *options,
    )  # fmt: skip
    assert len(figures["step_s"]) == 2
    assert figures["ratio"] > 0
    least = figures["records"] - figures["slots"]
    # where gradients come one after another, a pause between two of them may cost a miss: time decides how many, and
    # the optimum is asserted on the simulator's clock (test_scheduler)
    most = least if mode == "given" else figures["records"]
    assert least <= figures["misses_per_step"] <= most
    moved = sum(tier["bytes_written_per_step"] for tier in figures["tiers"])
    assert moved == pytest.approx(figures["misses_per_step"] * figures["slot_bytes"], rel=0.1)
    assert figures["driver"]["events_per_step"] >= figures["records"] + 2 * figures["misses_per_step"]


def test_adapt_runs(tmp_path, two_tiers):
    flag = tmp_path / "changed"
    figures = _run(
        "benchmarks.adapt", "--params", "1e6", "--layers", "4", "--host-memory", "4MB", "--steps", "4",
        "--tier", f"{two_tiers[0]}:200", "--change", f"2:0:100:touch {flag}",
        "--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png"),
    )  # fmt: skip
    assert flag.exists()
    assert figures["written"] == [[1.0]] * 4
    assert figures["read"] == [[0.0]] + [[1.0]] * 3
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_exclusive_runs(tmp_path, two_tiers):
    figures = _run(
        "benchmarks.exclusive", "--params", "1e6", "--layers", "4", "--host-memory", "4MB", "--steps", "6",
        "--rounds", "1", "--tier", two_tiers[0], "--json", str(tmp_path / "a.json"),
    )  # fmt: skip
    assert figures["total_bps"].keys() == {"False", "True", "auto"}
    for process in figures["runs"]["True"][0]["exclusive"]:
        assert all(tier["on"] and tier["write"][0] > 0 for tier in process)


def test_equal_says_whether_bits_are(two_tiers, capsys):
    arguments = ["--params", "1e6", "--layers", "4", "--host-memory", "4MB", "--steps", "3"]
    assert equal.main([*arguments, "--tier", two_tiers[0], "--tier", '{"driver": "memory", "path": "x/"}']) == 0
    shown = capsys.readouterr().out
    assert "; 0 differ" in shown
    assert "memory://x" in shown


def test_scaling_runs(tmp_path, two_tiers):
    figures = _run(
        "benchmarks.scaling", "--params", "1e6", "--layers", "4", "--host-memory", "4MB", "--steps", "4",
        "--rounds", "1", "--processes", "1", "2", "--tier", f"{two_tiers[0]}:200", "--tier", f"{two_tiers[1]}:100",
        "--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png"),
    )  # fmt: skip
    one, two = (job["runs"][0] for job in figures["jobs"])
    assert (two["records"], two["slots"]) == (2 * one["records"], 2 * one["slots"])
    for run in (one, two):
        assert run["misses_per_step"] == run["records"] - run["slots"]
        moved = run["moved_bps"] * run["mean_s"]
        assert moved == pytest.approx(run["update_limit"]["moved_bytes"], rel=0.01)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
