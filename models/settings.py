"""The command line of the pre-training program, read and checked as far as that goes without devices or the disk.

Always true here: `Settings` that exist fit each other; what is wrong is a `ValueError` of one line that names the option
and the remedy.

Threads: pure functions, safe from any thread.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp

from models import sharding, transformer

DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
STEPS, STEPS_COMPARED = 50, 20
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


@dataclasses.dataclass(frozen=True)
class Membership:
    """Which part this process plays among several.

    Attributes:
      coordinator: HOST:PORT of process 0; None where the cluster tells everything.
      num_processes: How many there are, or None likewise.
      process_id: Which one this is, or None likewise.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line.

    Attributes:
      mesh: {axis: size}; None stands for all devices on `fsdp`, known once the processes have met.
      processes: How many processes to start here.
      membership: None for a run in one process.
    """

    preset: str
    steps: int
    tiers: tuple[str, ...]
    host_memory: str | None
    mesh: Mapping[str, int] | None
    processes: int
    membership: Membership | None
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
    save_every: int | None
    resume: bool

    def __post_init__(self) -> None:
        for name in ("steps", "processes", "batch", "seq", "subgroup_elements", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
        if self.warmup < 0 or self.seed < 0:
            raise ValueError(f"--warmup {self.warmup}, --seed {self.seed}: neither may be negative")
        for name in ("lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
        if self.resume and self.compare:
            raise ValueError(
                f"--resume goes on with one run, --compare does two: resume with --optimizer jmo --out {self.out / 'jmo'}, "
                f"then with --optimizer optax --out {self.out / 'optax'}"
            )
        if self.mesh is not None:
            self._check_mesh(self.mesh)
        transformer.preset(self.preset)

    def _check_mesh(self, mesh: Mapping[str, int]) -> None:
        parts = sharding.batch_parts(mesh)
        if self.batch % parts:
            shown = sharding.format_mesh(mesh)
            raise ValueError(
                f"--batch {self.batch} is no multiple of the {parts} parts that --mesh {shown} cuts it into"
            )
        if self.cpu_devices is not None and self.cpu_devices * self.process_count != sharding.device_count(mesh):
            shown = sharding.format_mesh(mesh)
            raise ValueError(f"--mesh {shown} does not divide among {self.process_count} processes")

    @property
    def process_count(self) -> int:
        """Processes of the run, 1 where only the cluster knows."""
        return (self.membership and self.membership.num_processes) or self.processes

    @property
    def cpu_devices(self) -> int | None:
        """CPU devices that each process has to make up; None leaves that to JAX."""
        if self.mesh is None or self.membership == Membership():
            return None
        return sharding.device_count(self.mesh) // self.process_count

    def on_devices(self, devices: int) -> Settings:
        """These settings with a mesh: the given one, else all `devices` on `fsdp`.

        Raises:
          ValueError: The batch does not divide over them.
        """
        return self if self.mesh is not None else dataclasses.replace(self, mesh={"fsdp": devices})

    def common(self) -> Settings:
        """What all processes of a run must agree on; the rest may differ from host to host."""
        return dataclasses.replace(
            self, tiers=(), host_memory=None, membership=None, processes=1, data=None, out=Path()
        )


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with code 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Reads the command line (`sys.argv` for None).

    Raises:
      ValueError: A value is out of range, or two do not fit.
      SystemExit: The command line does not parse, or asks for help.
    """
    parser = Parser(prog="pretrain", description="Pre-train a small decoder with optimizer state on tiers.")
    add = parser.add_argument
    add("--preset", default="small", help=f"model size: {', '.join(transformer.PRESETS)} (default: %(default)s)")
    add("--steps", type=int, help=f"training steps (default: {STEPS}, each {STEPS_COMPARED} with --compare)")
    add("--tier", action="append", default=[], metavar="PATH", dest="tiers",
        help="a folder or URL for optimizer state; repeat for more (default: two folders under --out)")  # fmt: skip
    add("--host-memory", metavar="SIZE", help="for state, a process, such as 64MiB (default: about a third of it)")
    add(
        "--mesh", metavar="AXIS=N,...", help=f"devices by axis, of {', '.join(sharding.AXES)}; made up if they are CPUs"
    )
    add("--devices", type=int, metavar="N", help="short for --mesh fsdp=N (default: 1, or all of several processes)")
    add("--processes", type=int, default=1, metavar="N", help="start so many processes here, which train together")
    add("--distributed", action="store_true", help="be one process of a cluster job: SLURM or Open MPI say which")
    add("--coordinator", metavar="HOST:PORT", help="be one process of several by hand: the address of process 0")
    add("--num-processes", type=int, metavar="N", help="with --coordinator: how many there are")
    add("--process-id", type=int, metavar="I", help="with --coordinator: which one this is, from 0")
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
    add("--save-every", type=int, metavar="N",
        help="save to OUT/checkpoints every N steps, at the end and on SIGTERM or Ctrl-C (default: never)")  # fmt: skip
    add("--resume", action="store_true", help="go on from the newest checkpoint in OUT/checkpoints")
    add("--subgroup-elements", type=int, metavar="N", help="elements of one state record (default: automatic)")
    values = vars(parser.parse_args(arguments))
    values["tiers"] = tuple(values["tiers"]) or tuple(str(values["out"] / "tiers" / name) for name in "ab")
    if values["steps"] is None:
        values["steps"] = STEPS_COMPARED if values["compare"] else STEPS
    values["membership"] = _membership(values)
    values["mesh"] = _mesh(values)
    return Settings(**values)


def _membership(values: dict[str, Any]) -> Membership | None:
    distributed = values.pop("distributed")
    names = [field.name for field in dataclasses.fields(Membership)]
    given = {name: values.pop(name) for name in names}
    missing = [f"--{name.replace('_', '-')}" for name in names if given[name] is None]
    if values["processes"] > 1 and (distributed or len(missing) < len(names)):
        raise ValueError(
            f"--processes {values['processes']} starts processes here; leave it out to be one of those started elsewhere"
        )
    if distributed:
        if len(missing) < len(names):
            raise ValueError("--distributed asks the cluster; leave it out where --coordinator says how processes meet")
        return Membership()
    if len(missing) == len(names):
        return None
    if missing:
        raise ValueError(
            f"--coordinator, --num-processes and --process-id belong together; give {', '.join(missing)} too"
        )
    if given["num_processes"] < 1 or not 0 <= given["process_id"] < given["num_processes"]:
        raise ValueError(
            f"--process-id {given['process_id']} is none of --num-processes {given['num_processes']}: they count from 0"
        )
    if not given["coordinator"].rpartition(":")[0] or not given["coordinator"].rpartition(":")[2].isdecimal():
        raise ValueError(f"--coordinator {given['coordinator']!r} is no HOST:PORT: name that of process 0")
    return Membership(**given)


def _mesh(values: dict[str, Any]) -> dict[str, int] | None:
    text, devices = values.pop("mesh"), values.pop("devices")
    if devices is not None:
        if text is not None:
            raise ValueError(
                f"--devices {devices} is short for --mesh fsdp={devices}: give one of them, not --mesh {text}"
            )
        if devices < 1:
            raise ValueError(f"--devices {devices}: give a positive number")
        return {"fsdp": devices}
    if text is not None:
        return sharding.parse_mesh(text)
    membership: Membership | None = values["membership"]
    if membership == Membership():
        return None
    return {"fsdp": (membership and membership.num_processes) or max(values["processes"], 1)}
