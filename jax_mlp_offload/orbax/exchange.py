"""Shards of which several processes have a share, on their way to the one that writes them.

They go through the checkpoint's own storage, which all processes can reach: nothing else is common to them while training
goes on. Each process puts down what it has, all wait for each other, then each writes its shards. Thread contract: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from jax_mlp_offload.division import Shard, Span
from jax_mlp_offload.orbax.writes import result_of


class Exchange:
    """What processes put down for each other.

    Args:
      folder: a path or URL that all can reach.
    """

    def __init__(self, folder: str) -> None:
        spec: Any = f"{folder}/" if "://" in folder else {"driver": "file", "path": f"{folder}/"}
        self._kv = ts.KvStore.open(spec).result()

    def put(self, shard: Shard, section: str, span: Span, begin: int, array: np.ndarray[Any, Any]) -> Any:
        """Puts down a span's elements from ``begin`` on; returns a future."""
        return self._kv.write(_key(shard, section, span, begin), array.tobytes())

    def get(
        self, shard: Shard, begin: int, end: int, arrays: Mapping[str, np.ndarray[Any, Any]], timeout_s: float
    ) -> None:
        """Puts elements ``[begin, end)`` of a shard, as all put them down, into an array for each section."""
        found = []
        for span in shard.spans:
            low, high = max(begin, span.begin), min(end, span.end)
            if low < high:
                for section, array in arrays.items():
                    read = self._kv.read(_key(shard, section, span, low))
                    found.append((array[low - begin : high - begin], read))
        for target, read in found:
            target[:] = np.frombuffer(result_of(read, timeout_s).value, target.dtype)


def _key(shard: Shard, section: str, span: Span, begin: int) -> str:
    box = "_".join(f"{start}.{size}" for start, size in shard.box)
    return f"{shard.leaf}.{section}.{box}.{span.holder}.{begin}"
