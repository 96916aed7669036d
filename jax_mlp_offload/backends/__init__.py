"""Which mechanism serves which tier."""

from __future__ import annotations

from typing import Any

from jax_mlp_offload.backends.base import Backend, Place
from jax_mlp_offload.backends.direct import DirectBackend
from jax_mlp_offload.exclusive import Access, Sharing
from jax_mlp_offload.tiers import File, Tier

__all__ = ["Backend", "Place", "make_backend"]


def make_backend(tier: Tier, engine: Any, sharing: Sharing | None = None) -> Backend:
    """The backend of a tier.

    Args:
      tier: as the user named it.
      engine: the native engine, where transfers end as events.
      sharing: how the store shares its devices with others; None: it takes no turns.

    Raises:
      OSError: if the tier cannot be used.
      ValueError: if it cannot be one.
    """
    if isinstance(tier, File) and tier.io == "native":
        return DirectBackend(tier, engine, sharing or Sharing(Access.NEVER))
    from jax_mlp_offload.backends.kvstore import KvStoreBackend  # tensorstore takes long to import

    return KvStoreBackend(tier, engine)
