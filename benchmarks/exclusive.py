"""What taking turns on a shared device costs or gains: ``python -m benchmarks.exclusive --help``.

1. Several processes train at once, each with its own store on the same tiers, for the same number of steps.
2. That is done with ``exclusive=False``, ``True`` and ``"auto"``, in turn, ``--rounds`` times, so that drift of the
   machine meets all alike.
3. Figures: bytes/s of all processes together, each way, over the time in which all of them ran; what ``auto`` chose and
   why; turns taken and seconds waited for them.

A token bucket (a throttled device) shows no interference between processes, so nothing can be gained there: on it this
measures the cost. Thread contract: the main thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_mlp_offload as jmo
from benchmarks import report, workload
from benchmarks.step import split_tier

WARM_UP = 2
_MODES: tuple[bool | str, ...] = (False, True, "auto")
_MB = 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.child is not None:
        print(json.dumps(_train(args, json.loads(args.child))))
        return 0
    runs: dict[str, list[dict[str, Any]]] = {str(mode): [] for mode in _MODES}
    for _ in range(args.rounds):
        for mode in _MODES:
            runs[str(mode)].append(_together(args, mode))
    medians = {mode: statistics.median(run["total_bps"] for run in results) for mode, results in runs.items()}
    figures = {
        "total_bps": medians,
        "true_to_false": medians["True"] / medians["False"],
        "auto_to_false": medians["auto"] / medians["False"],
        "runs": runs,
    }
    settings = {name: value for name, value in vars(args).items() if name not in ("tier", "json", "child")}
    report.write_json(args.json, "exclusive", settings, figures)
    _show(figures)
    print(f"written: {args.json}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exclusive", description=__doc__)
    add = parser.add_argument
    add("--params", type=float, default=50e6, help="bf16 elements of each process")
    add("--layers", type=int, default=25)
    add("--tier", action="append", required=True, metavar="PATH", help="a folder that all processes use")
    add("--host-memory", default="170MB", help="of each process")
    add("--processes", type=int, default=2)
    add("--steps", type=int, default=40, help=f"of which the first {WARM_UP} are not counted")
    add("--rounds", type=int, default=3)
    add("--json", default=str(report.RESULTS / "exclusive.json"))
    add("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _together(args: argparse.Namespace, mode: bool | str) -> dict[str, Any]:
    """One run of all processes; bandwidth is that of the time in which every one of them ran steps."""
    command = [sys.executable, "-m", "benchmarks.exclusive", "--child", json.dumps(mode)]
    for name in ("params", "layers", "host_memory", "steps"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    for tier in args.tier:
        command += ["--tier", tier]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(args.processes)]
    results = []
    for child in children:
        out, _ = child.communicate()
        if child.returncode:
            raise RuntimeError(f"a process of the benchmark failed with {child.returncode}")
        results.append(json.loads(out.splitlines()[-1]))
    begin_s = max(result["moments"][0][0] for result in results)
    end_s = min(result["moments"][-1][0] for result in results)
    total_bps = sum(bytes_at(r["moments"], end_s) - bytes_at(r["moments"], begin_s) for r in results) / (
        end_s - begin_s
    )
    return {"total_bps": total_bps, "together_s": end_s - begin_s, "exclusive": [r["exclusive"] for r in results]}


def bytes_at(moments: list[list[float]], time_s: float) -> float:
    """Bytes moved each way until a time, between the ends of steps in proportion."""
    for (s0, b0), (s1, b1) in itertools.pairwise(moments):
        if s0 <= time_s <= s1:
            return b0 + (b1 - b0) * (time_s - s0) / (s1 - s0)
    return moments[-1][1]


def _train(args: argparse.Namespace, mode: bool | str) -> dict[str, Any]:
    load = workload.Workload.of(int(args.params), args.layers, jnp.bfloat16, 1)
    params, grads = load.draw(seed=0, scale=load.width**-0.5), load.draw(seed=1, scale=1e-3)
    moments = []
    paths = [split_tier(text)[0] for text in args.tier]
    with jmo.Store(*paths, host_memory=args.host_memory, exclusive=mode) as store:
        tx = jmo.adamw(1e-4, weight_decay=0.1, store=store)
        step, state = workload.update_step(tx), tx.init(params)
        for index in range(args.steps):
            params, state = jax.block_until_ready(step(params, state, grads))
            if index >= WARM_UP - 1:
                stats = store.stats()
                moved = sum(tier["bytes_read"] + tier["bytes_written"] for tier in stats["tiers"]) / 2
                moments.append((time.monotonic(), moved))
        return {"moments": moments, "exclusive": [tier["exclusive"] for tier in store.stats()["tiers"]]}


def _show(figures: dict[str, Any]) -> None:
    rows = [
        [
            mode,
            f"{figures['total_bps'][mode] / _MB:.0f}",
            ", ".join(f"{run['total_bps'] / _MB:.0f}" for run in runs),
            "; ".join(sorted({tier["why"] for run in runs for process in run["exclusive"] for tier in process})),
        ]
        for mode, runs in figures["runs"].items()
    ]
    report.print_table("All processes together, each way", ["exclusive=", "median MB/s", "runs", "why"], rows)
    print(f"auto / False: {figures['auto_to_false']:.4f}, True / False: {figures['true_to_false']:.4f}")


if __name__ == "__main__":
    raise SystemExit(main())
