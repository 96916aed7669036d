"""The pre-training program, in processes of its own or in this one, compiled as quickly as XLA can.

Compiling takes most of the time of such short runs, and no test looks at how fast their programs are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parent.parent
UNOPTIMIZED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
TIMEOUT_S = 200


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """For this process; what was compiled so is not left to other tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        jax.clear_caches()


@contextlib.contextmanager
def pretraining(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """The program, started; it and its children are killed if they still run at the end."""
    command = [sys.executable, "-m", "models.pretrain", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, **UNOPTIMIZED}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)


def run_pretrain(*arguments: str | Path) -> tuple[int, str, str]:
    """The program's exit code, output and errors."""
    with pretraining(*arguments) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output, errors


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    """What a run recorded, one dict a step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_in(folder: Path) -> list[float]:
    """One a step."""
    return [step["loss"] for step in metrics_in(folder)]


def bytes_in(folder: Path, key: str) -> int:
    """The sum of ``bytes_read`` or ``bytes_written`` over steps and tiers."""
    return sum(tier[key] for step in metrics_in(folder) for tier in step["tiers"])


def steps_saved(folder: Path) -> list[int]:
    """The steps of which a run has left whole checkpoints, sorted."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
