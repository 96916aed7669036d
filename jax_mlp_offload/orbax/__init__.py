"""Checkpoints with Orbax: ``CheckpointManager.save(step, args=jmo.orbax.OffloadSave(state))`` and ``OffloadRestore``."""

from jax_mlp_offload.orbax.handler import OffloadHandler, OffloadRestore, OffloadSave

__all__ = ["OffloadHandler", "OffloadRestore", "OffloadSave"]
