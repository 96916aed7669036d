"""Time of an update beside its limit where 1, 2, 4 processes share the tiers: ``python -m benchmarks.scaling --help``.

Weak scaling: every process of one ``jax.distributed`` job on this machine adds the same shard of the params, one CPU
device and memory for its part of the state; the storage stays what it is. Once bandwidth is the limit, the time for each
param of the job is the same for any number of processes.

1. Bandwidth of each tier: as given (``--tier PATH:MB/s``), or measured once beforehand (``pump``).
2. All numbers of processes in turn, ``--rounds`` times, so that drift of the machine meets all alike. Gradients are given;
   steps run back to back, and the first ``WARM_UP`` are not counted.
3. Figures: seconds of a step (that of the slowest process) and for each 10^9 params of the job; bytes/s of all
   processes together, each way; cores in use. The limit is ``sum of (N - K) b over processes / sum of X over tiers``.

The limit knows of no cores: where those of a machine are all busy, or others use them, a ratio tells of that too. Thread
contract: the main thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_mlp_offload as jmo
from benchmarks import limit, pump, report, workload
from benchmarks.limit import Bandwidth, UpdateLimit
from benchmarks.step import split_tier
from models.launch import free_port

WARM_UP = 2
_AXIS = "fsdp"
_EXCLUSIVE: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
_MB = 1e6
_G = 1e9


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of a job, and where it leaves what it has measured."""

    index: int
    processes: int
    port: int
    result: str


