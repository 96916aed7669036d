"""What a snapshot says of itself, as JSON.

1. ``<snapshot>/process-<i>/manifest.json``: the optimizers of one process. Of each: which one it is, its count and ticket,
   its leaves, how they are divided over the devices (only process 0 says that of what all share), where sections lie in its
   records, and the CRC32C of each record of this process (null: nothing is stored, so moments are zero).
2. ``<snapshot>/manifest.json`` names the processes, with the CRC32C of what each says, and the offloaded states of the tree
   in ``<snapshot>/tree``, if there is one. It is written last.
3. ``<snapshot>/process-<i>/optimizer-<n>/b<bucket>.d<device>.<subgroup>`` is a record, byte for byte as in a tier.

What always holds: a manifest that was read is what was written, by a CRC32C of its own; each record's file is there and has
its size. Pure, but for ``read``. Thread contract: any thread.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_mlp_offload import native
from jax_mlp_offload.binding import Binding
from jax_mlp_offload.division import Division, Holder
from jax_mlp_offload.errors import CheckpointError
from jax_mlp_offload.plan import SECTIONS
from jax_mlp_offload.replicas import Part

FILE = "manifest.json"
TREE = "tree"
_FORMAT = 1
Leaf = tuple[str, tuple[int, ...], str]
"""Path, shape and dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, and where things lie in its records.

    Attributes:
      parts: indices of the operands.
      subgroups: (begin, count) of each record's elements.
      sections: (name, offset in bytes, dtype) of what a record holds of each element.
      cells: where its hashes begin, in bytes; None: it has none.
      record_bytes: size of a record.
    """

    parts: tuple[int, ...]
    subgroups: tuple[tuple[int, int], ...]
    sections: tuple[tuple[str, int, str], ...]
    cells: int | None
    record_bytes: int

    @classmethod
    def of(cls, binding: Binding, number: int) -> Bucket:
        """A bucket of an optimizer."""
        plan = binding.plan.buckets[number]
        leaf = binding.parts[plan.leaves[0]].leaves[0]  # all have one dtype
        sections = tuple(
            (section, plan.offset(section), binding.section_dtype(leaf, section).name)
            for section in SECTIONS
            if plan.has(section)
        )
        cells = plan.cells_offset if plan.layout.guarded else None
        return cls(plan.leaves, plan.subgroups, sections, cells, plan.record_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer's state in one process.

    Attributes:
      identity: which one it is: its name, or its rule and leaves.
      name: for messages.
      rule: its kind.
      count: updates that the state has had.
      ticket: of the state.
      spans: whether other processes have a part in it.
      leaves: of the params, whole.
      parts: its operands.
      holders: the devices that it is divided over; None: process 0 says so.
      buckets: of this process.
      records: by bucket and device, the CRC32C of each record, or None where nothing is stored.
    """

    identity: str
    name: str
    rule: str
    count: int
    ticket: int
    spans: bool
    leaves: tuple[Leaf, ...]
    parts: tuple[Part, ...]
    holders: tuple[Holder, ...] | None
    buckets: tuple[Bucket, ...]
    records: Mapping[tuple[int, int], Sequence[int | None]]

    def division(self) -> Division:
        """How its leaves are divided."""
        assert self.holders is not None
        return Division(self.parts, tuple(bucket.parts for bucket in self.buckets), self.holders)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["parts"] = [dataclasses.astuple(part) for part in self.parts]
        plain["holders"] = self.holders and [dataclasses.astuple(holder) for holder in self.holders]
        plain["buckets"] = [dataclasses.astuple(bucket) for bucket in self.buckets]
        plain["records"] = [[*key, list(row)] for key, row in self.records.items()]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Optimizer:
        """From what ``to_json`` gave, after a way through JSON."""
        fields = {name: _tuples(value) for name, value in plain.items()}
        fields["parts"] = tuple(Part(*part) for part in fields["parts"])
        fields["holders"] = fields["holders"] and tuple(Holder(*holder) for holder in fields["holders"])
        fields["buckets"] = tuple(Bucket(*bucket) for bucket in fields["buckets"])
        fields["records"] = {(bucket, device): row for bucket, device, row in fields["records"]}
        return cls(**fields)


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """An offloaded state in the tree.

    Attributes:
      keys: where it stands.
      identity: the optimizer's; None: it has nothing in a store.
      ticket: of the state.
    """

    keys: tuple[str, ...]
    identity: str | None
    ticket: int


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A whole snapshot, as read.

    Attributes:
      path: its folder.
      step: the largest count of its optimizers.
      states: those of its tree; None: it has no tree.
      processes: the optimizers of each process.
    """

    path: pathlib.Path
    step: int
    states: tuple[State, ...] | None
    processes: Mapping[int, Sequence[Optimizer]]


def record_name(bucket: int, device: int, subgroup: int) -> str:
    """The file of a record, in its optimizer's folder."""
    return f"b{bucket}.d{device}.{subgroup}"


