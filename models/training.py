"""The train step of the pre-training program, the same for an offloaded and a plain optimizer.

Always true here: gradients are taken with respect to weights of `config.param_dtype` and have that dtype. What the
optimizer sees is decided by the dtype of the parameters in the state alone: bf16 parameters are the weights
themselves; float32 parameters under bf16 weights are masters, rounded for the forward pass, their gradients
widened for the update. Parameters, optimizer state, gradients, activations and batch lie on the mesh as the rules of
`models.sharding` say, and each process makes only the part of them that its own devices hold.

Threads: pure functions, safe from any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from models import transformer
from models.sharding import batch_sharding
from models.transformer import Config, Params

FINAL_LEARNING_RATE_SHARE = 0.1
WEIGHT_DECAY = 0.1
B1, B2, EPS = 0.9, 0.95, 1e-8


class TrainState(NamedTuple):
    """What one step hands to the next.

    Attributes:
      params: Weights, or their float32 masters.
      opt_state: The optimizer's state.
    """

    params: Params
    opt_state: Any


TrainStep: TypeAlias = Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]]


def schedule(learning_rate: float, warmup: int, steps: int) -> optax.Schedule:
    """Linear warm-up to `learning_rate` over `warmup` steps, then a cosine down to a tenth of it at `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=learning_rate / (warmup + 1),
        peak_value=learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=learning_rate * FINAL_LEARNING_RATE_SHARE,
    )


def decay_mask(params: Params) -> Params:
    """True for matrices, False for vectors: norms are not decayed."""
    mask: Params = jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    return mask


def adamw_arguments(learning_rate: optax.Schedule) -> dict[str, Any]:
    """Returns the keyword arguments that every AdamW of the program gets."""
    return {
        "learning_rate": learning_rate,
        "b1": B1,
        "b2": B2,
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
        "mask": decay_mask,
    }


def init_state(
    config: Config, tx: optax.GradientTransformation, mesh: Mesh, *, seed: int, state_dtype: DTypeLike
) -> TrainState:
    """Returns a fresh state, made where it stays: no device ever holds more than its shards.

    Args:
      config: The model; weights are drawn and rounded to its `param_dtype` whatever `state_dtype` says.
      tx: The optimizer.
      mesh: From `sharding.make_mesh`.
      seed: Of the weights.
      state_dtype: dtype of the parameters in the state, `config.param_dtype` or float32.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, tx, mesh, state_dtype=state_dtype))
    init = jax.jit(functools.partial(_fresh_state, config, tx, state_dtype), out_shardings=shardings)
    state: TrainState = init(jax.random.key(seed))
    return state


def abstract_state(
    config: Config, tx: optax.GradientTransformation, mesh: Mesh, *, state_dtype: DTypeLike
) -> TrainState:
    """Returns the state that `init_state` makes as `jax.ShapeDtypeStruct`s with shardings; allocates nothing."""
    shapes = jax.eval_shape(functools.partial(_fresh_state, config, tx, state_dtype), jax.random.key(0))
    shardings = _state_shardings(shapes, config, tx, mesh)
    abstract: TrainState = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    return abstract


def _fresh_state(
    config: Config, tx: optax.GradientTransformation, state_dtype: DTypeLike, key: jax.Array
) -> TrainState:
    weights = transformer.init_params(config, key)
    params: Params = jax.tree.map(lambda leaf: _widen(leaf, state_dtype), weights)
    return TrainState(params, tx.init(params))


def make_train_step(
    config: Config,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    state: TrainState,
    *,
    clip_norm: float | None = None,
) -> TrainStep:
    """Returns the jitted step; it donates its state.

    Args:
      config: The model.
      tx: The optimizer that made `state`.
      mesh: From `sharding.make_mesh`.
      state: A state as it will be passed, or its `abstract_state`, for its shardings only.
      clip_norm: Largest global gradient norm, or None. Clipping needs every gradient before the first
        update, so an offloaded optimizer can no longer overlap its updates with the backward pass.

    Returns:
      `step(state, tokens)` for tokens `[batch, seq + 1]` that gives the next state and the float32 loss
      before the update.
    """
    gradient_shardings = _param_shardings(config, mesh)

    def loss_fn(weights: Params, tokens: jax.Array) -> jax.Array:
        logits = transformer.apply(config, weights, tokens[:, :-1], mesh)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses)

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        weights = jax.tree.map(lambda leaf: _narrow(leaf, config.param_dtype), state.params)
        loss, grads = jax.value_and_grad(loss_fn)(weights, tokens)
        grads = jax.lax.with_sharding_constraint(grads, gradient_shardings)
        if clip_norm is not None:
            grads = _clip(grads, clip_norm)
        grads = jax.tree.map(lambda grad, leaf: _widen(grad, leaf.dtype), grads, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), loss

    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, replicated))


def place_batch(tokens: np.ndarray[Any, Any], mesh: Mesh) -> jax.Array:
    """Returns tokens `[batch, ...]` split over the mesh by rows.

    Args:
      tokens: The whole batch, the same in every process, which takes the rows of its own devices from it.
      mesh: From `sharding.make_mesh`.
    """
    return jax.make_array_from_callback(tokens.shape, batch_sharding(mesh), lambda index: tokens[index])


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays of a tree, each counted once however it is replicated."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _param_shardings(config: Config, mesh: Mesh) -> Params:
    specs = transformer.param_specs(config, mesh)
    shardings: Params = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return shardings


def _state_shardings(abstract: TrainState, config: Config, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shardings of a state of these shapes: what the optimizer keeps of each param lies as it does, the rest whole."""
    params = _param_shardings(config, mesh)
    opt_state: Any = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        abstract.opt_state,
        params,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )
    return TrainState(params, opt_state)


def _round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds the values of a float32 array to those of `dtype` and keeps it float32.

    XLA is allowed to drop a pair of casts float32 → bf16 → float32 (`xla_allow_excess_precision`), which would
    give the reference more precise weights and gradients than a run on bf16 weights has. On CPUs it was seen to
    keep them; this does not depend on it.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=int(info.nexp), mantissa_bits=int(info.nmant))


def _narrow(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Casts to the same or a narrower dtype, really rounding."""
    return x if x.dtype == dtype else _round_to(x, dtype).astype(dtype)


def _widen(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Casts to the same or a wider dtype, values as they were rounded before."""
    return x if x.dtype == dtype else _round_to(x.astype(dtype), x.dtype)


def _clip(grads: Params, max_norm: float) -> Params:
    """Scales gradients so that their global norm, taken in float32, is at most `max_norm`; dtypes stay."""
    wide = jax.tree.map(lambda grad: _widen(grad, jnp.float32), grads)
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(optax.global_norm(wide), jnp.finfo(jnp.float32).tiny))
    clipped: Params = jax.tree.map(lambda w, grad: _narrow(w * scale, grad.dtype), wide, grads)
    return clipped
