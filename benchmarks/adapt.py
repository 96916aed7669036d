"""How the split among tiers follows bandwidths that change while training runs: ``python -m benchmarks.adapt --help``.

1. Steps run back to back, as in ``benchmarks.step``, with gradients given. Before a step named by ``--change`` its
   command is run; it is to change what a tier's device can do, and the ideal split changes with it.
2. Figures: of each step, each tier's share of the bytes written and read beside the ideal one; for each change, how many
   full steps it took until both shares were within ``TOLERANCE`` for good.
3. A PNG of shares against steps (needs matplotlib), and the usual JSON.

Thread contract: the main thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_mlp_offload as jmo
from benchmarks import report, workload
from benchmarks.limit import Bandwidth, ideal_shares
from benchmarks.step import split_tier
from benchmarks.trace import READ, WRITE, Trace
from jax_mlp_offload import native

TOLERANCE = 0.03
_MB = 1e6
Shares = list[list[float]]
"""By step and tier."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Before ``step``, ``command`` makes the device of ``tier`` move ``bps`` bytes/s each way."""

    step: int
    tier: int
    bps: float
    command: str

    @classmethod
    def parse(cls, text: str) -> Change:
        """From ``STEP:TIER:MB/s:COMMAND``."""
        step, tier, bandwidth, command = text.split(":", 3)
        return cls(int(step), int(tier), float(bandwidth) * _MB, command)


@dataclasses.dataclass
class Observed:
    """Shares of each step, and its seconds."""

    written: Shares = dataclasses.field(default_factory=list)
    read: Shares = dataclasses.field(default_factory=list)
    step_s: list[float] = dataclasses.field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    tiers = [split_tier(text) for text in args.tier]
    start = [bps for _, bps in tiers if bps is not None]
    load = workload.Workload.of(int(args.params), args.layers, jnp.bfloat16, 1)
    seen = _run(args, load, [path for path, _ in tiers])
    ideal = ideals(start, args.change, args.steps)
    labels = [pathlib.Path(path).name for path, _ in tiers]
    figures = {
        "tiers": labels,
        "step_s": seen.step_s,
        "ideal": ideal,
        "written": seen.written,
        "read": seen.read,
        "changes": [_settled(change, args, ideal, seen) for change in args.change],
    }
    settings = {name: value for name, value in vars(args).items() if name not in ("tier", "change", "json", "png")}
    settings["changes"] = [(change.step, labels[change.tier], change.bps) for change in args.change]
    report.write_json(args.json, "adapt", settings, figures)
    _show(figures)
    plot(figures, args.png)
    print(f"written: {args.json}, {args.png}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapt", description=__doc__)
    add = parser.add_argument
    add("--params", type=float, default=100e6, help="bf16 elements, such as 100e6")
    add("--layers", type=int, default=25, help="square linear layers")
    add("--tier", action="append", required=True, metavar="PATH:MB/s", help="a folder and its bandwidth at the start")
    add("--change", action="append", type=Change.parse, default=[], metavar="STEP:TIER:MB/s:COMMAND")
    add("--host-memory", default="340MB")
    add("--steps", type=int, default=30)
    add("--json", default=str(report.RESULTS / "adapt.json"))
    add("--png", default=str(report.RESULTS / "adapt.png"))
    args = parser.parse_args(arguments)
    if any(split_tier(text)[1] is None for text in args.tier):
        parser.error("every --tier needs its bandwidth: PATH:MB/s")
    return args


def _run(args: argparse.Namespace, load: workload.Workload, paths: Sequence[str]) -> Observed:
    seen = Observed()
    params, grads = load.draw(seed=0, scale=load.width**-0.5), load.draw(seed=1, scale=1e-3)
    with jmo.Store(*paths, host_memory=args.host_memory) as store:
        trace = Trace(store.engine.scheduler)
        tx = jmo.adamw(1e-4, weight_decay=0.1, store=store)
        step, state = workload.update_step(tx), tx.init(params)
        for index in range(args.steps):
            for change in args.change:
                if change.step == index:
                    subprocess.run(change.command, shell=True, check=True)
            begin_s = native.now_s()
            params, state = jax.block_until_ready(step(params, state, grads))
            end_s = native.now_s()
            seen.step_s.append(end_s - begin_s)
            for kind, shares in ((WRITE, seen.written), (READ, seen.read)):
                sizes = [0] * len(paths)
                for span in trace.between(begin_s, end_s):
                    if span.kind == kind and span.tier is not None:
                        sizes[span.tier] += span.size_bytes
                shares.append([size / (sum(sizes) or 1) for size in sizes])
    return seen


def ideals(start_bps: Sequence[float], changes: Sequence[Change], steps: int) -> Shares:
    """The ideal share of each tier in each step."""
    bps, result = list(start_bps), []
    for index in range(steps):
        for change in changes:
            if change.step == index:
                bps[change.tier] = change.bps
        result.append(ideal_shares([Bandwidth(x, x) for x in bps]))
    return result


def settled_after(shares: Shares, ideal: Shares, first: int, last: int) -> int | None:
    """Full steps after the one at ``first`` until every share is within ``TOLERANCE`` up to ``last``; None: never."""

    def off(index: int) -> float:
        return max(abs(a - b) for a, b in zip(shares[index], ideal[index], strict=True))

    wrong = [index for index in range(first, last) if off(index) > TOLERANCE]
    return None if wrong and wrong[-1] == last - 1 else (wrong[-1] + 1 - first if wrong else 0)


def _settled(change: Change, args: argparse.Namespace, ideal: Shares, seen: Observed) -> dict[str, Any]:
    last = min((other.step for other in args.change if other.step > change.step), default=args.steps)
    return {
        "step": change.step,
        "written_settled_after": settled_after(seen.written, ideal, change.step, last),
        "read_settled_after": settled_after(seen.read, ideal, change.step, last),
    }


def _show(figures: dict[str, Any]) -> None:
    rows = [
        [str(index), *(f"{value:.3f}" for tier in zip(*tiers, strict=True) for value in tier), f"{step_s:.2f}"]
        for index, (*tiers, step_s) in enumerate(
            zip(figures["ideal"], figures["written"], figures["read"], figures["step_s"], strict=True)
        )
    ]
    headings = [f"{name} {what}" for name in figures["tiers"] for what in ("ideal", "written", "read")]
    report.print_table("Shares of each step", ["step", *headings, "s"], rows)
    for change in figures["changes"]:
        print(
            f"change before step {change['step']}: full steps until within {TOLERANCE}: "
            f"written {change['written_settled_after']}, read {change['read_settled_after']}"
        )


def plot(figures: dict[str, Any], path: str) -> None:
    """Shares against steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    steps = range(len(figures["ideal"]))
    for tier, (name, color) in enumerate(zip(figures["tiers"], ("tab:blue", "tab:orange", "tab:green"), strict=False)):
        ideal, written, read = ([row[tier] for row in figures[key]] for key in ("ideal", "written", "read"))
        axes.step(steps, ideal, where="mid", color=color, alpha=0.4, linewidth=4, label=f"{name}: ideal")
        axes.plot(steps, written, color=color, marker="o", markersize=3, label=f"{name}: written")
        axes.plot(steps[1:], read[1:], color=color, linestyle=":", marker="x", markersize=4, label=f"{name}: read")
    for change in figures["changes"]:
        axes.axvline(change["step"] - 0.5, color="gray", linewidth=0.8)
    axes.set(xlabel="step", ylabel="share of bytes", ylim=(0, 1), title="The split follows the devices")
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
