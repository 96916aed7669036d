"""The parts of the GPU check: what each runs, and how it is run in a process of its own.

A part's process gets settings as JSON and leaves its outcome as JSON. Whatever it does (an exception, a signal, a hang
that is ended after a while), the outcome says so and the next part runs. Thread contract: the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu import build, numbers, overlap, suites, timing
from benchmarks.gpu.settings import NotMeasured, Settings, environment
from benchmarks.gpu.systems import SYSTEMS

MEASURED, NOT_MEASURED, FAILED = "measured", "not measured here", "failed"
_TAIL = 4000  # characters of a failed part's output


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the parts.

    Attributes:
      run: Gives the figures.
      devices: How many a rehearsal makes up; 0: it needs none at its start.
      gpu_only: A rehearsal leaves it out.
      variables: Added to the process's environment.
    """

    run: Callable[[Settings], dict[str, Any]]
    devices: int = 1
    gpu_only: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


PARTS: dict[str, Part] = {
    "build": Part(build.build, devices=0, gpu_only=True),
    "suites": Part(suites.suites),
    "link": Part(timing.link, gpu_only=True),
    "passes": Part(timing.passes),
    **{f"step-{name}": Part(functools.partial(timing.steps, name)) for name in SYSTEMS},
    "overlap-host": Part(functools.partial(overlap.overlap, "memory-host")),
    "overlap-device": Part(functools.partial(overlap.overlap, "memory-device"), gpu_only=True),
    "forms": Part(numbers.forms),
    "forms-without-command-buffers": Part(
        numbers.forms, gpu_only=True, variables={"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    ),
    "donation": Part(numbers.donation),
    "collectives": Part(numbers.collectives, devices=2),
}


def run(name: str, settings: Settings, timeout_s: float, programs: str) -> dict[str, Any]:
    """One part.

    Args:
      name: of ``PARTS``.
      settings: what it is told.
      timeout_s: after which it is ended.
      programs: folder where the parts leave compiled programs for each other: many have the same.

    Returns:
      Its ``state``, ``seconds``, and ``figures``, or the ``reason`` why there are none.
    """
    part = PARTS[name]
    if part.gpu_only and not settings.on_gpu:
        return {"state": NOT_MEASURED, "reason": "it needs a GPU", "seconds": 0.0}
    variables = environment(settings) | {
        "JAX_COMPILATION_CACHE_DIR": programs,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for key, value in part.variables.items():
        variables[key] = f"{variables.get(key, '')} {value}".strip()
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        target = pathlib.Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, "--settings", settings.to_json()]
        outcome = _wait([*command, "--json", str(target)], variables, timeout_s, target)
    return outcome | {"seconds": time.monotonic() - begin_s}


def run_here(name: str, settings: Settings, target: pathlib.Path) -> int:
    """Runs a part in this process and leaves its outcome in a file; the exit code of the process."""
    outcome: dict[str, Any]
    try:
        with settings.ready(PARTS[name].devices):
            outcome = {"state": MEASURED, "figures": PARTS[name].run(settings)}
    except NotMeasured as reason:
        outcome = {"state": NOT_MEASURED, "reason": str(reason)}
    except Exception:  # the others go on, so this is where it ends; all of it is told
        outcome = {"state": FAILED, "reason": traceback.format_exc()[-_TAIL:]}
    target.write_text(json.dumps(outcome), encoding="utf-8")
    return 1 if outcome["state"] == FAILED else 0


def _wait(command: list[str], variables: dict[str, str], timeout_s: float, target: pathlib.Path) -> dict[str, Any]:
    """Runs a part's process, with all that it starts, to its end or the deadline."""
    child = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        return {"state": FAILED, "reason": f"it had not ended after {timeout_s:g} s: {output[-_TAIL:]}"}
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    if target.exists():
        outcome: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return outcome
    return {"state": FAILED, "reason": f"its process ended with {child.returncode}: {output[-_TAIL:]}"}
