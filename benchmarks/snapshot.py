"""What a snapshot costs: ``python -m benchmarks.snapshot --tier DIR``, in a directory on a disk (not tmpfs).

Trains a few steps of bfloat16 layers whose Adam state lies on one file tier, takes snapshots between steps, and copies the
same record files for comparison: with O_DIRECT, so that no page cache helps either way, on two threads, followed by the
same sync. Before each the file system is synced, so that neither pays for what others have left. Bytes on disk are the
blocks of all inodes below the directory, each once. Then ten more steps run, and every file of the snapshot has to have the
CRC32C that it had. The limit of a snapshot is the time in which its disk writes the records that are in memory: they, and
nothing else, have to be copied. Needs disk for three times the state, and memory for six times the params.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mlp_offload as jmo
from benchmarks import report
from benchmarks.workload import Workload, update_step
from jax_mlp_offload import native
from jax_mlp_offload.sizes import format_bytes

ALLOWED_SHARE = 0.05
_LAYERS = 16
_STATE_BYTES = 10  # of a bfloat16 param
_THREADS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.snapshot", description=__doc__)
    parser.add_argument("--state", type=float, default=2e9, help="bytes of optimizer state")
    parser.add_argument("--tier", required=True, help="a directory on a disk; a folder in it is used, and removed")
    parser.add_argument("--host-memory", default=None, help="for state; None: the least that runs well")
    parser.add_argument("--subgroup-elements", type=int, default=2**20)
    parser.add_argument("--repeats", type=int, default=5, help="of snapshot and of copy")
    parser.add_argument("--steps", type=int, default=10, help="after which the snapshot is looked at again")
    parser.add_argument("--json", default=str(report.RESULTS / "snapshot.json"), help="where the figures go")
    args = parser.parse_args(arguments)
    pathlib.Path(args.tier).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="snapshot-", dir=args.tier) as folder:
        figures = _measure(args, pathlib.Path(folder))
    _print(figures)
    settings = {name: value for name, value in vars(args).items() if name not in ("tier", "json")}
    report.write_json(args.json, "snapshot", settings, figures)
    print(f"written: {args.json}")
    return 0 if figures["passed"] else 1


def _measure(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    workload = Workload.of(int(args.state / _STATE_BYTES), _LAYERS, jnp.bfloat16, 1)
    options = {"host_memory": args.host_memory, "subgroup_elements": args.subgroup_elements}
    with jmo.Store(folder / "tier", **options) as store:
        tx = jmo.adamw(1e-3, store=store)
        step = update_step(tx)
        params, grads = workload.draw(0, 0.02), workload.draw(1, 1.0)
        state = tx.init(params)
        for _ in range(2):
            params, state = step(params, state, grads)
        store.flush()
        before_bytes = _allocated_bytes(folder)
        paths = [folder / f"snapshot-{i}" for i in range(args.repeats)]
        times = [_timed(folder, functools.partial(store.snapshot, path)) for path in paths]
        for path in paths[1:]:
            shutil.rmtree(path)
        files = sorted(paths[0].glob("process-0/optimizer-*/*"))
        state_bytes = sum(path.stat().st_size for path in files)
        after_bytes = _allocated_bytes(folder)
        copied = [path.stat().st_size for path in files if path.stat().st_nlink == 1]
        copies, write_s = [], []
        for _ in range(args.repeats):
            copies.append(_timed(folder, lambda: _copy(files, folder / "copy")))
            shutil.rmtree(folder / "copy")
            write_s.append(_timed(folder, lambda: _write(copied, folder / "written")))
            shutil.rmtree(folder / "written")
        crcs = list(map(_crc, files))
        begun_s = time.perf_counter()
        for number in range(args.steps):
            params, state = step(params, state, grads)
            if number == 0:
                store.flush()
                next_bytes = _allocated_bytes(folder)
        jax.block_until_ready(params)
        store.flush()
        step_s = (time.perf_counter() - begun_s) / args.steps
        same = list(map(_crc, files)) == crcs
    snapshot_s, copy_s = statistics.median(times), statistics.median(copies)
    added_bytes = after_bytes - before_bytes
    return {
        "state_bytes": state_bytes,
        "records": len(files),
        "records_in_memory": len(copied),
        "bytes_in_memory": sum(copied),
        "snapshot_s": times,
        "copy_s": copies,
        "write_of_memory_s": write_s,
        "step_s": step_s,
        "share": snapshot_s / copy_s,
        "allowed_share": ALLOWED_SHARE,
        "limit_s": statistics.median(write_s),
        "disk_before_bytes": before_bytes,
        "disk_after_bytes": after_bytes,
        "disk_after_next_step_bytes": next_bytes,
        "added_beyond_memory_bytes": added_bytes - sum(copied),
        "same_after_steps": same,
        "passed": same and snapshot_s < ALLOWED_SHARE * copy_s,
    }


def _timed(folder: pathlib.Path, function: Callable[[], Any]) -> float:
    native.sync_file_system(str(folder))
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s


def _copy(files: Sequence[pathlib.Path], target: pathlib.Path) -> None:
    """Copies files as fast as the disk takes them, and makes them durable."""
    target.mkdir()

    def copy(part: Sequence[pathlib.Path]) -> None:
        for path in part:
            buffer = native.aligned(path.stat().st_size)
            _move(path, os.O_RDONLY, os.preadv, buffer)
            _move(target / path.name, os.O_CREAT | os.O_WRONLY, os.pwritev, buffer)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(copy, [files[i::_THREADS] for i in range(_THREADS)]))
    native.sync_file_system(str(target))


def _move(path: pathlib.Path, flags: int, call: Callable[..., int], buffer: np.ndarray[Any, Any]) -> None:
    """One record, whose size O_DIRECT takes."""
    file = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        if flags & os.O_CREAT:
            os.posix_fallocate(file, 0, buffer.size)
        if (moved := call(file, [buffer.data], 0)) != buffer.size:
            raise OSError(f"{path}: only {moved} of {buffer.size} bytes were moved")
    finally:
        os.close(file)


def _write(sizes: Sequence[int], target: pathlib.Path) -> None:
    """Writes as many bytes as are in memory, and makes them durable."""
    target.mkdir()
    for number, size in enumerate(sizes):
        native.write_file(str(target / str(number)), native.aligned(size), True)
    native.sync_file_system(str(target))


def _crc(path: pathlib.Path) -> int:
    return int(native.crc32c(np.fromfile(path, np.uint8)))


def _allocated_bytes(folder: pathlib.Path) -> int:
    """Bytes of all files below a folder, each inode once."""
    infos = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({info.st_ino: info.st_blocks * 512 for info in infos}.values())


def _print(figures: dict[str, Any]) -> None:
    snapshot_s, copy_s = statistics.median(figures["snapshot_s"]), statistics.median(figures["copy_s"])
    report.print_table(
        f"{format_bytes(figures['state_bytes'])} of state in {figures['records']} records, "
        f"{figures['records_in_memory']} of them in memory",
        ["", "median", "all"],
        [
            [name, f"{statistics.median(times):.3f} s", " ".join(f"{each:.3f}" for each in times)]
            for name, times in (
                ("snapshot", figures["snapshot_s"]),
                ("limit: writing what is in memory", figures["write_of_memory_s"]),
                ("copying the same files", figures["copy_s"]),
            )
        ],
    )
    print(
        f"snapshot / copy {snapshot_s / copy_s:.1%} ({ALLOWED_SHARE:.0%} are allowed), snapshot / limit "
        f"{snapshot_s / figures['limit_s']:.2f}; a step takes {figures['step_s']:.2f} s\n"
        f"on disk: {format_bytes(figures['disk_before_bytes'])} before, {format_bytes(figures['disk_after_bytes'])} after "
        f"(beyond what was in memory: {format_bytes(figures['added_beyond_memory_bytes'])} of manifests), "
        f"{format_bytes(figures['disk_after_next_step_bytes'])} after the next step\n"
        f"the snapshot after the steps: {'the same' if figures['same_after_steps'] else 'CHANGED'}; "
        f"{'passed' if figures['passed'] else 'FAILED'}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
