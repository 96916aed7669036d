"""The GPU check: its verdicts as pure functions, how parts fail, and a rehearsal of the whole on the CPU."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from benchmarks import gpu_check
from benchmarks.gpu import parts, suites, systems, targets, timeline, timing
from benchmarks.gpu.settings import Settings, sized
from models import transformer
from tests.test_gpu_traces import TRACE

ROOT = pathlib.Path(__file__).parents[1]
GPU = Settings("cuda", 20_000, 2, 1, 8)
CPU = Settings("cpu", 20_000, 2, 1, 8)


# -- settings


@pytest.mark.parametrize("params", [30e6, 300e6])
def test_a_model_has_about_the_params(params):
    config = sized(int(params), jnp.bfloat16)
    assert transformer.count_params(config) == pytest.approx(params, rel=0.08)
    assert 40 < config.dim / config.layers < 90


def test_too_small_a_model_is_refused():
    with pytest.raises(ValueError, match="too few"):
        sized(100, jnp.bfloat16)


def test_settings_survive_the_way_to_a_part():
    settings = Settings("cpu", 10, 2, 3, 4, tier="/some/where")
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("arguments", [["--params", "100"], ["--steps", "0"], ["--only", "nothing"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--platform", "cpu", *arguments])
    assert "error: " in capsys.readouterr().err


def test_nothing_to_add_to(tmp_path, capsys):
    assert gpu_check.main(["--platform", "cpu", "--add", "--json", str(tmp_path / "none.json")]) == 2
    assert "error: --add: " in capsys.readouterr().err


def test_a_rehearsal_has_results_of_its_own():
    assert gpu_check._parse(["--platform", "cpu"]).json != gpu_check._parse([]).json


def test_parts_are_added_to_those_of_the_same_run(tmp_path):
    target = str(tmp_path / "a.json")
    gpu_check._write(target, CPU, {"link": {"state": parts.NOT_MEASURED, "reason": "it needs a GPU", "seconds": 0.0}})
    assert list(gpu_check._earlier(target, CPU)) == ["link"]
    with pytest.raises(ValueError, match="has settings"):
        gpu_check._earlier(target, GPU)


# -- figures


def test_what_a_link_moved():
    names = ("bytes_to_host", "bytes_to_device", "to_host_busy_s", "to_device_busy_s", "on_device_busy_s")

    def stats(update_on, *values):
        return {"devices": [{"ordinal": 0, "update_on": update_on, **dict(zip(names, values, strict=True))}]}

    host = timing.moved(stats("host", 0, 0, 0.0, 0.0, 0.0), stats("host", 800, 400, 2.0, 4.0, 0.0), 4, 77)[0]
    assert (host["to_host_bps"], host["to_device_bps"], host["on_device_bps"]) == (400, 100, None)
    assert (host["to_host_bytes_per_step"], host["on_device_bytes_per_step"]) == (200, 0)
    device = timing.moved(stats("device", 0, 0, 0.0, 0.0, 0.0), stats("device", 0, 0, 0.0, 0.0, 2.0), 4, 50)[0]
    assert (device["to_host_bps"], device["on_device_bps"]) == (None, 200)


def test_a_peak_that_is_not_the_steps_is_no_figure():
    assert timing._peak(100, 300, 10) == {"peak_bytes": 300, "peak_bytes_per_param": 30.0, "peak_unknown": None}
    for made, now in ((300, 300), (None, None)):
        found = timing._peak(made, now, 10)
        assert found["peak_bytes"] is None
        assert found["peak_bytes_per_param"] is None
        assert found["peak_unknown"]


def _moved(update_on, to_host, to_device, on_device):
    line = {"update_on": update_on}
    for way, (size_bytes, bps) in zip(
        ("to_host", "to_device", "on_device"), (to_host, to_device, on_device), strict=True
    ):
        line |= {f"{way}_bytes_per_step": size_bytes, f"{way}_bps": bps, f"{way}_busy_s_per_step": 0.0}
    return [line]


LINK = {"to_host_bps": 100.0, "to_device_bps": 50.0, "both_bps": 120.0}
PASSES = {"passes_s": 3.0, "forward_alone_s": 1.5, "first_gradient_s": 1.0}


def _step(step_s, peak, update_on=None, **more):
    figures = {
        "ahead_step_s": step_s,
        "median_synced_s": step_s + 0.01,
        "run_ahead": 0.5,
        "peak_bytes_per_param": peak,
        "peak_unknown": None,
    }
    if update_on is not None:
        figures |= {
            "link": LINK, "slots": 4, "record_bytes": [10] * 4, "kernel_s": 1.0, "tier_bps": None,
            "moved": _moved(update_on, (400, 90.0), (100, 40.0), (0, None)),
        }  # fmt: skip
    return figures | more


@pytest.mark.parametrize(
    ("figures", "limit_s"),
    [
        (_step(6.0, 4.0, "host"), 1 + 4),  # 400 bytes at 100 bytes/s, from the first gradient on
        (_step(6.0, 4.0, "host", kernel_s=5.0), 1 + 5),
        (_step(6.0, 4.0, "host", tier_bps=2.0, slots=1), 1 + 15),  # three records of 10 bytes at 2 bytes/s
        (_step(6.0, 4.0, "device", moved=_moved("device", (0, None), (0, None), (600, 110.0))), 1 + 5),
        (_step(6.0, 4.0, "host", moved=_moved("host", (1, 1.0), (1, 1.0), (0, None))), 3.0),
    ],
)
def test_limit_of_a_step(figures, limit_s):
    found = timing.step_limit(figures | {"kernel_s": min(figures["kernel_s"], limit_s - 1)}, PASSES, LINK)
    assert found["limit_s"] == pytest.approx(limit_s)
    assert found["ratio"] == pytest.approx(6.0 / limit_s)


def _measured(**figures):
    return {"state": parts.MEASURED, "figures": figures, "seconds": 1.0}


def _outcomes():
    digests = {"call": "a", "cond": "a"}
    order = {"pushes": 3, "early": 2, "could_be_early": 2, "early_bytes_share": 1.0, "most_late": 0}
    return {
        "build": _measured(built=["was there"], devices=["NVIDIA H200"]),
        "suites": _measured(passed=3, failed=0, skipped=1, failures=[]),
        "link": _measured(devices=[LINK]),
        "passes": _measured(**PASSES),
        "step-plain": _measured(**_step(4.0, 16.0)),
        "step-pinned_host": _measured(**_step(9.0, 5.0)),
        "step-memory-host": _measured(**_step(5.5, 5.0, "host")),
        "step-memory-device": {"state": parts.FAILED, "reason": "Traceback\nMemoryError: no", "seconds": 1.0},
        "step-disk-host": _measured(**_step(7.0, 7.0, "host")),
        "step-disk-device": {"state": parts.NOT_MEASURED, "reason": "no disk", "seconds": 1.0},
        "overlap-host": _measured(schedule=order, timeline=timeline.overlap(timeline.events(TRACE)), graph_launches=1),
        "overlap-device": _measured(schedule={"not_measured": "x"}, timeline={"not_measured": "y"}),
        "forms": _measured(digests=digests, differences={"cond": 0.0}, graph_launches={"call": 2, "cond": 0}),
        "forms-without-command-buffers": _measured(digests={"call": "a", "cond": "b"}),
        "donation": _measured(digests=digests, kept=0, refused=[]),
        "collectives": _measured(devices=2, loss_difference=0.5, collectives=3),
    }


def test_verdicts():
    outcomes = _outcomes()
    assert outcomes.keys() == parts.PARTS.keys()
    rows = {row.name: row for row in targets.rows(outcomes, GPU)}
    verdicts = {name: row.passed for name, row in rows.items()}
    assert verdicts["tests"] is True
    assert verdicts["link to host in steps, memory-host"] is True  # 90 of 100
    assert verdicts["link to device in steps, memory-host"] is False  # 40 of 50
    assert verdicts["peak of device memory, memory-host"] is True  # 11 below plain
    assert verdicts["peak of device memory, disk-host"] is False  # 9
    assert verdicts["peak of device memory, plain"] is None
    assert verdicts["pushes before the last gradient, update on host"] is True
    assert verdicts["run-ahead that the blocking pull gives up, memory-host"] is True
    assert verdicts["cond, scan and while beside calls"] is True
    assert verdicts["command buffers on and off"] is False
    assert verdicts["donation of the whole state"] is True
    assert verdicts["collectives beside the ops, 2 devices"] is False
    assert "MemoryError" in rows["step, memory-device"].measured
    assert rows["step, disk-device"].measured == "not measured here: no disk"
    assert rows["step, memory-host"].values["ratio"] == pytest.approx(5.5 / 5)
    assert rows["step, memory-host"].values["times_plain"] == pytest.approx(5.5 / 4)
    assert not gpu_check._passed(outcomes, list(rows.values()))


def test_a_rehearsal_judges_no_time_and_no_memory():
    verdicts = {row.name: row.passed for row in targets.rows(_outcomes(), CPU)}
    assert verdicts["link to device in steps, memory-host"] is None
    assert verdicts["peak of device memory, disk-host"] is None
    assert verdicts["run-ahead that the blocking pull gives up, memory-host"] is None
    assert verdicts["command buffers on and off"] is False


def test_parts_that_were_not_run_have_no_figure():
    rows = targets.rows({}, GPU)
    assert all(row.passed is None for row in rows)
    assert all("was not run" in row.measured for row in rows)


def test_outcomes_of_pytest():
    text = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="4">
    <testcase classname="tests.test_a" name="test_x[1]" time="0.1" />
    <testcase classname="tests.test_a" name="test_y" time="0.1"><failure message="no">text</failure></testcase>
    <testcase classname="tests.test_a" name="test_z" time="0.1"><error message="no">text</error></testcase>
    <testcase classname="tests.test_a" name="test_s" time="0.1"><skipped type="pytest.skip">text</skipped></testcase>
    </testsuite></testsuites>"""
    assert suites.outcomes(text) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests.test_a::test_y", "tests.test_a::test_z"],
    }


