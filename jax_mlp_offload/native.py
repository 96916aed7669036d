"""The extension, and what it takes: the only module that imports it. Checks at import that this jaxlib can load it.

Built against the FFI headers of the oldest supported jaxlib; a library built against newer ones than the running
jaxlib's would stop all of JAX from starting, so the versions are compared before anything is registered.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np

from jax_mlp_offload import _native

_PAGE_BYTES = 4096
Engine = _native.Engine
DeviceRuntime = _native.DeviceRuntime
KINDS = ("arrived", "read", "written", "updated", "handed_back", "agreed", "woken", "lost")
"""Kinds of an event, by the number that comes first in it."""

RULES = {"adam": 0, "sgd": 1}
"""Numbers of ``Rule`` in ``ffi/core/update.h``."""

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Numbers of ``DType`` in ``ffi/core/dtype.h``."""

EMULATED_CALLS: dict[str, int] = _native.EMULATED_CALLS
"""Calls of an emulated accelerator that can fail, and their numbers."""

crc32c = _native.crc32c
read_file = _native.read_file
write_file = _native.write_file
sync_file_system = _native.sync_file_system
measure_stream = _native.measure_stream
time_kernel = _native.time_kernel
now_s = _native.now_s
inject_fault = _native.inject_fault
clear_faults = _native.clear_faults
register_engine = _native.register_engine
unregister_engine = _native.unregister_engine
isa_in_use = _native.isa_in_use
force_isa = _native.force_isa
runtime_of_capsule = _native.runtime_of_capsule
emulated_runtime = _native.emulated_runtime
add_device_slots = _native.add_device_slots
add_linked_device = _native.add_linked_device
add_blocks = _native.add_blocks
update_on_device = _native.update_on_device
link_stats = _native.link_stats
measure_link = _native.measure_link
CELL_ELEMENTS: int = _native.CELL_ELEMENTS
CELL_OF_ANY_PARAMS: int = _native.CELL_OF_ANY_PARAMS
CELL_WITHOUT_MASTERS: int = _native.CELL_WITHOUT_MASTERS
ADAM_HYPER_COUNT: int = _native.ADAM_HYPER_COUNT
SGD_HYPER_COUNT: int = _native.SGD_HYPER_COUNT


@dataclasses.dataclass(frozen=True, slots=True)
class RuleSpec:
    """What the kernel must know of a rule, for params of one dtype."""

    rule: str  # of RULES
    mu_dtype: str  # of DTYPES, as nu_dtype
    nu_dtype: str
    has_mu: bool
    nesterov: bool
    hyper_count: int  # hyperparameters in the operand


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def aligned(size_bytes: int) -> np.ndarray[Any, Any]:
    """Memory that O_DIRECT takes: uint8 [size_bytes] from the start of a page on."""
    whole = np.empty(size_bytes + _PAGE_BYTES, np.uint8)
    begin = -int(whole.ctypes.data) % _PAGE_BYTES
    return whole[begin : begin + size_bytes]


def _runtime_api_version() -> tuple[int, int]:
    """The FFI API version of the jaxlib that is running, from its headers."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text(encoding="utf-8")
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in numbers:
        raise ImportError(f"jax_mlp_offload cannot tell the FFI API version of jaxlib from {header}")
    major, minor = (int(number[1]) for number in numbers if number)
    return major, minor


def _register() -> None:
    built, running = tuple(_native.FFI_API_VERSION), _runtime_api_version()
    if built[0] != running[0] or built[1] > running[1]:
        raise ImportError(
            f"jax_mlp_offload was built against XLA FFI API {built[0]}.{built[1]}, but this jaxlib has "
            f"{running[0]}.{running[1]}; install a newer jaxlib, or build the package again"
        )
    for platform, targets in _native.registrations().items():
        for name, target in targets.items():
            jax.ffi.register_ffi_target(name, target, platform=platform)


_register()
