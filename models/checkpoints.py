"""Checkpoints of a pre-training run, by Orbax: `--save-every` and `--resume`.

    1. A save copies what it needs before `save` returns, and is written in the background while training goes on.
    2. `finish` saves the last state, unless it is saved already, and waits until all is written.
    3. Beside each checkpoint lie the settings that decide a run's numbers; a run with others is refused by name.
       The mesh and the number of processes may be others: each reads its shards.
    4. Several processes save and restore together, in one folder that all of them see.

The tree is that of plain optax whichever optimizer trains, so with float32 params either goes on from the other.

Threads: everything here belongs to the main thread.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp

from models import processes
from models.data import ByteCorpus
from models.settings import Settings
from models.training import TrainState

KEPT = 2
DECISIVE = ("preset", "steps", "batch", "seq", "lr", "warmup", "seed", "param_dtype", "clip_norm")
"""Settings that decide a run's numbers; `steps` does since the learning rate falls until the last."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the folder and the cause."""


def decisive(settings: Settings, label: str, compute_dtype: str, corpus: ByteCorpus) -> dict[str, Any]:
    """Returns what a run must have in common with the one that it goes on from, by option, as JSON values."""
    values = {f"--{name.replace('_', '-')}": getattr(settings, name) for name in DECISIVE}
    values["--compute-dtype"] = compute_dtype
    values["--data"] = f"of {corpus.data.size} bytes with CRC32 {zlib.crc32(corpus.data.tobytes()):08x}"
    if settings.param_dtype != "f32":  # bf16 params do not fit the float32 masters that plain optax has for params
        values["--optimizer"] = label
    return values


class _Manager(ocp.CheckpointManager):  # type: ignore[misc]
    """A manager that leaves it to `processes.Interrupt` to ask JAX whether the job is to end.

    JAX takes each question for the step at which the process now is. Orbax would ask in the background too, with the
    number of the step that it has written; a signal that came then could set a step to end at that is over.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """The checkpoints of one run. A context manager, to be closed before the store.

    Args:
      folder: Where they lie; made by the first save.
      every: Steps from one save to the next; None saves nothing.
      resume: Whether to go on from the newest one in there.
      values: From `decisive`.
      save: Makes what Orbax takes to save a state.
      restore: Makes what it takes to restore one, of an abstract state.

    Attributes:
      start: The step to go on from, 0 for a fresh run.
      newest: The step last saved or restored, None if there is none.

    Raises:
      ValueError: There is no checkpoint to go on from, it is of a run with other settings, or there are some that
        would get mixed up with those of a fresh run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int | None,
        resume: bool,
        values: Mapping[str, Any],
        save: Callable[[TrainState], ocp.args.CheckpointArgs],
        restore: Callable[[TrainState], ocp.args.CheckpointArgs],
    ) -> None:
        self._folder = folder.absolute()
        self._every = every
        self._values = dict(values)
        self._save_args, self._restore_args = save, restore
        self.start = 0
        self.newest: int | None = None
        self._manager: _Manager | None = None
        if every is None and not resume:
            return
        found = ocp.utils.checkpoint_steps(self._folder) if self._folder.is_dir() else []
        newest = max(found, default=None)
        processes.agree(repr(newest), b"", "checkpoints")
        if resume and newest is None:
            raise ValueError(f"--resume: there is no checkpoint in {str(folder)!r}; name the --out of a run with some")
        if newest is not None and not resume:
            raise ValueError(
                f"--save-every {every}: {str(folder)!r} has the checkpoint of step {newest} of another run; go on from "
                "it with --resume, or name another --out"
            )
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=every is not None)
        self._manager = _Manager(self._folder, options=options)
        if newest is not None:
            self._check_values(newest)
            self.start = self.newest = newest

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is None:
            return
        try:
            with self._errors():
                self._manager.close()
        except CheckpointError as second:
            if error is None:
                raise
            error.add_note(str(second))  # what came first is what ends the run

    def restore(self, abstract: TrainState) -> TrainState:
        """Returns the state of step `start`.

        Args:
          abstract: Its shapes, dtypes and shardings.

        Raises:
          CheckpointError: It cannot be read.
        """
        assert self._manager is not None and self.start
        with self._errors():
            state: TrainState = self._manager.restore(
                self.start, args=ocp.args.Composite(state=self._restore_args(abstract))
            )["state"]
        return state

    def step(self, step: int, state: TrainState) -> None:
        """Saves the state after `step` steps if it is time to. The state may be donated at once.

        Raises:
          CheckpointError: It cannot be written, or the one before could not.
        """
        if self._every is not None and step % self._every == 0:
            self._save(step, state)

    def finish(self, step: int, state: TrainState) -> None:
        """Saves the last state, after `step` steps, where there is none of it yet; all is written when it returns.

        Raises:
          CheckpointError: It, or the one before, cannot be written.
        """
        if self._every is not None and step != self.newest:
            self._save(step, state)
        if self._manager is not None:
            with self._errors():
                self._manager.wait_until_finished()

    def _save(self, step: int, state: TrainState) -> None:
        assert self._manager is not None
        with self._errors():
            settings = ocp.args.JsonSave(self._values)
            self._manager.save(step, args=ocp.args.Composite(state=self._save_args(state), settings=settings))
        self.newest = step

    def _check_values(self, step: int) -> None:
        """Raises `ValueError` for the first setting that is not that of a checkpoint."""
        assert self._manager is not None
        with self._errors():
            saved = self._manager.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))["settings"]
        for option, value in self._values.items():
            if saved.get(option) != value:
                raise ValueError(
                    f"{_words(option, value)}: the checkpoint of step {step} in {str(self._folder)!r} was trained with "
                    f"{_words(option, saved.get(option))}; give the same, or leave out --resume"
                )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Makes what Orbax and TensorStore raise for storage that fails a `CheckpointError`."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, (OSError, ValueError)) or type(error) is Exception):  # Orbax raises bare ones
                raise
            raise CheckpointError(f"checkpoints in {str(self._folder)!r}: {error.__cause__ or error}") from error


def _words(option: str, value: Any) -> str:
    return f"no {option}" if value is None else f"{option} {value}"
