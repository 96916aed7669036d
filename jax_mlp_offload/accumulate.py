"""Gradient accumulation: k micro-gradients make one update, with the numbers of ``optax.MultiSteps``.

1. Every call takes its gradient into the running mean ``acc + (grad - acc) / (n + 1)`` (Welford 1962), in float32.
2. The k-th call hands the mean to the optimizer, and the accumulators start anew.
3. Any other call returns updates of zero, and the optimizer's state as it was.

MultiSteps evaluates the optimizer at every call and selects afterwards. An offloaded update changes records in the store
and runs once from a state, so here it stands inside a ``lax.cond``. State and means are MultiSteps' own. Pure but for
the optimizer that it wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

Array = jax.Array
Steps = int | Callable[[Array], Any] | None
"""Micro-gradients to an update: a number, or a function of the updates made so far (i32 []). None: as 1."""


def accumulated(
    inner: optax.GradientTransformationExtraArgs, steps: Steps, dtype: Any
) -> optax.GradientTransformationExtraArgs:
    """``inner``, updated once in ``steps`` calls.

    Args:
      inner: an offloaded optimizer.
      steps: micro-gradients to an update.
      dtype: storage of the accumulators, float32 (None) or bfloat16.

    Returns:
      A transformation with state :class:`optax.MultiStepsState`; ``inner`` itself where every call updates.

    Raises:
      ValueError: for any other ``steps`` or ``dtype``.
    """
    schedule = _schedule(steps)
    stored = _stored_dtype(dtype)
    if schedule is None:
        return inner

    def init_fn(params: Any) -> optax.MultiStepsState:
        inner_state = inner.init(params)  # first, since it says what is wrong with the params
        return optax.MultiStepsState(
            mini_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=inner_state,
            acc_grads=optax.tree.zeros_like(params, dtype=stored),
        )

    def update_fn(
        updates: Any, state: optax.MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, optax.MultiStepsState]:
        def inner_update(grads: Any) -> Any:
            return inner.update(grads, state.inner_opt_state, params, **extra_args)

        placed = jax.tree.map(_placed, updates, state.acc_grads, is_leaf=lambda leaf: leaf is None)
        # checks the gradients before they are widened, and tells what the updates look like
        shapes, _ = jax.eval_shape(inner_update, placed)
        last = state.mini_step + 1 >= _steps_at(schedule, state.gradient_step)

        # the mean is worked out in each branch: in front of them it would be one more buffer as large as the params
        def update() -> tuple[Any, Any, Any]:
            grads = _mean(placed, state)
            return *inner_update(grads), optax.tree.zeros_like(grads, dtype=stored)

        def hold() -> tuple[Any, Any, Any]:
            acc_grads = optax.tree.cast(_mean(placed, state), stored)
            return optax.tree.zeros_like(shapes), state.inner_opt_state, acc_grads

        new_updates, inner_state, acc_grads = jax.lax.cond(last, update, hold)
        return new_updates, optax.MultiStepsState(
            mini_step=jnp.where(last, 0, state.mini_step + 1),
            gradient_step=jnp.where(last, optax.safe_increment(state.gradient_step), state.gradient_step),
            inner_opt_state=inner_state,
            acc_grads=acc_grads,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _placed(grad: Any, acc: Any) -> Any:
    """The gradient, on Explicit axes with its accumulator's type: both branches return that, and so does every call."""
    if grad is None or acc is None:
        return grad  # the optimizer says what is wrong with it
    sharding = jax.typeof(acc).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or jax.typeof(grad).sharding == sharding:
        return grad
    return jax.sharding.reshard(grad, sharding)


def _mean(grads: Any, state: optax.MultiStepsState) -> Any:
    """The float32 means of the gradients taken in so far and these."""

    def take_in(grad: Array, acc: Array) -> Array:
        # the divisor is converted leaf by leaf, as in MultiSteps: XLA decides by that whether to take its reciprocal
        count: Array = (state.mini_step + 1).astype(jnp.float32)
        acc = acc.astype(jnp.float32)
        return acc + (grad.astype(jnp.float32) - acc) / count

    return jax.tree.map(take_in, grads, state.acc_grads)


def _schedule(steps: Any) -> Callable[[Array], Any] | None:
    """``steps`` as a function of the updates made so far; None where every call updates."""
    if callable(steps):
        return steps  # type: ignore[no-any-return]
    if isinstance(steps, jax.Array):
        raise ValueError(
            f"accumulate_steps={steps!r} is an array, but has to be known when the optimizer is made; inside "
            "optax.inject_hyperparams pass static_args=('accumulate_steps',) to it"
        )
    whole = isinstance(steps, (int, np.integer)) and not isinstance(steps, bool)
    if steps is not None and not (whole and steps >= 1):
        raise ValueError(f"accumulate_steps={steps!r} must be an int of at least 1, or a function that returns such")
    return None if steps in (None, 1) else lambda _: steps


def _steps_at(schedule: Callable[[Array], Any], gradient_step: Array) -> Array:
    steps = jnp.asarray(schedule(gradient_step))
    if steps.shape or not jnp.issubdtype(steps.dtype, jnp.integer):
        raise ValueError(
            f"accumulate_steps={schedule!r} returned {steps.dtype}{list(steps.shape)}; it must return one integer"
        )
    return steps.astype(jnp.int32)


def _stored_dtype(dtype: Any) -> Any:
    stored = jnp.dtype(jnp.float32 if dtype is None else dtype)
    if stored not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"accumulator_dtype={stored.name!r} is not supported; use float32 or bfloat16")
    return stored
