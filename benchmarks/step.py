"""Time of an update, or of an iteration, beside the least time it could take: ``python -m benchmarks.step --help``.

1. Bandwidth of each tier: as given (``--tier PATH:MB/s``), from its limits, or measured (``pump``).
2. Steps run back to back; the first ``WARM_UP`` are not counted (the first reads nothing, compiles, and makes files).
3. Figures: time, limit and ratio; bytes, share and busy time of each tier and direction; hits and misses; what the
   driver's thread costs; resident memory.

Without ``--backward real`` gradients are given, and a step is update and apply. With it a step is forward, backward and
update: each layer's update begins when its gradient is there, or, with ``--arrival all``, behind a clip by global norm.
Thread contract: the main thread.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_mlp_offload as jmo
from benchmarks import limit, pump, report, step_report, workload
from benchmarks.limit import Bandwidth, Overlap
from benchmarks.run import Run
from benchmarks.trace import Trace
from jax_mlp_offload import native
from jax_mlp_offload.sizes import parse_bytes

WARM_UP = 2
_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
_MB = 1e6
Step = Callable[[workload.Params, Any, Any], tuple[workload.Params, Any]]


@dataclasses.dataclass(frozen=True)
class Tier:
    """A tier to run on, the name it has in results, and its bandwidth if that was given."""

    file: jmo.File
    label: str
    bandwidth: Bandwidth | None


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.devices > 1:
        jax.config.update("jax_num_cpu_devices", args.devices)
    load = workload.Workload.of(int(args.params), args.layers, _DTYPES[args.dtype], args.devices)
    with contextlib.ExitStack() as stack:
        if not args.tier:
            args.tier = [stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))]
        tiers = _tiers(args)
        bandwidths = pump.bandwidths([(tier.file, tier.bandwidth) for tier in tiers])
        kernel_s = workload.time_kernel(load.elements, load.dtype, args.kernel_threads or report.machine()["cores"])
        passes_s = workload.time_passes(load) if args.backward == "real" else 0.0
        run = _measure(args, load, tiers)
    update = limit.update_limit(run.record_bytes, run.stats["slots"], bandwidths, kernel_s)
    overlap = _overlap(args)
    first_gradient_s = step_report.first_arrival_s(run)
    if overlap is Overlap.BARRIER:
        passes_s = first_gradient_s  # nothing of ours runs before: this is what the passes took here
    iteration_s = limit.iteration_limit(overlap, update.update_s, passes_s, first_gradient_s)
    figures = step_report.figures(run, update, overlap, iteration_s, bandwidths, [tier.label for tier in tiers])
    figures |= {"passes_s": passes_s, "first_gradient_s": first_gradient_s}
    settings = {
        **{name: value for name, value in vars(args).items() if name not in ("tier", "json")},
        "tiers": [
            {"name": tier.label, "bandwidth": "measured" if tier.bandwidth is None else "given"} for tier in tiers
        ],
        "warm_up_steps": WARM_UP,
    }
    report.write_json(args.json, "step", settings, figures)
    step_report.show(figures, memory=args.memory_report)
    print(f"written: {args.json}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    add = parser.add_argument
    add("--params", type=float, default=50e6, help="elements, such as 100e6")
    add("--layers", type=int, default=25, help="square linear layers")
    add("--dtype", choices=_DTYPES, default="bf16", help="of params and gradients")
    add("--tier", action="append", default=[], metavar="PATH[:MB/s]", help="a folder; its bandwidth each way (10^6)")
    add("--read-limit", action="append", default=[], metavar="BYTES/s", help="one a tier, in order, or 'none'")
    add("--write-limit", action="append", default=[], metavar="BYTES/s")
    add("--host-memory", default=None, help="such as 340MB; without it: the least that runs well")
    add("--steps", type=int, default=12, help=f"of which the first {WARM_UP} are not counted")
    add("--backward", choices=["none", "real"], default=None, help="none: gradients are given")
    add("--arrival", choices=["all", "backward"], default=None, help="whether updates wait for the last gradient")
    add("--subgroup-elements", type=int, default=None)
    add("--order", choices=["resident-first", "sequential", "alternating"], default="resident-first")
    add("--devices", type=int, default=1, help="CPU devices; layers are sharded over them by rows")
    add("--kernel-threads", type=int, default=None)
    add("--memory-report", action="store_true", help="print resident memory and what it consists of")
    add("--json", default=str(report.RESULTS / "step.json"), help="where the figures go")
    args = parser.parse_args(arguments)
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} of the warm-up")
    if args.backward is None:
        args.backward = "real" if args.arrival == "backward" else "none"
    if args.arrival is None:
        args.arrival = "backward" if args.backward == "real" else "all"
    if args.backward == "none" and args.arrival == "backward":
        parser.error("--arrival backward needs --backward real")
    for name in ("read_limit", "write_limit"):
        if len(getattr(args, name)) > max(1, len(args.tier)):
            parser.error(f"more --{name.replace('_', '-')} than tiers")
    return args


def _overlap(args: argparse.Namespace) -> Overlap:
    if args.backward == "none":
        return Overlap.GIVEN
    return Overlap.BACKWARD if args.arrival == "backward" else Overlap.BARRIER


# -- tiers


def _tiers(args: argparse.Namespace) -> list[Tier]:
    tiers: list[Tier] = []
    for index, text in enumerate(args.tier):
        path, given = split_tier(text)
        limits = {
            name: values[index]
            for name, values in (("read_limit", args.read_limit), ("write_limit", args.write_limit))
            if index < len(values) and values[index] != "none"
        }
        bandwidth = None
        if given is not None:
            bandwidth = Bandwidth(given, given)
        elif len(limits) == 2:
            read_bps, write_bps = (parse_bytes(limits[name], name) for name in ("read_limit", "write_limit"))
            bandwidth = Bandwidth(read_bps, write_bps)
        label = pathlib.Path(path).name if len(args.tier) > 1 else "tier"
        if any(tier.label == label for tier in tiers):
            label = f"{label}-{index}"
        tiers.append(Tier(jmo.File(path, **limits), label, bandwidth))
    return tiers


def split_tier(text: str) -> tuple[str, float | None]:
    """``PATH:400`` as the path and 400e6 bytes/s; ``PATH`` as the path and None."""
    path, colon, number = text.rpartition(":")
    if not colon:
        return text, None
    try:
        return path, float(number) * _MB
    except ValueError:
        return text, None


# -- the steps


def _measure(args: argparse.Namespace, load: workload.Workload, tiers: Sequence[Tier]) -> Run:
    run = Run(load, imported_bytes=report.resident_bytes()[0])
    params = load.draw(seed=0, scale=load.width**-0.5)
    with jmo.Store(
        *(tier.file for tier in tiers),
        host_memory=args.host_memory,
        subgroup_elements=args.subgroup_elements,
        order=args.order,
        kernel_threads=args.kernel_threads,
    ) as store:
        run.trace = Trace(store.engine.scheduler)
        tx = jmo.adamw(1e-4, weight_decay=0.1, store=store, mesh=load.mesh, param_specs=load.specs)
        if args.backward == "none":
            step: Step = workload.update_step(tx)
            operand: Any = load.draw(seed=1, scale=1e-3)
        else:
            if args.arrival == "all":
                tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
            step, operand = workload.train_step(tx, load.loss), load.batch()
        state = tx.init(params)
        for index in range(args.steps):
            if index == WARM_UP:
                _begin_counting(run, store)
            begin_s = native.now_s()
            params, state = jax.block_until_ready(step(params, state, operand))
            if index >= WARM_UP:
                run.steps.append((begin_s, native.now_s()))
        _end_counting(run, store)
    return run


def _begin_counting(run: Run, store: jmo.Store) -> None:
    assert run.trace is not None
    store.flush()
    run.stats_before = store.stats()
    run.events = -run.trace.events
    run.driver_cpu_s = -_driver_cpu_s(store)
    run.process_cpu_s = -time.process_time()
    run.page_faults = -resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    report.reset_peak()


def _end_counting(run: Run, store: jmo.Store) -> None:
    assert run.trace is not None
    run.events += run.trace.events
    run.driver_cpu_s += _driver_cpu_s(store)
    run.process_cpu_s += time.process_time()
    run.page_faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run.steady_bytes, run.peak_bytes = report.resident_bytes()
    run.stats = store.stats()
    run.record_bytes = [record.size_bytes for record in store.engine.scheduler.records]


def _driver_cpu_s(store: jmo.Store) -> float:
    thread_id = store.engine.driver._thread.native_id
    assert thread_id is not None
    return report.thread_cpu_s(thread_id)


if __name__ == "__main__":
    raise SystemExit(main())
