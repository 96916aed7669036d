"""Where an accelerator's updates run: in the host's kernels, or in one of its own over the records in pinned host memory.

Per param (bfloat16 with float32 moments) the host way moves 4 bytes to the host and 2 back, and is bound by the slower
of that and the host's kernel; the device's moves its 10 bytes of state each way, at the speed of the link both ways.
A link like that of a Grace Hopper makes the second faster, PCIe mostly the first, and tiers may hide both.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

from jax_mlp_offload import native

_STATE_BYTES = 10  # of one param in its record: two moments and the remainder
_DOWN_BYTES, _UP_BYTES = 4, 2  # of gradient and param, and of the new param
PROBE_BYTES = 32 << 20  # of a copy whose bandwidth is measured
_PROBE_ELEMENTS = 1 << 22
_REPEATS = 3


class UpdateOn(enum.Enum):
    """``Store(update_on=)``."""

    HOST = "host"
    DEVICE = "device"
    AUTO = "auto"


def host_params_per_s(to_host_bps: float, to_device_bps: float, kernel_params_per_s: float) -> float:
    """Params that the host way updates in a second: its three stages overlap."""
    return min(to_host_bps / _DOWN_BYTES, to_device_bps / _UP_BYTES, kernel_params_per_s)


def device_params_per_s(both_bps: float) -> float:
    """Params that the device updates in a second, with ``both_bps`` bytes/s over the link, both directions together."""
    return both_bps / (2 * _STATE_BYTES)


def choose(wanted: UpdateOn, runtime: Any, device: int, threads: int, sharers: int) -> bool:
    """Whether a device is to update its records itself; ``AUTO`` measures link and kernel, in some tenths of a second.

    Args:
      wanted: by the user.
      runtime: of the device.
      device: its number there.
      threads: of the host's kernel.
      sharers: devices that share it.

    Raises:
      RuntimeError: if the device cannot be measured.
    """
    if wanted is not UpdateOn.AUTO:
        return wanted is UpdateOn.DEVICE
    to_host_bps, to_device_bps, both_bps = native.measure_link(runtime, device, PROBE_BYTES, _REPEATS)
    kernel = _kernel_params_per_s(threads) / sharers
    return device_params_per_s(both_bps) > host_params_per_s(to_host_bps, to_device_bps, kernel)


@functools.cache
def _kernel_params_per_s(threads: int) -> float:
    """Of this machine's host kernel."""
    bf16 = native.DTYPES["bfloat16"]
    seconds: float = native.time_kernel(_PROBE_ELEMENTS, bf16, bf16, threads, _REPEATS, True)
    return _PROBE_ELEMENTS / seconds
