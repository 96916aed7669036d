"""The Zarr v3 arrays of one tier that is reached through TensorStore: made, opened, cut into objects.

Thread contract: the event loop's thread, but for ``add`` (any, before others use that array) and ``filled_up``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import tensorstore as ts

from jax_mlp_offload.backends.home import Home
from jax_mlp_offload.backends.loop import Loop
from jax_mlp_offload.backends.requests import Begun, Requests, Silence
from jax_mlp_offload.backends.zarr import metadata

_PAGE_BYTES = 4096


class Arrays:
    """See the module's text.

    Args:
      kv: the store, a TensorStore ``KvStore``.
      spec: its spec; what it has for a path comes before the home's prefix.
      context: TensorStore's.
      home: where the arrays are.
      requests: how to reach it.
      loop: where this is used.
      object_bytes: about how long an object is to be; None: as long as the record.
    """

    def __init__(
        self,
        kv: Any,
        spec: dict[str, Any],
        context: Any,
        home: Home,
        requests: Requests,
        loop: Loop,
        object_bytes: int | None,
    ) -> None:
        self._kv, self._spec, self._context = kv, spec, context
        self._home, self._requests, self._loop = home, requests, loop
        self._object_bytes = object_bytes
        self._declared: dict[str, tuple[int, int]] = {}  # records, and bytes of each
        self._made: dict[str, asyncio.Task[None]] = {}  # whose zarr.json is written, or about to be
        self._open: dict[str, Any] = {}

    def add(self, name: str, records: int, record_bytes: int) -> None:
        """There will be records for this array."""
        self._declared[name] = records, record_bytes

    def object_size(self, record_bytes: int) -> int:
        """Bytes of one object of a record: whole pages, and about as many as is wanted."""
        if self._object_bytes is None:
            return record_bytes
        objects = max(1, round(record_bytes / self._object_bytes))
        return -(-record_bytes // (objects * _PAGE_BYTES)) * _PAGE_BYTES

    async def make(self, name: str) -> None:
        """Writes an array's zarr.json before its first use.

        Raises:
          RequestError: if the store does not take it; the next use tries again.
        """
        task = self._made.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._made[name] = self._loop.start(self._write_metadata(name))
        await asyncio.shield(task)  # others may wait for it too

    def get(self, name: str, failed: Any) -> Any:
        """An array that has been made, as a TensorStore.

        Args:
          name: the array.
          failed: what this gave before, if a request to it has failed. Another comes instead: in one cache a request
            that hangs would hold up every later one of its object.
        """
        if failed is not None and self._open[name] is failed:
            self._open[name] = self._opened(name)
        return self._open[name]

    async def _write_metadata(self, name: str) -> None:
        text = json.dumps(self._metadata(name), indent=2).encode()
        key = f"{self._home.prefix}{name}/zarr.json"
        what = f"write of {self._home.url}{name}/zarr.json"

        def begin() -> Begun:  # opens it too: what TensorStore says to that holds the whole spec, as all it says
            if name not in self._open:
                self._open[name] = self._opened(name)
            return Begun(self._kv.write(key, text))

        await self._requests.run(what, begin, silence=Silence.LINGER)

    def _metadata(self, name: str) -> dict[str, Any]:
        records, record_bytes = self._declared[name]
        object_bytes = self.object_size(record_bytes)
        return metadata(records, -(-record_bytes // object_bytes) * object_bytes, object_bytes)

    def _opened(self, name: str) -> Any:
        """A TensorStore with a cache (of nothing) of its own. Asks the store nothing."""
        spec = {
            "driver": "zarr3",
            "kvstore": {**self._spec, "path": f"{self._spec.get('path', '')}{self._home.prefix}{name}/"},
            "metadata": self._metadata(name),
            "assume_metadata": True,
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}}, parent=self._context)
        return ts.open(spec, context=context).result()


def filled_up(view: np.ndarray[Any, Any], object_bytes: int) -> np.ndarray[Any, Any] | None:
    """A copy of a record's last object in full length, or None where it has that.

    TensorStore would read the object first to write a part of it.
    """
    rest = view.size % object_bytes
    if rest == 0:
        return None
    tail = np.empty(object_bytes, np.uint8)
    tail[:rest] = view[view.size - rest :]
    tail[rest:] = 0
    return tail
