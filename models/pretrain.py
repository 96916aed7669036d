"""Pre-trains a small decoder on the text of a folder: `python -m models.pretrain --help`.

    1. Settings are checked and the tiers made; what is wrong with them is one line on stderr and exit code 2.
    2. CPU devices are set up before JAX looks for any, then the mesh, the data and the optimizer. Of several processes
       (`--processes`, `--distributed`) each does all of this; the first one alone prints and records.
    3. Each step trains on a batch that depends on seed and step only, and is shown and recorded.
    4. With `--save-every` checkpoints are written beside the training; `--resume` goes on from the newest, with the losses
       of a run that was never interrupted.
    5. The last state is saved, the store flushed and closed, and a summary printed, also after Ctrl-C and SIGTERM (exit
       code 130), which end the run after the step under way.

`--optimizer jmo` keeps the optimizer state in the tiers. `--optimizer optax` is the reference: plain
`optax.adamw` on float32 masters, from the same weights, data and schedule. `--compare` runs both.

Threads: runs on the main thread; a signal sets a flag that the loop reads after each step.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from rich.console import Console

from models import checkpoints, launch, processes, sharding, training, transformer
from models.checkpoints import CheckpointError, Checkpoints
from models.data import ByteCorpus
from models.processes import Interrupt
from models.report import Reporter, Result, Traffic, comparison_table, format_bytes, summary_table
from models.settings import DTYPES, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, Settings, parse
from models.transformer import Config

STATE_BYTES_PER_PARAM = {"bf16": 10, "f32": 8}
LEAST_HOST_BYTES_PER_DEVICE = 4 * 2**20


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
      save: Makes what Orbax takes to save a train state.
      restore: Makes what it takes to restore one, of an abstract state.
    """

    tx: optax.GradientTransformation
    state_dtype: Any
    traffic: Callable[[], Traffic]
    flush: Callable[[], None]
    host_memory: str
    save: Callable[[training.TrainState], ocp.args.CheckpointArgs] = ocp.args.StandardSave
    restore: Callable[[training.TrainState], ocp.args.CheckpointArgs] = ocp.args.StandardRestore


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
    enough = max(third // jax.process_count(), LEAST_HOST_BYTES_PER_DEVICE * len(mesh.local_devices))
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
                save=lambda state: jmo.orbax.OffloadSave(state),
                restore=lambda abstract: jmo.orbax.OffloadRestore(abstract, store=store),
            )
    except jmo.OffloadError as error:
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
    """Does one run, writes `metrics.jsonl` and checkpoints into `out` and prints the summary.

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
      CheckpointError: A checkpoint could not be written or read.
    """
    start = time.perf_counter()
    with _usage():
        settings = settings.on_devices(jax.device_count())
        mesh = sharding.make_mesh(settings.mesh or {})
        corpus = ByteCorpus(settings.data)
        corpus.batch(0, batch=settings.batch, seq=settings.seq)
        processes.agree(repr(settings.common()), corpus.data.tobytes(), "settings or text")
    compute_dtype = settings.compute_dtype or ("f32" if mesh.devices.flat[0].platform == "cpu" else "bf16")
    dtypes = {"param_dtype": DTYPES[settings.param_dtype], "compute_dtype": DTYPES[compute_dtype]}
    config = transformer.preset(settings.preset, **dtypes)
    first = processes.is_first()
    if first:
        _make_folder(out)
    values = checkpoints.decisive(settings, label, compute_dtype, corpus)
    opened = offloaded_optimizer(settings, config, mesh) if label == "jmo" else plain_optimizer(settings)
    with opened as optimizer, _checkpoints(settings, out, optimizer, values) as saved:
        result = Result(label, start=saved.start)
        with Reporter(console, out if first else None, label, settings.steps, saved.start) as reporter:
            state = _steps(settings, config, mesh, corpus, optimizer, saved, reporter, interrupt, result)
        optimizer.flush()
        result.checkpoint = saved.newest
        result.traffic = optimizer.traffic()
        plain_bytes = training.tree_bytes(state.opt_state)
        if config.param_dtype != optimizer.state_dtype:
            plain_bytes += training.tree_bytes(state.params)
        result.state_bytes = processes.total(result.traffic.record_bytes) or plain_bytes
    result.total_s = time.perf_counter() - start
    params = transformer.count_params(config)
    count = jax.process_count()
    console.print(summary_table(result, params=params, host_memory=optimizer.host_memory, processes=count))
    return result


