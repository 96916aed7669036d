"""Pre-trains a small decoder on the text of a folder: `python -m models.pretrain --help`.

    1. Settings are checked and the tiers made; what is wrong with them is one line on stderr and exit code 2.
    2. CPU devices are set up before JAX looks for any, then the mesh, the data and the optimizer.
    3. Each step trains on a batch that depends on seed and step only, and is shown and recorded.
    4. The store is flushed and closed, and a summary printed, also after Ctrl-C (exit code 130).

`--optimizer jmo` keeps the optimizer state in the tiers. `--optimizer optax` is the reference: plain
`optax.adamw` on float32 masters, from the same weights, data and schedule. `--compare` runs both.

Threads: runs on the main thread; SIGINT sets a flag that the loop reads after each step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from rich.console import Console

from models import training, transformer
from models.data import ByteCorpus
from models.report import Reporter, Result, Traffic, comparison_table, format_bytes, summary_table
from models.transformer import Config

DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
STATE_BYTES_PER_PARAM = {"bf16": 10, "f32": 8}
LEAST_HOST_BYTES_PER_DEVICE = 4 * 2**20
STEPS, STEPS_COMPARED = 50, 20
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line, checked as far as that goes without JAX's devices or the disk."""

    preset: str
    steps: int
    tiers: tuple[str, ...]
    host_memory: str | None
    devices: int
    batch: int
    seq: int
    lr: float
    warmup: int
    seed: int
    param_dtype: str
    compute_dtype: str | None
    optimizer: str
    compare: bool
    clip_norm: float | None
    data: Path | None
    out: Path
    subgroup_elements: int | None

    def __post_init__(self) -> None:
        for name in ("steps", "devices", "batch", "seq", "subgroup_elements"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
        if self.warmup < 0 or self.seed < 0:
            raise ValueError(f"--warmup {self.warmup}, --seed {self.seed}: neither may be negative")
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
        if self.batch % self.devices:
            raise ValueError(f"--batch {self.batch} must be a multiple of --devices {self.devices}")
        transformer.preset(self.preset)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with code 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Reads the command line (`sys.argv` for None).

    Raises:
      ValueError: A value is out of range.
      SystemExit: The command line does not parse, or asks for help.
    """
    parser = Parser(prog="pretrain", description="Pre-train a small decoder with optimizer state on tiers.")
    add = parser.add_argument
    add("--preset", default="small", help=f"model size: {', '.join(transformer.PRESETS)} (default: %(default)s)")
    add("--steps", type=int, help=f"training steps (default: {STEPS}, each {STEPS_COMPARED} with --compare)")
    add("--tier", action="append", default=[], metavar="PATH", dest="tiers",
        help="a folder or URL for optimizer state; repeat for more (default: two folders under --out)")  # fmt: skip
    add("--host-memory", metavar="SIZE", help="for state, such as 64MiB (default: about a third of it)")
    add("--devices", type=int, default=1, help="devices to train on; made up if they are CPUs (default: 1)")
    add("--batch", type=int, default=8, help="sequences a step (default: %(default)s)")
    add("--seq", type=int, default=128, help="tokens a sequence (default: %(default)s)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default: %(default)s)")
    add("--warmup", type=int, default=10, help="steps of linear warm-up (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    add("--param-dtype", choices=DTYPES, default="bf16", help="dtype of the weights (default: %(default)s)")
    add("--compute-dtype", choices=DTYPES, help="dtype of activations (default: f32 on CPUs, else bf16)")
    add("--optimizer", choices=("jmo", "optax"), default="jmo", help="offloaded or plain (default: %(default)s)")
    add("--compare", action="store_true", help="run jmo, then optax, and print how far the losses differ")
    add("--clip-norm", type=float, help="clip the global gradient norm; ends overlap with backward (default: off)")
    add("--data", type=Path, metavar="FOLDER", help="folder of .py text (default: Python's standard library)")
    add("--out", type=Path, default=Path("runs/pretrain"), help="folder for metrics.jsonl (default: %(default)s)")
    add("--subgroup-elements", type=int, metavar="N", help="elements of one state record (default: automatic)")
    values = vars(parser.parse_args(arguments))
    values["tiers"] = tuple(values["tiers"]) or tuple(str(values["out"] / "tiers" / name) for name in "ab")
    if values["steps"] is None:
        values["steps"] = STEPS_COMPARED if values["compare"] else STEPS
    return Settings(**values)


class Interrupt:
    """Turns the first SIGINT into a flag; the second one raises `KeyboardInterrupt`. A context manager."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class UsageError(Exception):
    """Settings that do not fit each other, the machine or the disk."""


class RunError(Exception):
    """The store failed while training; the message is the store's."""


@contextlib.contextmanager
def _usage() -> Iterator[None]:
    """Makes a `ValueError` or `TypeError` of the code inside a `UsageError`; elsewhere they are bugs and say where."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


class Optimizer(NamedTuple):
    """An optimizer ready for use.

    Attributes:
      tx: The optax transformation.
      state_dtype: dtype of the parameters it updates.
      traffic: Gives the current counters.
      flush: Waits for all I/O.
      host_memory: In words, for the summary.
    """

    tx: optax.GradientTransformation
    state_dtype: Any
    traffic: Callable[[], Traffic]
    flush: Callable[[], None]
    host_memory: str


@contextlib.contextmanager
def offloaded_optimizer(settings: Settings, config: Config, mesh: Mesh) -> Iterator[Optimizer]:
    """Opens a store over the tiers; closes it at the end.

    Raises:
      UsageError: A tier cannot be written, or the library refuses an argument.
      RunError: The store failed later.
    """
    try:
        import jax_mlp_offload as jmo
    except ImportError as error:
        raise UsageError(f"--optimizer jmo needs jax_mlp_offload, which does not import: {error}") from error
    for tier in settings.tiers:
        _check_writable(tier)
    third = transformer.count_params(config) * STATE_BYTES_PER_PARAM[settings.param_dtype] // 3
    enough = max(third, LEAST_HOST_BYTES_PER_DEVICE * settings.devices)
    try:
        with _usage():
            store = jmo.Store(
                *settings.tiers,
                host_memory=settings.host_memory or enough,
                subgroup_elements=settings.subgroup_elements,
            )
    except jmo.OffloadError as error:
        raise UsageError(str(error)) from error
    try:
        with store:
            tx = jmo.adamw(
                **training.adamw_arguments(training.schedule(settings.lr, settings.warmup, settings.steps)),
                store=store,
                mesh=mesh,
                param_specs=transformer.param_specs(config, mesh),
            )

            def update(grads: Any, state: Any, params: Any = None) -> Any:
                with _usage():  # memory too small for the model shows when the first step is traced
                    return tx.update(grads, state, params)

            yield Optimizer(
                tx=optax.GradientTransformation(tx.init, update),
                state_dtype=config.param_dtype,
                traffic=lambda: Traffic.of(store.stats()),
                flush=store.flush,
                host_memory=settings.host_memory or format_bytes(enough),
            )
    except (jmo.OffloadError, jax.errors.JaxRuntimeError) as error:
        raise RunError(str(error)) from error


@contextlib.contextmanager
def plain_optimizer(settings: Settings) -> Iterator[Optimizer]:
    """The reference: optax on float32 masters."""
    learning_rate = training.schedule(settings.lr, settings.warmup, settings.steps)
    yield Optimizer(
        tx=optax.adamw(**training.adamw_arguments(learning_rate)),
        state_dtype=jnp.float32,
        traffic=Traffic,
        flush=lambda: None,
        host_memory="none, all of it is on the device",
    )


def _check_writable(tier: str) -> None:
    if "://" in tier:
        return
    try:
        Path(tier).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=tier):
            pass
    except OSError as error:
        raise UsageError(f"tier {tier!r} is not writable: {error.strerror}") from error


def train(settings: Settings, label: str, out: Path, console: Console, interrupt: Interrupt) -> Result:
    """Does one run, writes `metrics.jsonl` into `out` and prints the summary.

    Args:
      settings: What to train.
      label: "jmo" or "optax".
      out: A folder; made if it is not there.
      console: Where to print.
      interrupt: Ends the run after the current step.

    Returns:
      Losses, times and traffic.

    Raises:
      UsageError: Settings that do not fit the machine or the disk.
      RunError: The store failed.
    """
    start = time.perf_counter()
    with _usage():
        mesh = training.make_mesh(settings.devices)
        corpus = ByteCorpus(settings.data)
        corpus.batch(0, batch=settings.batch, seq=settings.seq)
    compute_dtype = settings.compute_dtype or ("f32" if mesh.devices.flat[0].platform == "cpu" else "bf16")
    dtypes = {"param_dtype": DTYPES[settings.param_dtype], "compute_dtype": DTYPES[compute_dtype]}
    config = transformer.preset(settings.preset, **dtypes)
    _make_folder(out)
    result = Result(label)
    opened = offloaded_optimizer(settings, config, mesh) if label == "jmo" else plain_optimizer(settings)
    with opened as optimizer:
        state = training.init_state(config, optimizer.tx, mesh, seed=settings.seed, state_dtype=optimizer.state_dtype)
        step_fn = training.make_train_step(config, optimizer.tx, mesh, state, clip_norm=settings.clip_norm)
        with Reporter(console, out, label, settings.steps) as reporter:
            for step in range(settings.steps):
                if interrupt.requested:
                    result.interrupted = True
                    break
                tokens = corpus.batch(step, batch=settings.batch, seq=settings.seq, seed=settings.seed)
                began = time.perf_counter()
                state, loss = jax.block_until_ready(step_fn(state, training.place_batch(tokens, mesh)))
                result.step_s.append(time.perf_counter() - began)
                result.losses.append(float(loss))
                reporter.step(
                    step + 1,
                    result.losses[-1],
                    settings.batch * settings.seq,
                    result.step_s[-1],
                    optimizer.traffic(),
                )
        optimizer.flush()
        result.traffic = optimizer.traffic()
        plain_bytes = training.tree_bytes(state.opt_state)
        if config.param_dtype != optimizer.state_dtype:
            plain_bytes += training.tree_bytes(state.params)
        result.state_bytes = result.traffic.record_bytes or plain_bytes
    result.total_s = time.perf_counter() - start
    params = transformer.count_params(config)
    console.print(summary_table(result, params=params, host_memory=optimizer.host_memory))
    return result


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.jsonl").touch()
    except OSError as error:
        raise UsageError(f"--out {str(out)!r} is not writable: {error.strerror}") from error


def _run(settings: Settings, console: Console) -> int:
    """Does what the settings say; returns the exit code."""
    with contextlib.suppress(RuntimeError):  # JAX is already up, in a test: make_mesh checks the count
        jax.config.update("jax_num_cpu_devices", settings.devices)
    with Interrupt() as interrupt:
        if not settings.compare:
            result = train(settings, settings.optimizer, settings.out, console, interrupt)
            return EXIT_INTERRUPTED if result.interrupted else 0
        results = []
        for label in ("jmo", "optax"):
            results.append(train(settings, label, settings.out / label, console, interrupt))
            if results[-1].interrupted:
                return EXIT_INTERRUPTED
        table, verdict, agree = comparison_table(*results)
        console.print(table)
        console.print(verdict, highlight=False, soft_wrap=True)
        return 0 if agree else EXIT_FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 1 failed, 2 wrong settings, 130 interrupted."""
    try:
        with _usage():
            settings = parse(arguments)
        return _run(settings, Console())
    except UsageError as error:
        print(f"pretrain: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RunError as error:
        print(f"pretrain: failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
