"""What ``benchmarks.step`` trains: square linear layers, and the jitted functions around them.

What always holds: params, gradients and states are donated where a training loop would donate them, so that the memory
that is measured is that of a training loop. Thread contract: the main thread.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_mlp_offload import native

Array = jax.Array
Params = dict[str, Array]
_AXIS = "fsdp"
_BATCH = 8
_REPEATS = 5
_KERNEL_ELEMENTS = 8 * 2**20  # more do not change the time of one


@dataclasses.dataclass(frozen=True)
class Workload:
    """Layers of ``width`` by ``width``, sharded by rows over ``devices``."""

    layers: int
    width: int
    dtype: Any
    devices: int

    @classmethod
    def of(cls, params: int, layers: int, dtype: Any, devices: int) -> Workload:
        """The layers that have about ``params`` elements together.

        Raises:
          ValueError: if there is less than one element a device and layer.
        """
        width = round(math.sqrt(params / layers) / devices) * devices
        if width < 1:
            raise ValueError(f"{params} params in {layers} layers over {devices} devices leave layers without elements")
        return cls(layers, width, dtype, devices)

    @property
    def elements(self) -> int:
        """Params in all."""
        return self.layers * self.width**2

    @property
    def param_bytes(self) -> int:
        """Bytes of all params."""
        return self.elements * int(jnp.dtype(self.dtype).itemsize)

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """None for one device."""
        return None if self.devices == 1 else Mesh(np.array(jax.devices()[: self.devices]), (_AXIS,))

    @property
    def specs(self) -> dict[str, PartitionSpec] | None:
        """How each layer is sharded; None for one device."""
        return None if self.mesh is None else dict.fromkeys(self._names(), PartitionSpec(_AXIS))

    def draw(self, seed: int, scale: float) -> Params:
        """Normal values, a layer at a time, so that no more than one layer is in memory beside them."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(_AXIS))
        rng = np.random.default_rng(seed)
        shape = (self.width, self.width)
        layers = {}
        for name in self._names():
            values = rng.standard_normal(shape, np.float32) * np.float32(scale)
            layers[name] = jax.device_put(jnp.asarray(values, self.dtype), sharding)
        jax.block_until_ready(layers)
        return layers

    def loss(self, params: Params, x: Array) -> Array:
        """Mean square of what the layers make of ``x``."""
        for name in self._names():
            x = jnp.tanh(x @ params[name])
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def batch(self) -> Array:
        """Some inputs."""
        return jax.random.normal(jax.random.key(0), (_BATCH, self.width)).astype(self.dtype)

    def _names(self) -> list[str]:
        return [f"layer_{index:03d}" for index in range(self.layers)]


def update_step(tx: optax.GradientTransformation) -> Callable[[Params, Any, Params], tuple[Params, Any]]:
    """Jitted: gradients are given; params and state are donated."""

    def step(params: Params, state: Any, grads: Params) -> tuple[Params, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def train_step(
    tx: optax.GradientTransformation, loss: Callable[[Params, Array], Array]
) -> Callable[[Params, Any, Array], tuple[Params, Any]]:
    """Jitted: forward, backward and update; params and state are donated."""

    def step(params: Params, state: Any, x: Array) -> tuple[Params, Any]:
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def time_kernel(elements: int, dtype: Any, threads: int) -> float:
    """Seconds of the Adam kernel over so many params and gradients of a dtype, in memory."""
    few = min(elements, _KERNEL_ELEMENTS)
    kind = native.DTYPES[jnp.dtype(dtype).name]
    best_s: float = native.time_kernel(few, kind, kind, threads, 3, True)
    return best_s * elements / few


def time_passes(workload: Workload) -> float:
    """Best seconds of forward and backward without our update.

    Gradients are consumed by a plain descent step in the same program: XLA compiles the passes as it does in a training
    step. (A program with nothing but the forward pass was measured to take several times as long as the whole step.)
    """

    def descend(params: Params, x: Array) -> Params:
        grads = jax.grad(workload.loss)(params, x)
        return {name: params[name] - grads[name] * jnp.asarray(1e-6, workload.dtype) for name in params}

    step = jax.jit(descend, donate_argnums=0)
    x = workload.batch()
    params = jax.block_until_ready(step(workload.draw(seed=0, scale=workload.width**-0.5), x))
    times = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        params = jax.block_until_ready(step(params, x))
        times.append(time.perf_counter() - begin_s)
    return min(times)
