"""What ``benchmarks.step`` makes of a run: figures for the JSON, and tables.

Figures a step are medians or means over the counted steps. Pure but for ``show``, which prints.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report
from benchmarks.limit import Bandwidth, Overlap, UpdateLimit, ideal_shares
from benchmarks.run import Run
from benchmarks.trace import READ, UPDATE, WRITE, Span, activity
from jax_mlp_offload.sizes import format_bytes

_MB = 1e6


def figures(
    run: Run,
    update: UpdateLimit,
    overlap: Overlap,
    iteration_limit_s: float,
    bandwidths: Sequence[Bandwidth],
    labels: Sequence[str],
) -> dict[str, Any]:
    """Everything that was measured, as plain values."""
    assert run.trace is not None
    steps = len(run.steps)
    spans = [run.trace.between(begin_s, end_s) for begin_s, end_s in run.steps]
    phase_s = [_phase_s(step) for step in spans]
    moved = {
        name: sum(tier[name] - before[name] for tier, before in zip(*_tier_stats(run), strict=True)) / steps
        for name in ("bytes_read", "bytes_written")
    }
    return {
        "params": run.load.elements,
        "mode": overlap.value,
        "step_s": run.step_s,
        "median_s": run.median_s,
        "mean_s": statistics.fmean(run.step_s),
        "phase_s": statistics.median(phase_s),
        "limit_s": iteration_limit_s,
        "ratio": run.median_s / iteration_limit_s,
        "mean_ratio": statistics.fmean(run.step_s) / iteration_limit_s,
        "update_limit": {**dataclasses.asdict(update), "update_s": update.update_s},
        "read_bytes_per_param": moved["bytes_read"] / run.load.elements,
        "written_bytes_per_param": moved["bytes_written"] / run.load.elements,
        "records": len(run.record_bytes),
        "slots": run.stats["slots"],
        "slot_bytes": run.stats["slot_bytes"],
        "hits_per_step": (run.stats["hits"] - run.stats_before["hits"]) / steps,
        "misses_per_step": (run.stats["misses"] - run.stats_before["misses"]) / steps,
        "tiers": _tiers(run, spans, bandwidths, labels),
        "kernel": _line(run, spans, UPDATE, None),
        "driver": {
            "events_per_step": run.events / steps,
            "events_per_s": run.events / sum(run.step_s),
            "cpu_s_per_step": run.driver_cpu_s / steps,
            "cpu_us_per_event": run.driver_cpu_s / run.events * 1e6 if run.events else 0.0,
            "share_of_a_core": run.driver_cpu_s / sum(run.step_s),
        },
        "process": {"cpu_s_per_step": run.process_cpu_s / steps, "page_faults_per_step": run.page_faults / steps},
        "memory": memory(run),
    }


def memory(run: Run) -> dict[str, int]:
    """Resident memory after the warm-up and what it should consist of, in bytes."""
    params = run.load.param_bytes
    slots = run.stats["host_bytes"]
    return {
        "imported": run.imported_bytes,
        "peak": run.peak_bytes,
        "steady": run.steady_bytes,
        "params": params,
        "gradients": params,
        "new_params": params,
        "slots": slots,
        "rest_at_peak": run.peak_bytes - 3 * params - slots,
    }


def first_arrival_s(run: Run) -> float:
    """Median seconds from a step's begin until the first gradients came to the update."""
    assert run.trace is not None
    arrivals = run.trace.arrivals_s
    return statistics.median(
        min((at for at in arrivals if begin_s < at <= end_s), default=end_s) - begin_s for begin_s, end_s in run.steps
    )


def _phase_s(spans: Sequence[Span]) -> float:
    """From the first transfer or kernel of a step to its last."""
    if not spans:
        return 0.0
    return max(span.end_s for span in spans) - min(span.begin_s for span in spans)


