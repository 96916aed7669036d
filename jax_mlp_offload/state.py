"""The optimizer state in the training loop's pytree: a count and a ticket; all else is in the store."""

from __future__ import annotations

from typing import NamedTuple

import jax


class OffloadState(NamedTuple):
    """State of an offloaded optimizer.

    Attributes:
      count: i32 [], updates so far.
      ticket: u32 [1], which update's moments the store holds for this state. 0: none yet.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as in optax
    ticket: jax.Array
