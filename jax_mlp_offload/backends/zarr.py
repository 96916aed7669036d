"""The Zarr v3 array that holds the records of one bucket on one device."""

from __future__ import annotations

from typing import Any


def metadata(records: int, record_bytes: int, chunk_bytes: int) -> dict[str, Any]:
    """``zarr.json`` of a uint8 array ``[records, record_bytes]``.

    Chunks are uncompressed and ``chunk_bytes`` long; where a record is one chunk, the chunk's file is the record, byte for
    byte.
    """
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [records, record_bytes],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, chunk_bytes]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "attributes": {},
    }
