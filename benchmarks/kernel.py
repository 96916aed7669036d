"""The fused kernel beside this machine's memory bandwidth and beside other AdamWs: ``python -m benchmarks.kernel``.

Every round measures the bandwidth, then each contestant once, so that whatever else the machine does meets all of
them alike; shares and ratios are formed within a round, and the median over the rounds is shown. The bandwidth is the
highest of triad, copy and in-place update. Optax, jitted, has all cores, with donated arguments and
without. Bytes are those the kernel must move:

- float32 params: gradient, mu, nu (and params, for decay) are read, mu, nu and the update are written;
- bfloat16 params: gradient, param, mu, nu and remainder are read, mu, nu, remainder and the new param are written.

Thread contract: the main thread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import report, rivals
from jax_mlp_offload import native

ISAS = ("avx512", "avx2", "baseline")
_PASSES = 3  # the best of them counts, in each round
_STREAM_ARRAYS_BYTES = 12  # an element


def bytes_per_param(dtype: str, decay: bool) -> int:
    """Bytes that an update must read and write for each param."""
    if dtype == "bfloat16":
        return (2 + 2 + 4 + 4 + 2) + (4 + 4 + 2 + 2)
    return (4 + 4 + 4 + (4 if decay else 0)) + (4 + 4 + 4)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel", description=__doc__)
    parser.add_argument("--elements", type=float, default=48 * 2**20, help="params; far more than fit the caches")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default=str(report.RESULTS / "kernel.json"), help="where the figures go")
    args = parser.parse_args(arguments)
    elements = int(args.elements)
    cores = len(os.sched_getaffinity(0))
    streams: dict[str, list[tuple[float, float, float]]] = {}
    with contextlib.ExitStack() as stack:
        contestants = {**_kernels(elements, cores), **rivals.all_rivals(elements, _PASSES, stack)}
        seconds: dict[str, list[float | str]] = {name: [] for name in contestants}
        for _ in range(args.rounds):
            for threads in sorted({1, cores}):
                measured = native.measure_stream(elements * _STREAM_ARRAYS_BYTES, threads, _PASSES)
                streams.setdefault(str(threads), []).append(measured)
            for name, contestant in contestants.items():
                seconds[name].append(contestant.run())
    rows = [_figures(contestants[name], times, elements, streams) for name, times in seconds.items()]
    _add_ratios(rows)
    _show(rows, streams)
    settings = {"elements": elements, "rounds": args.rounds, "passes": _PASSES, "cores": cores}
    figures = {"stream_triad_copy_update_bps": streams, "rows": rows}
    report.write_json(args.json, "kernel", settings, figures)
    print(f"written: {args.json}")
    return 0


def _kernels(elements: int, cores: int) -> dict[str, rivals.Contestant]:
    """The kernel in every instruction set that this machine has."""
    found = {}
    for isa in ISAS:
        if not native.force_isa(isa):
            print(f"{isa}: not on this machine")
            continue
        for dtype, decay in (("float32", True), ("float32", False), ("bfloat16", True)):
            for threads in sorted({1, cores}):
                name = f"kernel {isa}, {dtype}{'' if decay else ' without decay'}, {threads} thread(s)"
                run = _kernel(isa, elements, dtype, threads, decay)
                found[name] = rivals.Contestant(name, dtype, threads, run, bytes_per_param(dtype, decay))
    native.force_isa("")
    return found


def _kernel(isa: str, elements: int, dtype: str, threads: int, decay: bool) -> Callable[[], float]:
    kind = native.DTYPES[dtype]

    def run() -> float:
        native.force_isa(isa)
        try:
            best_s: float = native.time_kernel(elements, kind, kind, threads, _PASSES, decay)
        finally:
            native.force_isa("")
        if best_s <= 0:
            raise MemoryError(f"no memory for {elements} elements")
        return best_s

    return run


def _figures(
    contestant: rivals.Contestant,
    seconds: Sequence[float | str],
    elements: int,
    streams: dict[str, list[tuple[float, float, float]]],
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": contestant.name, "dtype": contestant.dtype, "threads": contestant.threads}
    times = [value for value in seconds if not isinstance(value, str)]
    if len(times) < len(seconds):
        return {**row, "missing": next(value for value in seconds if isinstance(value, str))}
    row |= {"seconds": times, "params_per_s": elements / statistics.median(times)}
    if contestant.bytes_per_param is not None:
        moved = elements * contestant.bytes_per_param
        best = [max(patterns) for patterns in streams[str(contestant.threads)]]
        row["bytes_per_s"] = moved / statistics.median(times)
        row["share_of_stream"] = statistics.median(moved / s / bps for s, bps in zip(times, best, strict=True))
    return row


def _add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """How many times as fast as jitted optax (donated or not) for the same dtype of params, round by round."""
    for key, name in (("times_optax", rivals.OPTAX), ("times_optax_donated", rivals.DONATED)):
        optax_s = {row["dtype"]: row["seconds"] for row in rows if row["name"] == f"{name}, {row['dtype']}"}
        for row in rows:
            if "seconds" in row:
                ratios = [theirs / ours for theirs, ours in zip(optax_s[row["dtype"]], row["seconds"], strict=True)]
                row[key] = statistics.median(ratios)


def _show(rows: Sequence[dict[str, Any]], streams: dict[str, list[tuple[float, float, float]]]) -> None:
    for threads, rounds in streams.items():
        triad, copy, update = (statistics.median(pattern) / 1e9 for pattern in zip(*rounds, strict=True))
        print(f"memory, {threads} thread(s): triad {triad:.1f}, copy {copy:.1f}, in-place update {update:.1f} GB/s")
    cells = []
    for row in rows:
        if "missing" in row:
            cells.append([row["name"], row["missing"], "", "", "", ""])
            continue
        moved = (
            [f"{row['bytes_per_s'] / 1e9:.1f}", f"{row['share_of_stream']:.0%}"] if "bytes_per_s" in row else ["", ""]
        )
        times = [f"{row[key]:.2f}" for key in ("times_optax", "times_optax_donated")]
        cells.append([row["name"], f"{row['params_per_s'] / 1e9:.3f}", *moved, *times])
    head = ["", "G params/s", "GB/s", "of memory", "times optax", "times donated"]
    report.print_table("AdamW on this machine", head, cells)


if __name__ == "__main__":
    raise SystemExit(main())
