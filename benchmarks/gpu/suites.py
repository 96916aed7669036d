"""The tests of numbers, failures and wrappers on the platform that is checked: pytest in a process of its own.

What they compare with is plain optax on the same device. Suites that need the eight devices which the tests' CPU has are
run where there are as many. Thread contract: the main thread.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.gpu.settings import Settings, environment

ROOT = pathlib.Path(__file__).parents[2]
SUITES = ("smoke", "optimizers", "accumulate", "wrappers", "training_loops", "failures", "bad_input", "stats")
MESH_SUITES = ("mesh", "accumulate_mesh", "replicas", "flax_sharded", "param_shardings")
MESH_DEVICES = 8
REHEARSED = ("tests/test_smoke.py::test_kernels_and_tiers[adamw-bfloat16]",)


def suites(settings: Settings) -> dict[str, Any]:
    """Runs them; counts of tests by outcome, and the names of those that failed."""
    devices = jax.local_device_count()
    chosen: Sequence[str] = REHEARSED
    options = ["-p", "no:cacheprovider"]
    if not settings.on_gpu:
        options += ["--emulate", "0"]
    else:
        names = SUITES + (MESH_SUITES if devices >= MESH_DEVICES else ())
        chosen = [f"tests/test_{name}.py" for name in names]
        options += ["--platform", settings.platform]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "junit.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--tb=short", *options, f"--junit-xml={report}", *chosen],
            cwd=ROOT,
            env=environment(settings) | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and without results: {done.stdout[-2000:]}")
        figures = outcomes(report.read_text(encoding="utf-8"))
    if settings.on_gpu and devices < MESH_DEVICES:
        figures["not_run"] = [f"test_{name}: takes {MESH_DEVICES} devices" for name in MESH_SUITES]
    if figures["failed"]:
        figures["output"] = done.stdout[-4000:]
    return figures | {"suites": list(chosen)}


def outcomes(junit: str) -> dict[str, Any]:
    """What a JUnit report of pytest says."""
    cases = list(xml.etree.ElementTree.fromstring(junit).iter("testcase"))

    def named(*kinds: str) -> list[str]:
        found = [case for case in cases if any(case.find(kind) is not None for kind in kinds)]
        return [f"{case.get('classname')}::{case.get('name')}" for case in found]

    failed, skipped = named("failure", "error"), named("skipped")
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": failed,
    }
