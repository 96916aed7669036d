"""Writing shards into TensorStore, with bounded memory. Thread contract: one thread an object."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_mlp_offload.division import Shard, boxes_of
from jax_mlp_offload.errors import DeadlineError
from jax_mlp_offload.orbax.chunks import ranges_of

IN_FLIGHT_BYTES = 32 * 2**20
"""That TensorStore may still have to write."""


def result_of(future: Any, timeout_s: float) -> Any:
    """What a future of TensorStore gives.

    Raises:
      DeadlineError: if it gives nothing for so long.
    """
    try:
        return future.result(timeout_s)
    except TimeoutError as error:
        raise DeadlineError(f"the checkpoint's storage gave no answer for {timeout_s:g} s") from error


class Writes:
    """Writes that TensorStore has not ended yet.

    Args:
      deadline_s: how long one may take.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._open: deque[tuple[Any, int]] = deque()
        self._bytes = 0

    def add(self, target: Any, shard: Shard, begin: int, end: int, array: np.ndarray[Any, Any]) -> None:
        """Writes elements ``[begin, end)`` of a shard; waits until there is room for it."""
        for box in boxes_of(shard.shape, begin, end):
            index = tuple(slice(o + s, o + s + n) for (o, _), (s, n) in zip(shard.box, box, strict=True))
            shape = tuple(size for _, size in box)
            values = array.reshape(shape).astype(target.dtype.numpy_dtype, copy=False)
            self._open.append((target[index].write(values, can_reference_source_data_indefinitely=True), values.nbytes))
            self._bytes += values.nbytes
        while self._bytes > IN_FLIGHT_BYTES:
            self._end_one()

    def finish(self) -> None:
        """Waits for all."""
        while self._open:
            self._end_one()

    def _end_one(self) -> None:
        write, size_bytes = self._open.popleft()
        result_of(write, self._deadline_s)
        self._bytes -= size_bytes


def write_zeros(target: Any, whole: tuple[int, ...], shards: Sequence[Shard], writes: Writes) -> None:
    """Writes shards of which no record has anything."""
    for shard in shards:
        for begin, end in ranges_of(shard, whole):
            writes.add(target, shard, begin, end, np.zeros(end - begin, target.dtype.numpy_dtype))