def _checkpoints(settings: Settings, out: Path, optimizer: Optimizer, values: dict[str, Any]) -> Checkpoints:
    with _usage():
        return Checkpoints(
            out / "checkpoints",
            every=settings.save_every,
            resume=settings.resume,
            values=values,
            save=optimizer.save,
            restore=optimizer.restore,
        )


def _steps(
    settings: Settings,
    config: Config,
    mesh: Mesh,
    corpus: ByteCorpus,
    optimizer: Optimizer,
    saved: Checkpoints,
    reporter: Reporter,
    interrupt: Interrupt,
    result: Result,
) -> training.TrainState:
    """Trains from fresh weights or a checkpoint to the last step or an interrupt.

    Fills in `result` and returns the last state, of which there is a checkpoint then if the run keeps any.
    """
    if saved.start:
        abstract = training.abstract_state(config, optimizer.tx, mesh, state_dtype=optimizer.state_dtype)
        state = saved.restore(abstract)
    else:
        state = training.init_state(config, optimizer.tx, mesh, seed=settings.seed, state_dtype=optimizer.state_dtype)
    step_fn = training.make_train_step(config, optimizer.tx, mesh, state, clip_norm=settings.clip_norm)
    for step in range(saved.start, settings.steps):
        if interrupt.requested():
            result.interrupted = True
            break
        tokens = corpus.batch(step, batch=settings.batch, seq=settings.seq, seed=settings.seed)
        began = time.perf_counter()
        state, loss = jax.block_until_ready(step_fn(state, training.place_batch(tokens, mesh)))
        result.step_s.append(time.perf_counter() - began)
        result.losses.append(float(loss))
        tokens_a_step = settings.batch * settings.seq
        reporter.step(step + 1, result.losses[-1], tokens_a_step, result.step_s[-1], optimizer.traffic())
        saved.step(step + 1, state)
    saved.finish(saved.start + len(result.losses), state)
    return state


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.jsonl").touch()
    except OSError as error:
        raise UsageError(f"--out {str(out)!r} is not writable: {error.strerror}") from error


def _run(settings: Settings) -> int:
    """Does what the settings say; returns the exit code."""
    if settings.membership is not None:
        with _usage():
            try:
                processes.join(settings.membership, settings.cpu_devices)
            except RuntimeError as error:
                raise RunError(f"the processes did not meet: {error}") from error
    else:
        with contextlib.suppress(RuntimeError):  # JAX is already up, in a test: make_mesh checks the count
            jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
    console = Console(quiet=not processes.is_first())
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
        if settings.processes > 1:
            return launch.run(sys.argv[1:] if arguments is None else arguments, settings.processes)
        return _run(settings)
    except UsageError as error:
        return _say("error", error, EXIT_USAGE)
    except (
        RunError,
        CheckpointError,
        jax.errors.JaxRuntimeError,
    ) as error:  # the latter also when another process is lost
        return _say("failed", error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _say(kind: str, error: Exception, code: int) -> int:
    """Prints an error, in one line however XLA broke it."""
    print(f"pretrain: {kind}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def program() -> NoReturn:
    """`main` with the process around it."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        processes.leave(EXIT_FAILED, failed=True)
    processes.leave(code, failed=code in (EXIT_FAILED, EXIT_USAGE))


if __name__ == "__main__":
    program()
