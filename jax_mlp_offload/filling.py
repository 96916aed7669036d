"""Filling the records of an optimizer from whole leaves: the arrays of a checkpoint, or the records of a snapshot.

Each record reads just what it holds, from wherever that lies in them; so they may have been written on another mesh, by
other processes, with other subgroups, or by plain optax. Memory is bounded by the store's slots and the chunks that are
decoded. Thread contract: any thread, several at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_mlp_offload import native
from jax_mlp_offload.binding import Binding
from jax_mlp_offload.capture import Key
from jax_mlp_offload.division import Box, Piece, boxes_of
from jax_mlp_offload.errors import CheckpointError, CheckpointWarning, DeadlineError, OffloadError
from jax_mlp_offload.load import Fill
from jax_mlp_offload.plan import SECTIONS, BucketPlan
from jax_mlp_offload.types import POISON

_NAMES_SHOWN = 4
_DEADLINE_S = 600.0  # for one range of an array


class Source(Protocol):
    """Where a section of a whole leaf is read from: a TensorStore, or what behaves like one."""

    @property
    def dtype(self) -> Any:
        """Of its elements; has a ``name``."""

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        """A part, whose ``read()`` returns a future of its elements."""


Arrays = Mapping[tuple[int, str], Source]
"""The source of each (leaf, section); a section may be missing."""


class Filler:
    """Fills in records of one optimizer.

    Args:
      binding: the optimizer.
      arrays: where to read from.

    Raises:
      ValueError: if it cannot be told how the optimizer's shards make up whole leaves.
    """

    def __init__(self, binding: Binding, arrays: Arrays) -> None:
        self._binding, self._arrays = binding, arrays
        self._process = jax.process_index()
        self._division = binding.division()

    def fill(self, key: Key, record: np.ndarray[Any, Any]) -> None:
        """Fills in a record, uint8 [record_bytes]."""
        plan = self._binding.plan.buckets[key.bucket]
        first, count = plan.subgroups[key.subgroup]
        record[:] = 0
        reads: list[tuple[str, np.ndarray[Any, Any], Any]] = []
        masters = True
        holder = self._division.holder_of(self._process, key.device)
        for piece in self._division.pieces(key.bucket, holder, first, count):
            for section in SECTIONS:
                if not plan.has(section):
                    continue
                array = self._arrays.get((piece.leaf, section))
                if array is None and section == "master":
                    masters = False
                    continue
                if array is None:
                    path = self._binding.leaves[piece.leaf].path
                    raise CheckpointError(
                        f"there is no {section} of {path}: the checkpoint is incomplete; restore another one"
                    )
                dtype = self._binding.section_dtype(piece.leaf, section)
                begin = plan.offset(section) + piece.at * dtype.itemsize
                target = record[begin : begin + (piece.end - piece.begin) * dtype.itemsize].view(dtype)
                what = f"the {section} of {self._binding.leaves[piece.leaf].path}"
                reads += [(what, *read) for read in _reads(array, piece, target)]
        for what, target, read in reads:
            target[:] = values_of(what, read).reshape(-1)  # converts, where dtypes differ
        if plan.layout.guarded:
            cells = native.CELL_OF_ANY_PARAMS if masters else native.CELL_WITHOUT_MASTERS
            record[plan.cells_offset :].view(np.uint32)[:] = cells


def lacks_masters(plan: BucketPlan, record: np.ndarray[Any, Any]) -> bool:
    """Whether a record was loaded without masters and not updated since: the params are the masters, whatever it holds."""
    if not plan.layout.guarded:
        return False
    first = record[plan.cells_offset : plan.cells_offset + 4].view(np.uint32)[0]
    return bool(first == native.CELL_WITHOUT_MASTERS)


def values_of(what: str, read: Any) -> np.ndarray[Any, Any]:
    """What a source gives.

    Raises:
      CheckpointError: if it cannot be read.
      DeadlineError: if storage does not answer.
    """
    try:
        values: np.ndarray[Any, Any] = read.result(_DEADLINE_S)
    except TimeoutError as error:
        raise DeadlineError(f"{what}: the checkpoint's storage gave no answer for {_DEADLINE_S:g} s") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{what} cannot be read ({error}): the checkpoint is incomplete or damaged; restore another one"
        ) from error
    return values


def _reads(array: Any, piece: Piece, target: np.ndarray[Any, Any]) -> list[tuple[np.ndarray[Any, Any], Any]]:
    reads, at = [], 0
    for box in boxes_of([size for _, size in piece.box], piece.begin, piece.end):
        size = int(np.prod([n for _, n in box], dtype=np.int64))
        reads.append((target[at : at + size], array[_index(piece.box, box)].read()))
        at += size
    return reads


def _index(outer: Box, inner: Box) -> tuple[slice, ...]:
    return tuple(slice(o + s, o + s + n) for (o, _), (s, n) in zip(outer, inner, strict=True))


def warn_of_conversions(binding: Binding, arrays: Arrays, where: str, dropped: Sequence[str] = ()) -> None:
    """Says which moments are stored otherwise than this optimizer keeps them, and whether masters are missing."""
    converted = {
        f"{section} from {array.dtype.name} to {wanted.name}"
        for (leaf, section), array in arrays.items()
        if section != "master"
        and array.dtype.name != (wanted := binding.section_dtype(leaf, section)).name
        and not (section == "nu" and wanted.name == "bfloat16")  # optax has none: it was widened to be saved
    }
    if converted:
        warnings.warn(
            f"the state at {where}: moments are converted ({', '.join(sorted(converted))})",
            CheckpointWarning,
            stacklevel=2,
        )
    if dropped:
        warnings.warn(
            f"the state at {where} was saved of 16-bit params, and these are float32 ({_shown(dropped)}): they start from "
            "the rounded params, without the float32 masters of the checkpoint",
            CheckpointWarning,
            stacklevel=2,
        )
    lacking = [binding.leaves[leaf].path for leaf in binding.masters() if (leaf, "master") not in arrays]
    if lacking:
        warnings.warn(
            f"the state at {where} comes without float32 masters of {len(lacking)} 16-bit params ({_shown(lacking)}): the "
            "params are taken for them, as they are. A checkpoint that jmo.orbax.OffloadSave wrote has them",
            CheckpointWarning,
            stacklevel=2,
        )


def _shown(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _NAMES_SHOWN} more" if len(paths) > _NAMES_SHOWN else ""
    return ", ".join(paths[:_NAMES_SHOWN]) + more


def load(binding: Binding, arrays: Arrays, engine: Any, count: int = 0, fill: Fill | None = None) -> int:
    """Puts the arrays' state in the place of an optimizer's; returns its ticket, the same in all processes.

    Args:
      binding: the optimizer.
      arrays: where to read from.
      engine: of its store.
      count: updates that the state has had.
      fill: fills in its records instead; the arrays are not used then.

    Raises:
      OffloadError: if this process or another one could not load it.
    """
    if not binding.plan.buckets:
        return 0
    error: BaseException | None = None
    mine = 0
    try:
        mine = engine.states.load(binding.number, fill or Filler(binding, arrays).fill, count)
    except BaseException as found:
        error = found
        if not binding.layout.spans:
            raise
    if not binding.layout.spans:
        return mine
    agreed = _largest(binding, POISON if error is not None else mine)
    if error is not None:
        raise error
    engine.states.take_ticket(binding.number, mine, agreed)
    if agreed == POISON:
        raise OffloadError(
            f"optimizer {binding.name!r}: another process could not load its part; its own message says why"
        )
    return agreed


def _largest(binding: Binding, ticket: int) -> int:
    """The largest of all processes' tickets."""
    mesh = binding.layout.mesh
    assert mesh is not None
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    tickets = jax.make_array_from_callback((mesh.size,), everywhere, lambda _: np.full(1, ticket, np.uint32))
    return int(jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(tickets))
