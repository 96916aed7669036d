"""Emulated accelerators for tests that ask for them."""

from __future__ import annotations

from typing import Any

from jax_mlp_offload import accelerators

DELAY_US = 50


def emulate(count: int = 1, **more: Any) -> Any:
    """So many of them, with short delays."""
    return accelerators.emulate(count, seed=3, longest_delay_us=DELAY_US, **more)
