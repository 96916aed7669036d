"""Memory and time of checkpoints beside those of a step: ``python -m benchmarks.checkpoint --help``.

In processes of their own: (1) ``train`` steps, saves synchronously, then asynchronously while it steps on; (2) ``restore``
restores the checkpoint and steps on; (3) ``plain`` saves and restores the same state as plain optax has it, with Orbax
alone. A save and a restore may need ``ALLOWED_BYTES`` more than a step's own peak. An asynchronous save runs beside steps,
and Orbax copies the params for it: that is shown, and not judged. Params are updated with given gradients.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import jax_mlp_offload as jmo
from benchmarks import report, workload
from jax_mlp_offload.sizes import format_bytes

ALLOWED_BYTES = 100 * 10**6
STEPS = 3
_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
_LAYERS = 25


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--host-memory", default="256MB")
    parser.add_argument("--folder", default=None, help="where tier and checkpoints go; else a temporary one")
    parser.add_argument("--json", default=str(report.RESULTS / "checkpoint.json"), help="where the figures go")
    parser.add_argument("--part", choices=_PARTS, default=None, help="one of the processes; prints its figures")
    args = parser.parse_args(arguments)
    if args.part is not None:
        print(json.dumps(_PARTS[args.part](args, pathlib.Path(args.folder))))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.folder) as folder:
        found = {part: _run(args, part, folder) for part in _PARTS}
    return _report(args, found)


def _run(args: argparse.Namespace, part: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--part", part, "--folder", folder]
    command += ["--params", str(args.params), "--dtype", args.dtype, "--host-memory", args.host_memory]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def _report(args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> int:
    train, restore, plain = found["train"], found["restore"], found["plain"]
    rows = [
        ["step", train["step_s"], train["step_peak"]],
        ["save", train["save_s"], train["save_peak"]],
        ["asynchronous save: until it returns", train["blocked_s"], None],
        ["... first step during it", train["step_during_s"], train["async_peak"]],
        ["... until it is written", train["async_s"], None],
        ["restore", restore["restore_s"], restore["restore_peak"]],
        ["step after the restore", restore["step_s"], restore["step_peak"]],
        ["plain optax: save", plain["save_s"], plain["save_peak"]],
        ["plain optax: restore", plain["restore_s"], plain["restore_peak"]],
    ]
    report.print_table(
        f"{format_bytes(train['state_bytes'])} of state, {args.host_memory} of host memory",
        ["", "seconds", "peak memory"],
        [[name, f"{seconds:.3f}", "" if peak is None else format_bytes(peak)] for name, seconds, peak in rows],
    )
    more = {
        "save": train["save_peak"] - train["step_peak"],
        "restore": restore["restore_peak"] - restore["step_peak"],
    }
    passed = max(more.values()) <= ALLOWED_BYTES
    shown = ", ".join(f"{name} {size / 1e6:+.0f} MB" for name, size in more.items())
    beside = (train["async_peak"] - train["step_peak"]) / 1e6
    copied = train["param_bytes"] / 1e6
    print(
        f"steps beside an asynchronous save: {beside:+.0f} MB; Orbax's copy of the params has {copied:.0f} MB of that"
    )
    print(
        f"beside a step's own peak: {shown}; {ALLOWED_BYTES / 1e6:.0f} MB are allowed: {'passed' if passed else 'FAILED'}"
    )
    settings = {name: value for name, value in vars(args).items() if name not in ("folder", "json", "part")}
    figures = {**found, "more_than_a_step_bytes": more, "allowed_bytes": ALLOWED_BYTES, "passed": passed}
    report.write_json(args.json, "checkpoint", settings, figures)
    print(f"written: {args.json}")
    return 0 if passed else 1


def _peak_of(function: Callable[[], Any]) -> tuple[Any, float, int]:
    """What it returns, its seconds, and the peak of resident memory meanwhile."""
    report.reset_peak()
    begin_s = time.perf_counter()
    result = function()
    return result, time.perf_counter() - begin_s, report.resident_bytes()[1]


class _Training:
    """Params, gradients and a step."""

    def __init__(self, args: argparse.Namespace, make_tx: Callable[[], optax.GradientTransformation]) -> None:
        self.load = workload.Workload.of(int(args.params), _LAYERS, _DTYPES[args.dtype], 1)
        self.tx = make_tx()
        self.step_fn = workload.update_step(self.tx)

    def abstract(self) -> dict[str, Any]:
        """The state's shapes."""

        def make() -> dict[str, Any]:
            shape = (self.load.width, self.load.width)
            params = {f"layer_{i:03d}": jnp.zeros(shape, self.load.dtype) for i in range(self.load.layers)}
            return {"params": params, "opt_state": self.tx.init(params)}

        shapes: dict[str, Any] = jax.eval_shape(make)
        return shapes

    def steps(self, state: dict[str, Any], count: int, grads: Any) -> dict[str, Any]:
        for _ in range(count):
            params, opt_state = jax.block_until_ready(self.step_fn(state.pop("params"), state.pop("opt_state"), grads))
            state = {"params": params, "opt_state": opt_state}
        return state


