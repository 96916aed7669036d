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
_SPARE_BLOCKS = 64  # for ops under way beside those of one step


class Devices:
    """See the module's text.

    Args:
      engine: the native engine.
      update_on: where updates run.
      kernel_threads: of the host.
    """

    def __init__(self, engine: Any, update_on: UpdateOn, kernel_threads: int) -> None:
        self._engine = engine
        self._update_on = update_on
        self._kernel_threads = kernel_threads
        self._emulation = accelerators.emulation()
        self._platform: str | None = None
        self._accelerator: accelerators.Accelerator | None = None
        self._on_device: dict[int, bool] = {}  # of accelerators, by ordinal: whether they update records themselves
        self._told: set[str] = set()

    def serve(self, platform: str) -> bool:
        """Gets ready for devices of a JAX platform; returns whether they are accelerators, and the op is split.

        Raises:
          ValueError: if the store serves another platform, or there is no way to serve this one.
          RuntimeError: if CUDA cannot be used; says why.
        """
        if self._platform is None:
            if platform == "cpu":
                self._accelerator = accelerators.emulated(self._emulation) if self._emulation else None
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

    def add(self, ordinals: Sequence[int], buckets: int) -> None:
        """Devices that requests of another optimizer will come from, each of its ``buckets`` in each step.

        Raises:
          ValueError: if there is no such device.
          RuntimeError: if an accelerator gives no streams, events or memory.
        """
        for ordinal in ordinals:
            if self._accelerator is None:
                self._engine.add_device(ordinal)
                continue
            device = self._accelerator.device(ordinal)
            if ordinal not in self._on_device:
                runtime = self._accelerator.runtime
                why = native.add_linked_device(self._engine, ordinal, runtime, device, CHUNK_BYTES, CHUNKS)
                self._place_updates(ordinal, not why and self._choose(device))
                self._unpinned(ordinal, why)
            why = native.add_blocks(self._engine, ordinal, 2 * buckets + _SPARE_BLOCKS)
            self._unpinned(ordinal, why)

    def add_slots(self, ordinals: Sequence[int], slots: int, slot_bytes: int) -> None:
        """New slots for devices that were added: those of the first come first.

        Raises:
          RuntimeError: if the system gives no memory.
        """
        accelerator = self._accelerator
        if accelerator is None:
            self._engine.add_slots(slots * len(ordinals), slot_bytes)
            return
        for ordinal in ordinals:
            device = accelerator.device(ordinal)
            why = native.add_device_slots(self._engine, accelerator.runtime, device, slots, slot_bytes)
            self._unpinned(ordinal, why)

    def _choose(self, device: int) -> bool:
        assert self._accelerator is not None
        try:
            sharers = self._accelerator.count
            return choose(self._update_on, self._accelerator.runtime, device, self._kernel_threads, sharers)
        except RuntimeError as error:  # no memory of the device's to measure with, say
            self._tell(f"where updates are faster could not be measured, so they run on the host: {error}")
            return False

    def _place_updates(self, ordinal: int, on_device: bool) -> None:
        native.update_on_device(self._engine, ordinal, on_device)
        self._on_device[ordinal] = on_device

    def _unpinned(self, ordinal: int, why: str) -> None:
        """What a device's updates read or write is not pinned (if there is a reason): it could not reach it."""
        if why:
            self._place_updates(ordinal, False)
            self._tell(
                "host memory could not be pinned, so copies to and from devices wait for what their streams hold, and "
                f"updates run on the host: {why}"
            )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, errors.DeviceWarning, stacklevel=2)

    def stats(self) -> list[dict[str, Any]]:
        """Of each accelerator: what it moved, and where its updates run."""
        return [
            {"ordinal": ordinal, "update_on": "device" if on_device else "host"}
            | native.link_stats(self._engine, ordinal)
            for ordinal, on_device in sorted(self._on_device.items())
        ]
