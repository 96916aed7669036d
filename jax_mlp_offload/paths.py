"""Names of leaves: what a tree calls them, whatever a library wraps around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def canonical_path(path: Sequence[Any]) -> str:
    """A path as text. nnx has ``.value`` at its end at init and not at update: it is left out."""
    keys = list(path)
    if keys and str(keys[-1]) in (".value", "['value']") and isinstance(keys[-1], jax.tree_util.GetAttrKey):
        keys.pop()
    return jax.tree_util.keystr(tuple(keys)) if keys else "params"
