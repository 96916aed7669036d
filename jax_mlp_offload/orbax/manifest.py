"""What a checkpoint has of offloaded states beside the tree that plain optax would have.

``<item>/jax_mlp_offload/manifest.json`` says of each state where it stood, which optimizer it was of, and its count;
``<item>/jax_mlp_offload/<n>.<leaf>/`` are zarr arrays of what 16-bit params lack of their float32 masters: int16
remainders of bfloat16 params (``master_bits - (param_bits << 16)``), whole float32 masters of float16 ones. Plain Orbax
takes no notice.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jax_mlp_offload.errors import CheckpointError
from jax_mlp_offload.positions import Keys

FOLDER = "jax_mlp_offload"
_FILE = "manifest.json"
_FORMAT = 1
FRESH = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One state.

    Attributes:
      keys: where it stood.
      identity: which optimizer it was of: its name, or its rule; ``FRESH`` if no update had been made from it.
      count: updates so far.
      masters: names of arrays by the paths of leaves.
    """

    keys: Keys
    identity: str
    count: int
    masters: dict[str, str]


def dump(entries: list[Entry]) -> str:
    """The manifest's text."""
    states = [dataclasses.asdict(entry) for entry in entries]
    return json.dumps({"format": _FORMAT, "states": states}, indent=1)


def load(directory: Any) -> dict[Keys, Entry]:
    """The manifest of a checkpoint's item, by position; empty: it has none, so plain optax wrote it.

    Args:
      directory: the item's, an ``epath.Path``.

    Raises:
      CheckpointError: if there is one that cannot be read.
    """
    folder = directory / FOLDER
    if not folder.exists():
        return {}
    path = folder / _FILE
    try:
        content = json.loads(path.read_text())
        found = content["format"]
        if found != _FORMAT:
            raise CheckpointError(
                f"{path} has format {found!r}, this version reads {_FORMAT}; restore it with the version that wrote it"
            )
        entries = [
            Entry(tuple(map(str, state["keys"])), state["identity"], int(state["count"]), dict(state["masters"]))
            for state in content["states"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}): the checkpoint is incomplete or damaged; restore "
            f"another one, or remove {folder} to go on without what it has of float32 masters"
        ) from error
    return {entry.keys: entry for entry in entries}


def write(directory: Any, entries: list[Entry]) -> None:
    """Writes the manifest of an item, the last thing of it that is ours."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILE).write_text(dump(entries))
