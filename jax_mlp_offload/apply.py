"""Applying updates to params of 16 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def apply_updates(params: Any, updates: Any) -> Any:
    """Adds updates to params, as :func:`optax.apply_updates`, also under strict dtype promotion.

    Args:
      params: a tree of arrays.
      updates: a tree of the same structure and shapes; float32 for 16-bit params of an offloaded optimizer.

    Returns:
      The new params, in the dtypes of ``params``: ``(f32(p) + u)`` rounded to nearest even.
    """

    def add(param: Any, update: Any) -> Any:
        if param is None:
            return None
        param = jnp.asarray(param)
        return (param + update).astype(param.dtype)

    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)
