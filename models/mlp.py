"""A linen multi-layer perceptron with Flax's `TrainState`: the shortest training loop an optimizer can drop into.

Always true here: nothing knows which optimizer it trains with; `tx` is any optax transformation. The train step
donates its state, so the old one is dead after the call.

Threads: pure functions, safe from any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.typing import DTypeLike


class MLP(nn.Module):
    """Dense layers with GELU between them.

    Attributes:
      features: Widths of the layers, the last one being the output.
      param_dtype: dtype of every parameter.
      dtype: dtype of the arithmetic.
    """

    features: Sequence[int]
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, inputs]` to `[batch, features[-1]]`."""
        for index, width in enumerate(self.features):
            x = nn.Dense(width, param_dtype=self.param_dtype, dtype=self.dtype, name=f"dense_{index}")(x)
            if index + 1 < len(self.features):
                x = nn.gelu(x)
        return x


def create_state(
    tx: optax.GradientTransformation,
    *,
    inputs: int = 32,
    features: Sequence[int] = (256, 256, 1),
    param_dtype: DTypeLike = jnp.float32,
    seed: int = 0,
) -> TrainState:
    """Returns a fresh `TrainState` of an `MLP` that trains with `tx`."""
    model = MLP(tuple(features), param_dtype=param_dtype)
    variables = model.init(jax.random.key(seed), jnp.zeros((1, inputs), jnp.float32))
    state: TrainState = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)
    return state


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step on the mean squared error; donates `state`.

    Args:
      state: From `create_state` or the last step.
      x: `[batch, inputs]`.
      y: `[batch, features[-1]]`.

    Returns:
      The next state and the float32 loss before the update.
    """

    def loss_fn(params: Any) -> jax.Array:
        prediction = state.apply_fn({"params": params}, x)
        return jnp.mean(jnp.square(prediction.astype(jnp.float32) - y.astype(jnp.float32)))

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def synthetic_batch(step: int, *, batch: int = 64, inputs: int = 32, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns `x [batch, inputs]` and `y [batch, 1]` of a fixed smooth function, both float32."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    x = jax.random.normal(key, (batch, inputs), jnp.float32)
    return x, jnp.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]
