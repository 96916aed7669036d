"""The frame of every offloaded optimizer: an optax transformation around a rule and a store.

1. ``init`` is pure and lazy: it checks the params, notes their shapes with the store, and returns count 0, ticket 0.
2. ``update`` finds (at trace time) the optimizer's binding in the store: plan, records, compiled op. Hyperparameters
   are computed in XLA; each bucket is one op; their tickets are joined.
3. float32 params get optax's update. 16-bit params get ``f32(new) - f32(old)``, 0 where they are equal: adding it to
   the old params gives the new ones, so what follows must leave it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_mlp_offload.binding import DTYPES, Binding, Options, bind, declare, flatten
from jax_mlp_offload.rules import Rule
from jax_mlp_offload.state import OffloadState

Array = jax.Array


def offloaded(rule: Rule, options: Options) -> optax.GradientTransformationExtraArgs:
    """The transformation for a rule."""

    def init_fn(params: Any) -> OffloadState:
        declare(rule, options, params)
        return OffloadState(count=jnp.zeros([], jnp.int32), ticket=jnp.zeros([1], jnp.uint32))

    def update_fn(updates: Any, state: OffloadState, params: Any = None, **extra_args: Any) -> tuple[Any, OffloadState]:
        del extra_args
        shaped = updates if params is None else params
        leaves, treedef = flatten(shaped)
        grads = treedef.flatten_up_to(updates)
        _check_gradients(grads, leaves)
        if not leaves:
            return updates, OffloadState(optax.safe_increment(state.count), state.ticket)
        binding = bind(rule, options, leaves, shaped, params is not None)
        # our own arithmetic mixes Python numbers, counts and float32 on purpose
        with jax.numpy_dtype_promotion("standard"):
            return _update(rule, options, binding, grads, state, [leaf for _, leaf in leaves])

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _update(
    rule: Rule, options: Options, binding: Binding, grads: list[Array], state: OffloadState, params: list[Array]
) -> tuple[Any, OffloadState]:
    count_inc = optax.safe_increment(state.count)
    hyper = rule.hyper(state.count, count_inc)
    finite = jnp.asarray(True)
    if options.skip_nonfinite:
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in grads]))
    ticket = state.ticket
    results: list[Array | None] = [None] * len(grads)
    if binding.plan.buckets:
        operand = jnp.append(hyper, 1.0 - finite.astype(jnp.float32))
        ticket, results = binding.run(state.ticket, operand, grads, params)
    outs = []
    for grad, param, result in zip(grads, params, results, strict=True):
        if result is None:
            update = rule.stateless_update(grad, hyper) if grad.size else grad.astype(jnp.float32)
            outs.append(jnp.where(finite, update, 0.0) if options.skip_nonfinite else update)
        elif result.dtype == jnp.float32:
            outs.append(result)
        else:
            new, old = result.astype(jnp.float32), param.astype(jnp.float32)
            outs.append(jnp.where(new == old, 0.0, new - old))
    count = jnp.where(finite, count_inc, state.count) if options.skip_nonfinite else count_inc
    return jax.tree.unflatten(binding.treedef, outs), OffloadState(count, ticket)


def _check_gradients(grads: Sequence[Any], leaves: Sequence[tuple[str, Any]]) -> None:
    for grad, (path, leaf) in zip(grads, leaves, strict=True):
        if not hasattr(grad, "shape") or not hasattr(grad, "dtype"):
            raise TypeError(
                f"the gradient of {path} is {grad!r}; give an array (zeros where there is none), or leave the param "
                "out with optax.masked or optax.partition"
            )
        if tuple(grad.shape) != tuple(leaf.shape):
            raise ValueError(f"the gradient of {path} has shape {grad.shape}, the param {leaf.shape}; they must agree")
        if jnp.dtype(grad.dtype).name not in DTYPES:
            raise ValueError(f"the gradient of {path} has dtype {grad.dtype}; use one of {', '.join(DTYPES)}")