def _tier_stats(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return run.stats["tiers"], run.stats_before["tiers"]


def _tiers(
    run: Run, spans: Sequence[Sequence[Span]], bandwidths: Sequence[Bandwidth], labels: Sequence[str]
) -> list[dict[str, Any]]:
    steps = len(run.steps)
    after, before = _tier_stats(run)
    written = [a["bytes_written"] - b["bytes_written"] for a, b in zip(after, before, strict=True)]
    shares = ideal_shares(bandwidths)
    return [
        {
            "name": label,
            "bandwidth_bps": bandwidths[tier].sustained_bps,
            "bytes_read_per_step": (after[tier]["bytes_read"] - before[tier]["bytes_read"]) / steps,
            "bytes_written_per_step": written[tier] / steps,
            "share": written[tier] / sum(written) if sum(written) else 0.0,
            "ideal_share": shares[tier],
            READ: _line(run, spans, READ, tier),
            WRITE: _line(run, spans, WRITE, tier),
        }
        for tier, label in enumerate(labels)
    ]


def _line(run: Run, spans: Sequence[Sequence[Span]], kind: str, tier: int | None) -> dict[str, Any]:
    """One tier and direction (or the kernel) over all steps: means, offsets from the step's begin and to its end."""
    done = [
        (activity(step, kind, tier, begin_s), end_s - begin_s)
        for step, (begin_s, end_s) in zip(spans, run.steps, strict=True)
    ]
    busy = [(act, step_s) for act, step_s in done if act.requests]
    if not busy:
        return {"requests": 0.0, "busy_s": 0.0, "busy_share": 0.0, "bps_while_busy": 0.0}
    total_busy_s = sum(act.busy_s for act, _ in done)
    return {
        "requests": statistics.fmean(act.requests for act, _ in done),
        "busy_s": total_busy_s / len(done),
        "busy_share": total_busy_s / sum(step_s for _, step_s in done),
        "bps_while_busy": sum(act.size_bytes for act, _ in done) / total_busy_s,
        "idle_before_s": statistics.fmean(act.first_s for act, _ in busy),
        "idle_within_s": statistics.fmean(act.last_s - act.first_s - act.busy_s for act, _ in busy),
        "idle_after_s": statistics.fmean(step_s - act.last_s for act, step_s in busy),
    }


# -- tables


def show(made: Mapping[str, Any], memory: bool = False) -> None:
    """Prints the figures."""
    limit = made["update_limit"]
    print(f"{made['params']:,} params; {made['mode']}; {len(made['step_s'])} steps")
    print(
        f"step {made['median_s']:.3f} s (median; mean {made['mean_s']:.3f}, "
        f"{min(made['step_s']):.3f} to {max(made['step_s']):.3f}), phase {made['phase_s']:.3f} s\n"
        f"limit {made['limit_s']:.3f} s: {format_bytes(limit['moved_bytes'])} each way in {limit['io_s']:.3f} s, "
        f"kernel {limit['kernel_s']:.3f} s; forward and backward {made['passes_s']:.3f} s, first gradient after "
        f"{made['first_gradient_s']:.3f} s\n"
        f"ratio {made['ratio']:.3f} (mean {made['mean_ratio']:.3f})\n"
        f"{made['records']} records in {made['slots']} slots of {format_bytes(made['slot_bytes'])}: "
        f"{made['hits_per_step']:.1f} hits and {made['misses_per_step']:.1f} misses a step, "
        f"{made['read_bytes_per_param']:.2f} bytes read and {made['written_bytes_per_param']:.2f} written a param"
    )
    headings = ["", "MB a step", "share", "ideal", "requests", "MB/s busy", "busy s", "busy", "idle before", "within",
                "after"]  # fmt: skip
    rows = []
    for tier in made["tiers"]:
        for kind, name in ((READ, "bytes_read_per_step"), (WRITE, "bytes_written_per_step")):
            share = [f"{tier['share']:.1%}", f"{tier['ideal_share']:.1%}"] if kind == WRITE else ["", ""]
            rows.append([f"{tier['name']} {kind}", f"{tier[name] / _MB:.0f}", *share, *_cells(tier[kind])])
    rows.append(["kernel", "", "", "", *_cells(made["kernel"])])
    report.print_table("tiers and kernel, means of a step", headings, rows)
    driver = made["driver"]
    print(
        f"driver: {driver['events_per_s']:.0f} events/s, {driver['events_per_step']:.0f} and "
        f"{driver['cpu_s_per_step'] * 1e3:.1f} ms of CPU a step ({driver['cpu_us_per_event']:.0f} us an event, "
        f"{driver['share_of_a_core']:.1%} of a core); process: "
        f"{made['process']['cpu_s_per_step']:.2f} s of CPU and "
        f"{made['process']['page_faults_per_step']:.0f} page faults a step"
    )
    if memory:
        parts = {name: format_bytes(size) for name, size in made["memory"].items()}
        print("resident memory: " + ", ".join(f"{name} {size}" for name, size in parts.items()))


def _cells(line: Mapping[str, Any]) -> list[str]:
    if not line["requests"]:
        return ["0", "", "", "", "", "", ""]
    return [
        f"{line['requests']:.1f}",
        f"{line['bps_while_busy'] / _MB:.0f}",
        f"{line['busy_s']:.3f}",
        f"{line['busy_share']:.0%}",
        *(f"{line[name]:.3f}" for name in ("idle_before_s", "idle_within_s", "idle_after_s")),
    ]
