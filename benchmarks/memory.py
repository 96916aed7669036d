"""Whether resident memory grows with the state: ``python -m benchmarks.memory``.

Runs ``benchmarks.step`` in processes of their own for two numbers of params with the same host memory. What remains of
the peak after params, gradients, new params and slots must be the same to within ``ALLOWED_BYTES``. Needs disk for the
larger state (10 bytes a bfloat16 param) and memory for three times the larger params.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from jax_mlp_offload.sizes import format_bytes

ALLOWED_BYTES = 200 * 10**6
_SHOWN = ("peak", "steady", "imported", "params", "gradients", "new_params", "slots", "rest_at_peak")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--params", type=float, nargs=2, default=(50e6, 400e6), metavar=("SMALL", "LARGE"))
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--host-memory", default="170MB", help="the same for both")
    parser.add_argument("--tier", action="append", default=[], help="as for benchmarks.step; else a temporary folder")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", default=str(report.RESULTS / "memory.json"), help="where the figures go")
    args = parser.parse_args(arguments)
    runs = [_run(args, params) for params in args.params]
    report.print_table(
        f"resident memory after the warm-up, host memory {args.host_memory}",
        ["", *(f"{run['params']:,} params" for run in runs)],
        [[name.replace("_", " "), *(format_bytes(run["memory"][name]) for run in runs)] for name in _SHOWN],
    )
    small, large = (run["memory"]["rest_at_peak"] for run in runs)
    passed = abs(large - small) <= ALLOWED_BYTES
    print(
        f"the rest differs by {(large - small) / 1e6:+.1f} MB, {ALLOWED_BYTES / 1e6:.0f} MB are allowed: "
        f"{'passed' if passed else 'FAILED'}"
    )
    settings = {name: value for name, value in vars(args).items() if name not in ("tier", "json")}
    figures = {
        "runs": [{"params": run["params"], "memory": run["memory"], "median_s": run["median_s"]} for run in runs],
        "difference_bytes": large - small,
        "allowed_bytes": ALLOWED_BYTES,
        "passed": passed,
    }
    report.write_json(args.json, "memory", settings, figures)
    print(f"written: {args.json}")
    return 0 if passed else 1


def _run(args: argparse.Namespace, params: float) -> dict[str, Any]:
    """Figures of ``benchmarks.step`` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        target = pathlib.Path(folder) / "step.json"
        command = [sys.executable, "-m", "benchmarks.step", "--params", str(params), "--dtype", args.dtype]
        command += ["--host-memory", args.host_memory, "--steps", str(args.steps), "--json", str(target)]
        for tier in args.tier:
            command += ["--tier", tier]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))["figures"]
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