def _train(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    with jmo.Store(folder / "tier", host_memory=args.host_memory) as store:
        training = _Training(args, lambda: jmo.adamw(1e-4, weight_decay=0.1, store=store))
        params, grads = training.load.draw(0, 0.02), training.load.draw(1, 1e-3)
        state = training.steps({"params": params, "opt_state": training.tx.init(params)}, STEPS, grads)
        del params
        store.flush()
        state, step_s, step_peak = _peak_of(lambda: training.steps(state, 1, grads))
        store.flush()
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=True)
        with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:

            def save(step: int) -> None:
                manager.save(step, args=jmo.orbax.OffloadSave(state))

            def save_and_wait() -> None:
                save(1)
                manager.wait_until_finished()

            _, save_s, save_peak = _peak_of(save_and_wait)
            begin_s = time.perf_counter()
            _, blocked_s, _ = _peak_of(lambda: save(2))
            step_begin_s = time.perf_counter()
            state = training.steps(state, 1, grads)
            step_during_s = time.perf_counter() - step_begin_s
            while manager.is_saving_in_progress():
                state = training.steps(state, 1, grads)
            manager.wait_until_finished()
            async_s, async_peak = time.perf_counter() - begin_s, report.resident_bytes()[1]
        state_bytes = store.stats()["record_bytes_total"]
    return {
        "state_bytes": state_bytes,
        "param_bytes": training.load.param_bytes,
        "step_s": step_s,
        "step_peak": step_peak,
        "save_s": save_s,
        "save_peak": save_peak,
        "blocked_s": blocked_s,
        "step_during_s": step_during_s,
        "async_s": async_s,
        "async_peak": async_peak,
    }


def _restore(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    with jmo.Store(folder / "tier", host_memory=args.host_memory) as store:
        training = _Training(args, lambda: jmo.adamw(1e-4, weight_decay=0.1, store=store))
        abstract = training.abstract()
        with ocp.CheckpointManager(folder / "checkpoints") as manager:
            restore = jmo.orbax.OffloadRestore(abstract)
            state, restore_s, restore_peak = _peak_of(lambda: manager.restore(1, args=restore))
        grads = training.load.draw(1, 1e-3)
        state = training.steps(state, STEPS, grads)
        store.flush()
        state, step_s, step_peak = _peak_of(lambda: training.steps(state, 1, grads))
    return {"restore_s": restore_s, "restore_peak": restore_peak, "step_s": step_s, "step_peak": step_peak}


def _plain(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Moments of float32 and params of their own dtype: what is written is the same."""
    training = _Training(args, lambda: optax.adamw(1e-4, weight_decay=0.1))
    params = training.load.draw(0, 0.02)
    masters = jax.tree.map(lambda param: param.astype(jnp.float32), params)
    moments = optax.tree.map_params(training.tx, lambda _, master: master, training.tx.init(masters), masters)
    del masters  # zeros would be compressed to nothing
    state = {"params": params, "opt_state": moments}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder / "plain", options=options) as manager:
        save = functools.partial(manager.save, 1, args=ocp.args.StandardSave(state))
        _, save_s, save_peak = _peak_of(save)
        del state, params, moments, save
        restore = ocp.args.StandardRestore(abstract)
        _, restore_s, restore_peak = _peak_of(lambda: manager.restore(1, args=restore))
    return {"save_s": save_s, "save_peak": save_peak, "restore_s": restore_s, "restore_peak": restore_peak}


_PARTS = {"train": _train, "restore": _restore, "plain": _plain}

if __name__ == "__main__":
    raise SystemExit(main())
