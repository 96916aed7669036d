"""Accelerators: which runtime moves data for the devices of a JAX platform.

On the CPU gradients and params are host memory, and no runtime is needed. CUDA's is an extension of its own, loaded when
an optimizer first meets params on a GPU. ``emulate`` puts an emulated accelerator in the place of the CPU's devices: the
ops are split and all data goes through streams of threads, so that what a GPU needs can be tried without one.

Thread contract: any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jax_mlp_offload import native


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """The devices of one platform.

    Attributes:
      runtime: what moves their data.
      count: how many there are in this process.
      emulated: whether they are the CPU's devices, whose ordinals count those of other processes, too.
    """

    runtime: Any
    count: int
    emulated: bool = False

    def device(self, ordinal: int) -> int:
        """The runtime's number of the device that XLA calls ``ordinal``.

        Raises:
          ValueError: if there is none.
        """
        if not self.emulated and ordinal >= self.count:
            raise ValueError(f"XLA has a device {ordinal}, but CUDA sees {self.count}")
        return ordinal % self.count


@dataclasses.dataclass(frozen=True, slots=True)
class EmulatedFailure:
    """The ``nth`` call of a kind on a device fails (from 0; -1: every one).

    Attributes:
      call: what fails: ``pin``, ``make_memory``, ``make_stream``, ``make_event``, ``copy_to_host``, ``copy_to_device``,
        ``copy_on_device``, ``set_zero``, ``set_u32``, ``update``, ``record``, ``wait``, ``wait_on_host``, or ``any`` of
        those that come in a step (``ffi/device/runtime.h`` says what they do).
      device: on which one.
      nth: which call.
      later: when the stream gets there, so that everything on the device fails from then on; else the call itself.
    """

    call: str
    device: int = 0
    nth: int = 0
    later: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Emulation:
    """What ``emulate`` was asked for."""

    devices: int
    seed: int
    longest_delay_us: int
    failures: tuple[EmulatedFailure, ...]


_emulation: list[Emulation] = []  # the last counts
_made = itertools.count()


@contextlib.contextmanager
def emulate(
    devices: int, seed: int = 0, longest_delay_us: int = 0, failures: Sequence[EmulatedFailure] = ()
) -> Iterator[None]:
    """Has stores that are made while this context lasts, on any thread, treat the CPU's devices as accelerators.

    Args:
      devices: how many to emulate; JAX's CPU devices are mapped to them by number.
      seed: of the delays.
      longest_delay_us: before and after each operation, in microseconds, at most.
      failures: what fails.

    Raises:
      ValueError: if there is no device to emulate, or a call is unknown.
    """
    if devices < 1:
        raise ValueError(f"devices={devices}: emulate at least one")
    for failure in failures:
        if failure.call not in native.EMULATED_CALLS:
            raise ValueError(f"call={failure.call!r} is unknown; use one of {', '.join(native.EMULATED_CALLS)}")
    wanted = Emulation(devices, seed, longest_delay_us, tuple(failures))
    _emulation.append(wanted)
    try:
        yield
    finally:
        _emulation.remove(wanted)


def emulation() -> Emulation | None:
    """What a store that is made now is to emulate."""
    return _emulation[-1] if _emulation else None


def emulated(wanted: Emulation) -> Accelerator:
    """An emulated accelerator of its own for a store."""
    failures = [(native.EMULATED_CALLS[f.call], f.device, f.nth, f.later) for f in wanted.failures]
    seed = wanted.seed + next(_made)
    return Accelerator(native.emulated_runtime(wanted.devices, seed, wanted.longest_delay_us, failures), wanted.devices)


def cuda() -> Accelerator:
    """This process's GPUs.

    Raises:
      RuntimeError: if the package was built without CUDA, or the driver does not serve it; says what to do.
    """
    try:
        extension = importlib.import_module("jax_mlp_offload._native_cuda")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "jax_mlp_offload: the params are on a GPU, but the package was built without CUDA; install it again where "
            "nvcc (CUDA 13) is on the PATH, with --config-settings=cmake.define.JMO_CUDA=ON to have that checked"
        ) from error
    runtime = native.runtime_of_capsule(extension.runtime(), extension.INTERFACE_VERSION)
    try:
        return Accelerator(runtime, runtime.devices())
    except RuntimeError as error:
        raise RuntimeError(f"jax_mlp_offload: the params are on a GPU, but CUDA gives none: {error}") from error