@dataclasses.dataclass(frozen=True)
class Result:
    """What one process has measured. Times are those of ``time.monotonic``, which all processes share."""

    ends_s: list[float]  # of the last step of the warm-up and of each counted one
    moved_bytes: float  # each way, in the counted steps
    misses: int  # likewise
    cpu_s: float  # of this process, likewise
    machine_busy_s: float  # of all cores, whoever used them, likewise
    record_bytes: list[int]
    slots: int
    why_turns: list[str]  # by tier


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.child is not None:
        return _be_member(args, Member(**json.loads(args.child)))
    shard = _shard(args)
    tiers = [(jmo.File(path), None if bps is None else Bandwidth(bps, bps)) for path, bps in map(split_tier, args.tier)]
    bandwidths = pump.bandwidths(tiers)
    kernel_s = workload.time_kernel(shard.elements, jnp.bfloat16, report.machine()["cores"])
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in args.processes}
    for _ in range(args.rounds):
        for count in args.processes:
            results = _together(args, count)
            runs[count].append(run_figures(results, bandwidths, shard.elements, kernel_s))
    labels = [f"{index}-{pathlib.Path(split_tier(text)[0]).name}" for index, text in enumerate(args.tier)]
    figures = {
        "params_per_process": shard.elements,
        "tiers": {label: bandwidth.sustained_bps for label, bandwidth in zip(labels, bandwidths, strict=True)},
        "total_bps": sum(bandwidth.sustained_bps for bandwidth in bandwidths),
        "jobs": jobs(runs),
    }
    settings = {name: value for name, value in vars(args).items() if name not in ("tier", "json", "png", "child")}
    settings["bandwidths"] = ["measured" if split_tier(text)[1] is None else "given" for text in args.tier]
    report.write_json(args.json, "scaling", {**settings, "warm_up_steps": WARM_UP}, figures)
    _show(figures)
    plot(figures, args.png)
    print(f"written: {args.json}, {args.png}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    add = parser.add_argument
    add("--params", type=float, default=50e6, help="bf16 elements of each process")
    add("--layers", type=int, default=25)
    add("--tier", action="append", required=True, metavar="PATH[:MB/s]", help="a folder that all processes use, and its "
        "device's bandwidth each way (10^6)")  # fmt: skip
    add("--host-memory", default="170MB", help="of each process")
    add("--processes", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    add("--steps", type=int, default=22, help=f"of which the first {WARM_UP} are not counted")
    add("--rounds", type=int, default=3)
    add("--exclusive", choices=_EXCLUSIVE, default="false", help="turns on devices; auto: with its trial of 22 steps")
    add("--json", default=str(report.RESULTS / "scaling.json"))
    add("--png", default=str(report.RESULTS / "scaling.png"))
    add("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} of the warm-up")
    if min(args.processes) < 1 or len(set(args.processes)) < len(args.processes):
        parser.error("--processes must be different numbers of 1 or more")
    return args


def _shard(args: argparse.Namespace) -> workload.Workload:
    return workload.Workload.of(int(args.params), args.layers, jnp.bfloat16, 1)


# -- a job


def _together(args: argparse.Namespace, processes: int) -> list[Result]:
    """Runs one job; what each process has measured.

    Raises:
      RuntimeError: if a process fails. The others, which would wait for it in a collective, are killed.
    """
    command = [sys.executable, "-m", "benchmarks.scaling"]
    for name in ("params", "layers", "host_memory", "steps", "exclusive"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    for tier in args.tier:
        command += ["--tier", tier]
    port = free_port()
    address = f"127.0.0.1:{port}"
    # a proxy of the environment cannot be asked for this machine's own address
    env = {**os.environ, "JAX_COORDINATOR_BIND_ADDRESS": address, "no_grpc_proxy": "127.0.0.1"}
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        members = [Member(i, processes, port, str(pathlib.Path(folder) / f"{i}.json")) for i in range(processes)]
        children: list[subprocess.Popen[bytes]] = []
        try:
            for member in members:
                child = [*command, "--child", json.dumps(dataclasses.asdict(member))]
                # Gloo tells of its connections on the standard output
                children.append(subprocess.Popen(child, env=env, stdout=subprocess.DEVNULL))
            _wait(children)
        finally:
            for process in children:
                process.kill()
                process.wait()
        return [Result(**json.loads(pathlib.Path(member.result).read_text())) for member in members]


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well."""
    left = list(children)
    while left:
        for child in left:
            if child.poll():
                raise RuntimeError(f"a process of the benchmark failed with {child.returncode}")
        left = [child for child in left if child.returncode is None]
        time.sleep(0.1)


def _be_member(args: argparse.Namespace, member: Member) -> int:
    """One process of a job."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_check_proxy_envs", False)  # JAX warns of no_grpc_proxy too
        jax.distributed.initialize(f"127.0.0.1:{member.port}", member.processes, member.index)
        result = _train(args, member.index)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the ordinary way out would wait for the others, who wait for this one
    pathlib.Path(member.result).write_text(json.dumps(dataclasses.asdict(result)))
    return 0


def _train(args: argparse.Namespace, index: int) -> Result:
    shard = _shard(args)
    mesh = Mesh(np.array(jax.devices()), (_AXIS,))
    params = _sharded(shard.draw(seed=2 * index, scale=shard.width**-0.5), mesh)
    grads = _sharded(shard.draw(seed=2 * index + 1, scale=1e-3), mesh)
    ends_s = []
    paths = [split_tier(text)[0] for text in args.tier]
    with jmo.Store(*paths, host_memory=args.host_memory, exclusive=_EXCLUSIVE[args.exclusive]) as store:
        specs = dict.fromkeys(params, PartitionSpec(_AXIS))
        tx = jmo.adamw(1e-4, weight_decay=0.1, store=store, mesh=mesh, param_specs=specs)
        step, state = workload.update_step(tx), tx.init(params)
        for number in range(args.steps):
            params, state = jax.block_until_ready(step(params, state, grads))
            if number == WARM_UP - 1:
                before, cpu_s, machine_s = store.stats(), time.process_time(), _machine_busy_s()
            if number >= WARM_UP - 1:
                ends_s.append(time.monotonic())
        cpu_s, machine_s = time.process_time() - cpu_s, _machine_busy_s() - machine_s
        after = store.stats()
        return Result(
            ends_s,
            (_moved_bytes(after) - _moved_bytes(before)) / 2,
            after["misses"] - before["misses"],
            cpu_s,
            machine_s,
            [record.size_bytes for record in store.engine.scheduler.records],
            after["slots"],
            [tier["exclusive"]["why"] for tier in after["tiers"]],
        )


def _sharded(shard: workload.Params, mesh: Mesh) -> workload.Params:
    """Arrays of the whole job, of which ``shard`` is what this process has: its rows."""
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    rows = mesh.devices.size
    return {
        name: jax.make_array_from_single_device_arrays((rows * x.shape[0], x.shape[1]), sharding, [x])
        for name, x in shard.items()
    }


def _moved_bytes(stats: dict[str, Any]) -> int:
    """Read and written."""
    return sum(tier["bytes_read"] + tier["bytes_written"] for tier in stats["tiers"])


def _machine_busy_s() -> float:
    """Seconds of all cores since the machine started in which they did something for anyone."""
    line = pathlib.Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


# -- figures


def run_figures(
    results: Sequence[Result], bandwidths: Sequence[Bandwidth], params_per_process: int, kernel_s: float
) -> dict[str, Any]:
    """What one job has measured, beside its limit.

    Args:
      results: one a process.
      bandwidths: one a tier; tiers on one device share one.
      params_per_process: elements.
      kernel_s: seconds of the kernel over the params of one process, with all cores to itself.
    """
    parts = [limit.update_limit(r.record_bytes, r.slots, bandwidths, kernel_s) for r in results]
    # devices and cores are shared: what is least for each process alone adds up
    least = UpdateLimit(*(sum(values) for values in zip(*map(dataclasses.astuple, parts), strict=True)))
    ends_s = [max(ends) for ends in zip(*(r.ends_s for r in results), strict=True)]
    step_s = [end_s - begin_s for begin_s, end_s in itertools.pairwise(ends_s)]
    window_s = ends_s[-1] - ends_s[0]
    mean_s = window_s / len(step_s)
    core_s = window_s * report.machine()["cores"]
    total_bps = sum(bandwidth.sustained_bps for bandwidth in bandwidths)
    moved_bps = sum(r.moved_bytes for r in results) / window_s
    return {
        "step_s": step_s,
        "median_s": statistics.median(step_s),
        "mean_s": mean_s,
        "limit_s": least.update_s,
        "update_limit": dataclasses.asdict(least),
        "ratio": mean_s / least.update_s,
        "s_per_gparam": mean_s / (params_per_process * len(results)) * _G,
        "limit_s_per_gparam": least.update_s / (params_per_process * len(results)) * _G,
        "moved_bps": moved_bps,
        "share_of_bandwidth": moved_bps / total_bps,
        "misses_per_step": sum(r.misses for r in results) / len(step_s),
        "records": sum(len(r.record_bytes) for r in results),
        "slots": sum(r.slots for r in results),
        "cores_share": sum(r.cpu_s for r in results) / core_s,
        "machine_share": results[0].machine_busy_s / core_s,
        "why_turns": sorted({why for r in results for why in r.why_turns}),
    }


def jobs(runs: Mapping[int, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each number of processes: medians over its runs, and the time of a param in units of the first row's."""
    names = ("mean_s", "limit_s", "ratio", "s_per_gparam", "limit_s_per_gparam", "moved_bps", "share_of_bandwidth",
             "cores_share", "machine_share")  # fmt: skip
    rows: list[dict[str, Any]] = []
    for processes, found in runs.items():
        row = {name: statistics.median(run[name] for run in found) for name in names}
        first = rows[0]["s_per_gparam"] if rows else row["s_per_gparam"]
        rows.append({"processes": processes, **row, "to_first": row["s_per_gparam"] / first, "runs": list(found)})
    return rows


def _show(figures: dict[str, Any]) -> None:
    rows = [
        [
            str(job["processes"]),
            f"{job['processes'] * figures['params_per_process'] / _MB:.0f}",
            f"{job['mean_s']:.3f}",
            f"{job['limit_s']:.3f}",
            f"{job['ratio']:.3f}",
            "-".join(f"{pick(run['ratio'] for run in job['runs']):.3f}" for pick in (min, max)),
            f"{job['s_per_gparam']:.2f}",
            f"{job['limit_s_per_gparam']:.2f}",
            f"{job['to_first']:.3f}",
            f"{job['moved_bps'] / _MB:.0f}",
            f"{job['share_of_bandwidth']:.1%}",
            f"{job['cores_share']:.0%}",
            f"{job['machine_share']:.0%}",
        ]
        for job in figures["jobs"]
    ]
    headings = ["processes", "M params", "s a step", "limit", "ratio", "of the runs", "s/G params", "limit", "to first",
                "MB/s", "of all", "cores: ours", "all"]  # fmt: skip
    report.print_table(
        f"An update; the devices together: {figures['total_bps'] / _MB:.0f} MB/s each way", headings, rows
    )


def plot(figures: dict[str, Any], path: str) -> None:
    """Time of a param and bandwidth against the number of processes, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    figure, (left, right) = pyplot.subplots(ncols=2, figsize=(8, 3.2))
    found = figures["jobs"]
    processes = [job["processes"] for job in found]
    panels = (
        (left, "s_per_gparam", [job["limit_s_per_gparam"] for job in found], "limit", 1.0, "s for 10⁹ params"),
        (right, "moved_bps", [figures["total_bps"]] * len(found), "devices", 1 / _MB, "MB/s each way"),
    )
    for axes, name, bound, bound_label, scale, label in panels:
        axes.plot(processes, [value * scale for value in bound], color="black", linewidth=1, label=bound_label)
        axes.plot(processes, [job[name] * scale for job in found], color="tab:blue", label="median of the runs")
        points = [(job["processes"], run[name] * scale) for job in found for run in job["runs"]]
        axes.plot(*zip(*points, strict=True), "o", color="tab:blue", markersize=4, alpha=0.5, label="a run")
        axes.set(xscale="log", xlabel="processes", ylabel=label)
        axes.set_ylim(0, 1.15 * max(y * scale for y in [*bound, *(run[name] for job in found for run in job["runs"])]))
        axes.xaxis.set_major_locator(FixedLocator(processes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.legend(fontsize=7, loc="lower right")
    figure.suptitle("Processes that share the tiers, each with its own part of the params", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