def process_folder(snapshot: pathlib.Path, process: int) -> pathlib.Path:
    """What one process writes."""
    return snapshot / f"process-{process}"


def optimizer_folder(snapshot: pathlib.Path, process: int, number: int) -> pathlib.Path:
    """One optimizer's records."""
    return process_folder(snapshot, process) / f"optimizer-{number}"


# -- writing


def write_process(snapshot: pathlib.Path, process: int, optimizers: Sequence[Optimizer]) -> int:
    """Writes what one process has; returns the CRC32C of its content."""
    content = {"process": process, "optimizers": [optimizer.to_json() for optimizer in optimizers]}
    return _write(process_folder(snapshot, process) / FILE, content)  # made durable with the records


def write_snapshot(
    snapshot: pathlib.Path, step: int, states: Sequence[State] | None, processes: Mapping[int, int]
) -> None:
    """Writes what makes a snapshot whole.

    Args:
      snapshot: its folder.
      step: the largest count.
      states: of its tree; None: it has none.
      processes: the CRC32C of what each one has written.
    """
    content = {
        "step": step,
        "states": None if states is None else [dataclasses.astuple(state) for state in states],
        "processes": sorted(processes.items()),
    }
    _write(snapshot / FILE, content, durable=True)


def _write(path: pathlib.Path, content: Any, durable: bool = False) -> int:
    crc = _crc(content)
    with open(path, "x", encoding="utf-8", opener=_private) as file:
        json.dump({"format": _FORMAT, "crc32c": crc, "content": content}, file)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    return crc


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _crc(content: Any) -> int:
    text = json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
    return int(native.crc32c(np.frombuffer(text, np.uint8)))


# -- reading


def read(path: pathlib.Path) -> Snapshot:
    """Reads and checks everything but the content of records.

    Raises:
      CheckpointError: if something is missing, damaged, or of another version; the message names the file.
    """
    content, _ = _read(path / FILE, "the snapshot is not there, or incomplete")
    try:
        states = None if content["states"] is None else tuple(State(*_tuples(state)) for state in content["states"])
        step, named = int(content["step"]), [(int(process), int(crc)) for process, crc in content["processes"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path / FILE, error) from error
    processes = {}
    for process, expected in named:
        file = process_folder(path, process) / FILE
        part, crc = _read(file, "the snapshot is incomplete")
        if crc != expected:
            raise CheckpointError(f"{file} is that of another snapshot than {path / FILE}; restore another snapshot")
        try:
            processes[process] = [Optimizer.from_json(plain) for plain in part["optimizers"]]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(file, error) from error
    snapshot = Snapshot(path, step, states, processes)
    _check_files(snapshot)
    return snapshot


def _read(path: pathlib.Path, missing: str) -> tuple[Any, int]:
    """The content of a manifest, and its CRC32C."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        found, crc, content = whole["format"], whole["crc32c"], whole["content"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file: {missing}; restore another one") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if found != _FORMAT:
        raise CheckpointError(
            f"{path} has format {found!r}, this version reads {_FORMAT}; restore it with the version that wrote it"
        )
    if _crc(content) != crc:
        raise CheckpointError(
            f"{path}: its CRC32C is {_crc(content)}, not {crc}: it is damaged; restore another snapshot"
        )
    return content, crc


def _damaged(path: pathlib.Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({type(error).__name__}: {error}): the snapshot is damaged; restore another one"
    )


def _check_files(snapshot: Snapshot) -> None:
    for process, optimizers in snapshot.processes.items():
        for number, optimizer in enumerate(optimizers):
            folder = optimizer_folder(snapshot.path, process, number)
            try:
                sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
            except OSError as error:
                raise _damaged(folder, error) from error
            for (bucket, device), row in optimizer.records.items():
                expected = optimizer.buckets[bucket].record_bytes
                for subgroup, crc in enumerate(row):
                    name = record_name(bucket, device, subgroup)
                    if crc is not None and sizes.get(name) != expected:
                        raise CheckpointError(
                            f"{folder / name} (optimizer {optimizer.name!r}) has {sizes.get(name, 'no')} bytes, not "
                            f"{expected}: the snapshot is incomplete or damaged; restore another one"
                        )


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
