"""Other AdamWs over the same number of params, and ours in a jitted step: what ``benchmarks.kernel`` compares with.

Each keeps its arrays for the whole run, so that no round pays for fresh memory. One that is not installed, or does not
start, is a row that says so. Thread contract: the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_mlp_offload as jmo

OPTAX = "optax.adamw in jit"
DONATED = "optax.adamw in jit, donated"
_LEARNING_RATE = 1e-3
_DECAY = 0.01


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Something that updates all params: ``run`` gives the best seconds of a pass, or says why it cannot."""

    name: str
    dtype: str
    threads: int
    run: Callable[[], float | str]
    bytes_per_param: int | None = None  # None: not compared with the memory bandwidth


def all_rivals(elements: int, passes: int, stack: contextlib.ExitStack) -> dict[str, Contestant]:
    """Everyone but the kernel, by name; what has to be closed goes on the stack."""
    cores = len(os.sched_getaffinity(0))
    made: list[Contestant] = []
    for dtype in ("float32", "bfloat16"):
        for name, donate in ((OPTAX, False), (DONATED, True)):
            run = _Lazy(passes, _optax, elements, dtype, donate)
            made.append(Contestant(f"{name}, {dtype}", dtype, cores, run))
        made.append(
            Contestant(f"jmo.adamw in jit, {dtype}", dtype, cores, _Lazy(passes, _ours, elements, dtype, stack))
        )
    made.append(Contestant("torch AdamW(fused)", "float32", cores, _Lazy(passes, _torch, elements)))
    made.append(Contestant("DeepSpeedCPUAdam", "float32", cores, _Lazy(passes, _deepspeed, elements)))
    return {contestant.name: contestant for contestant in made}


class _Lazy:
    """Makes a contestant's pass at its first round, and times the best of some passes in each."""

    def __init__(self, passes: int, make: Callable[..., Callable[[], None] | str], *args: Any) -> None:
        self._passes = passes
        self._make = functools.partial(make, *args)
        self._step: Callable[[], None] | str | None = None

    def __call__(self) -> float | str:
        if self._step is None:
            self._step = self._make()
            if not isinstance(self._step, str):
                self._step()
        if isinstance(self._step, str):
            return self._step
        times = []
        for _ in range(self._passes):
            begin_s = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - begin_s)
        return min(times)


def _gradients(elements: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(elements, np.float32), dtype)


def _optax(elements: int, dtype: str, donate: bool) -> Callable[[], None]:
    """Params are float32, or (16-bit params) float32 masters beside params that are cast from them.

    With ``donate`` XLA updates all in place. Without, as a jitted ``tx.update`` is called when nothing is said, every
    pass has fresh memory for its results.
    """
    tx = optax.adamw(_LEARNING_RATE, weight_decay=_DECAY)
    grads = _gradients(elements, dtype)

    def step(grads_now: jax.Array, params: jax.Array | None, masters: jax.Array, state: Any) -> tuple[Any, Any, Any]:
        del params  # its memory is for the new ones
        updates, state = tx.update(grads_now.astype(jnp.float32), state, masters)
        masters = optax.apply_updates(masters, updates)
        return None if dtype == "float32" else masters.astype(dtype), masters, state

    jitted = jax.jit(step, donate_argnums=(1, 2, 3) if donate else (), keep_unused=True)
    masters = jnp.full(elements, 0.1, jnp.float32)
    held: list[Any] = [None if dtype == "float32" else masters.astype(dtype), masters, tx.init(masters)]

    def run() -> None:
        held[:] = jax.block_until_ready(jitted(grads, *held))

    return run


def _ours(elements: int, dtype: str, stack: contextlib.ExitStack) -> Callable[[], None]:
    """The whole step, apply included, with everything in memory."""
    store = stack.enter_context(jmo.Store())
    tx = jmo.adamw(_LEARNING_RATE, weight_decay=_DECAY, store=store)
    grads = _gradients(elements, dtype)

    def step(grads_now: jax.Array, params: jax.Array, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads_now, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(1, 2))
    params = jnp.full(elements, 0.1, dtype)
    held: list[Any] = [params, tx.init(params)]

    def run() -> None:
        held[:] = jax.block_until_ready(jitted(grads, *held))

    return run


def _torch(elements: int) -> Callable[[], None] | str:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    torch: Any = importlib.import_module("torch")
    param = torch.full((elements,), 0.1, requires_grad=True)
    param.grad = torch.randn(elements)
    optimizer = torch.optim.AdamW([param], lr=_LEARNING_RATE, weight_decay=_DECAY, fused=True)
    return lambda: _ignore(optimizer.step())


def _deepspeed(elements: int) -> Callable[[], None] | str:
    if importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    torch: Any = importlib.import_module("torch")
    try:
        adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        param = torch.full((elements,), 0.1, requires_grad=True)
        param.grad = torch.randn(elements)
        optimizer = adam([param], lr=_LEARNING_RATE, weight_decay=_DECAY)  # compiled at first use
    except Exception as error:  # whatever its build raises: it becomes the row's text
        return f"does not start: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:60]
    return lambda: _ignore(optimizer.step())


def _ignore(_: Any) -> None:
    return None
