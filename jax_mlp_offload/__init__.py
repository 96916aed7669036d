"""Optimizer state of JAX training on host memory and NVMe.

``jmo.Store`` owns memory and tiers; ``jmo.adamw`` and its like are optax optimizers that keep their state there.
"""

import importlib
from typing import Any

from jax_mlp_offload.apply import apply_updates
from jax_mlp_offload.errors import (
    AcceleratorError,
    CheckpointError,
    CheckpointWarning,
    ClosedError,
    CorruptRecordError,
    DeadlineError,
    DeviceWarning,
    ForeignParamsError,
    ForeignParamsWarning,
    OffloadError,
    SkippedStepWarning,
    SnapshotWarning,
    StaleTicketError,
    TierError,
    TierWarning,
)
from jax_mlp_offload.optimizers import adam, adamw, sgd
from jax_mlp_offload.read import read_masters, read_state
from jax_mlp_offload.state import OffloadState
from jax_mlp_offload.store import Store
from jax_mlp_offload.tiers import File, Remote

__all__ = [
    "AcceleratorError",
    "CheckpointError",
    "CheckpointWarning",
    "ClosedError",
    "CorruptRecordError",
    "DeadlineError",
    "DeviceWarning",
    "File",
    "ForeignParamsError",
    "ForeignParamsWarning",
    "OffloadError",
    "OffloadState",
    "Remote",
    "SkippedStepWarning",
    "SnapshotWarning",
    "StaleTicketError",
    "Store",
    "TierError",
    "TierWarning",
    "adam",
    "adamw",
    "apply_updates",
    "orbax",
    "read_masters",
    "read_state",
    "sgd",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "orbax":  # takes a second to import, and only checkpoints need it
        return importlib.import_module("jax_mlp_offload.orbax")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
