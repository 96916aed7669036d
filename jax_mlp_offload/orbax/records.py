"""Reading a captured bucket: sections of its leaves out of its records, each record once.

Thread contract: one thread an object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jax_mlp_offload.binding import Binding
from jax_mlp_offload.capture import Capture, Key
from jax_mlp_offload.division import Division, Shard
from jax_mlp_offload.filling import lacks_masters

_CACHE_BYTES = 16 * 2**20


class Records:
    """The records of one bucket, read as they are asked for.

    Args:
      binding: the optimizer.
      division: how it is divided.
      capture: its records; None: nothing is stored.
      process: this one's number.
      bucket: number.
    """

    def __init__(
        self, binding: Binding, division: Division, capture: Capture | None, process: int, bucket: int
    ) -> None:
        self._binding, self._division, self._capture = binding, division, capture
        self._process, self._bucket = process, bucket
        self.without_masters = False  # as far as they have been read
        self._plan = binding.plan.buckets[bucket]
        self._most = max(1, _CACHE_BYTES // self._plan.record_bytes)
        self._read: OrderedDict[Key, np.ndarray[Any, Any] | None] = OrderedDict()

    def keys(self) -> Iterator[Key]:
        """All of them."""
        for device in self._binding.layout.devices:
            for subgroup in range(len(self._plan.subgroups)):
                yield Key(self._bucket, device, subgroup)

    def gather(self, shard: Shard, begin: int, end: int, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Puts what this process has of elements ``[begin, end)`` of a shard into arrays of zeros, by section."""
        for span in shard.spans:
            low, high = max(begin, span.begin), min(end, span.end)
            holder = self._division.holders[span.holder]
            if low >= high or holder.process != self._process:
                continue
            size = self._plan.subgroups[0][1]  # of all but the last
            at = span.at - span.begin  # from places in the shard to those in the bucket
            for subgroup in range((low + at) // size, -(-(high + at) // size)):
                first, count = self._plan.subgroups[subgroup]
                shift = at - first
                start, stop = max(low + shift, 0), min(high + shift, count)
                record = self._get(Key(self._bucket, holder.ordinal, subgroup))
                if record is None:
                    continue
                for section, array in arrays.items():
                    offset = self._plan.offset(section) + start * array.itemsize
                    part = record[offset : offset + (stop - start) * array.itemsize].view(array.dtype)
                    array[start - shift - begin : stop - shift - begin] = part

    def _get(self, key: Key) -> np.ndarray[Any, Any] | None:
        if key not in self._read:
            target = self._read.popitem(last=False)[1] if len(self._read) >= self._most else None
            if self._capture is None or not self._capture.has(key):
                self._read[key] = None
                self.without_masters = True
            else:
                target = np.empty(self._plan.record_bytes, np.uint8) if target is None else target
                self._capture.read(key, target)
                self.without_masters = self.without_masters or lacks_masters(self._plan, target)
                self._read[key] = target
        return self._read[key]