# -- parts


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; print('before', flush=True); os.abort()", "ended with -6: before"),
        ("import time; print('slow', flush=True); time.sleep(60)", "had not ended after 2 s: slow"),
    ],
)
def test_a_part_that_dies_or_hangs_is_told_of(code, reason, tmp_path):
    outcome = parts._wait([sys.executable, "-c", code], {}, 2.0, tmp_path / "none.json")
    assert outcome["state"] == parts.FAILED
    assert reason in outcome["reason"]


def test_a_part_that_raises_leaves_its_traceback(tmp_path, monkeypatch):
    def fail(settings):
        raise MemoryError(f"of {settings.params}")

    def refuse(settings):
        settings.need_gpu("speed")

    for run, state, reason in (
        (fail, parts.FAILED, "MemoryError: of 20000"),
        (refuse, parts.NOT_MEASURED, "is a GPU's"),
    ):
        monkeypatch.setitem(parts.PARTS, "passes", parts.Part(run, devices=8))
        code = parts.run_here("passes", CPU, tmp_path / "outcome.json")
        outcome = json.loads((tmp_path / "outcome.json").read_text())
        assert (code, outcome["state"]) == (int(state == parts.FAILED), state)
        assert reason in outcome["reason"]


# -- the whole


@pytest.mark.timeout(600)  # about one minute on two cores; they are not always free
def test_rehearsal(tmp_path):
    target = tmp_path / "a.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--platform", "cpu", "--params", "2e4", "--steps", "2"]
    done = subprocess.run(
        [*command, "--tier", str(tmp_path), "--json", str(target)],
        cwd=ROOT, capture_output=True, text=True, timeout=560, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsed" in done.stdout
    content = json.loads(target.read_text())
    assert {"settings", "versions", "machine", "commit", "time"} <= content.keys()
    assert str(tmp_path) not in target.read_text()
    figures = content["figures"]
    assert (figures["rehearsal"], figures["whole"], figures["passed"]) == (True, True, True)
    outcomes = figures["parts"]
    assert outcomes.keys() == parts.PARTS.keys()
    gpu_only = {name for name, part in parts.PARTS.items() if part.gpu_only}
    assert {name for name, outcome in outcomes.items() if outcome["state"] != parts.MEASURED} == gpu_only
    _check_steps(outcomes)
    assert outcomes["overlap-host"]["figures"]["schedule"]["pushes"] > 1
    assert "not_measured" in outcomes["overlap-host"]["figures"]["timeline"]
    assert len(set(outcomes["forms"]["figures"]["digests"].values())) == 1
    assert outcomes["collectives"]["figures"]["collectives"] > 0
    verdicts = {row["name"]: row["passed"] for row in figures["targets"]}
    assert [name for name, passed in verdicts.items() if passed] == [
        "tests",
        "cond, scan and while beside calls",
        "donation of the whole state",
        "collectives beside the ops, 2 devices",
    ]


def _check_steps(outcomes):
    losses = {name: outcomes[f"step-{name}"]["figures"]["losses"] for name in systems.SYSTEMS}
    for name in systems.SYSTEMS:
        figures = outcomes[f"step-{name}"]["figures"]
        assert figures["peak_bytes"] is None  # the CPU backend does not count it
        assert len(figures["synced_step_s"]) == 2
        assert all(math.isfinite(loss) for loss in figures["losses"])
        assert figures["losses"] == pytest.approx(losses["plain"], rel=1e-3)
        if name in systems.OURS:
            line = figures["moved"][0]
            assert line["update_on"] == name.split("-")[1]
            on_device = line["update_on"] == "device"
            assert (line["to_host_bps"] is None) == on_device
            assert (line["on_device_bps"] is None) != on_device
            assert (figures["tier_bps"] is None) == (figures["misses_per_step"] == 0) == name.startswith("memory")
