"""The devices of one store: their slots, and, where they are accelerators, their links.

A store serves the devices of one platform. Thread contract: under the engine's lock, but for ``stats``, which is safe
from any thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from jax_mlp_offload import accelerators, errors, native
from jax_mlp_offload.update_on import UpdateOn, choose

CHUNK_BYTES = 8 << 20  # of pinned memory that gradients and params pass through
CHUNKS = 8  # of each device: some on their way to the host, some in the kernels, some on their way back
_BLOCKS = 1024  # ops under way on a device


class Devices:
    """See the module's text.

    Args:
      engine: the native engine.
      update_on: where updates run.
    """

    def __init__(self, engine: Any, update_on: UpdateOn) -> None:
        self._engine = engine
        self._update_on = update_on
        self._platform: str | None = None
        self._accelerator: accelerators.Accelerator | None = None
        self._on_device: dict[int, bool] = {}  # of accelerators, by ordinal: whether they update records themselves
        self._warned = False

    def serve(self, platform: str) -> bool:
        """Gets ready for devices of a JAX platform; returns whether they are accelerators, and the op is split.

        Raises:
          ValueError: if the store serves another platform, or there is no way to serve this one.
          RuntimeError: if CUDA cannot be used; says why.
        """
        if self._platform is None:
            if platform == "cpu":
                self._accelerator = accelerators.emulated()
            elif platform in ("gpu", "cuda"):
                self._accelerator = accelerators.cuda()
            else:
                raise ValueError(f"params on platform {platform!r} cannot be offloaded; use CPU or CUDA devices")
            self._platform = platform
        elif platform != self._platform:
            raise ValueError(
                f"params on platform {platform!r}, but other optimizers of this store have theirs on {self._platform!r}; "
                "use another Store"
            )
        return self._accelerator is not None

    def add_slots(self, devices: Sequence[int], slots: int, slot_bytes: int) -> None:
        """New slots: those of the first device come first."""
        accelerator = self._accelerator
        if accelerator is None:
            self._engine.add_slots(slots * len(devices), slot_bytes)
            return
        for ordinal in devices:
            why = native.add_device_slots(
                self._engine, accelerator.runtime, accelerator.device(ordinal), slots, slot_bytes
            )
            self._warn_unpinned(why)

    def add(self, ordinal: int) -> None:
        """A device that requests will come from.

        Raises:
          RuntimeError: if an accelerator gives no streams, events or memory.
        """
        accelerator = self._accelerator
        if accelerator is None:
            self._engine.add_device(ordinal)
            return
        if ordinal in self._on_device:
            return
        device = accelerator.device(ordinal)
        why = native.add_linked_device(self._engine, ordinal, accelerator.runtime, device, CHUNK_BYTES, CHUNKS, _BLOCKS)
        self._warn_unpinned(why)
        on_device = not why and choose(self._update_on, accelerator.runtime, device)
        native.update_on_device(self._engine, ordinal, on_device)
        self._on_device[ordinal] = on_device

    def _warn_unpinned(self, why: str) -> None:
        if why and not self._warned:
            self._warned = True
            warnings.warn(
                "host memory could not be pinned, so copies to and from devices are slow, and updates run on the host: "
                f"{why}",
                errors.DeviceWarning,
                stacklevel=2,
            )

    def stats(self) -> list[dict[str, Any]]:
        """Of each accelerator: what it moved, and where its updates run."""
        return [
            {"ordinal": ordinal, "update_on": "device" if on_device else "host"}
            | native.link_stats(self._engine, ordinal)
            for ordinal, on_device in sorted(self._on_device.items())
        ]
