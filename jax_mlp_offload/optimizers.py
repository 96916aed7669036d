"""Optimizers by their optax names. Each takes optax's parameters in optax's order, and the store.

All are factories that create nothing: ``optax.inject_hyperparams`` may run them as often as it likes.
"""

from __future__ import annotations

from typing import Any

import optax
from jax.sharding import Mesh

from jax_mlp_offload.accumulate import Steps, accumulated
from jax_mlp_offload.binding import Options
from jax_mlp_offload.rules import AdamRule, ScalarOrSchedule, SgdRule
from jax_mlp_offload.store import Store
from jax_mlp_offload.transform import offloaded

_COMMON = """
      store: where the state lives.
      mesh: the mesh that params are sharded over, where they are and it cannot be told from them.
      param_specs: a tree (or prefix) of PartitionSpec or NamedSharding of the params, likewise.
      skip_nonfinite: skip a step (params, moments and count unchanged) whose gradients are not all finite; it is
        counted in ``store.stats()`` and warned of. The check waits for all gradients, so updates no longer overlap with
        the backward pass.
      accumulate_steps: how many micro-gradients make an update: their running mean is kept beside the params, the k-th
        call updates, all others return zeros. None or 1: every call updates. A function of the updates made so far
        (i32 []) that returns an integer lets k vary. Numbers are those of :class:`optax.MultiSteps`: counts and
        schedules go by updates, and what stands in front in a chain sees micro-gradients. The k-th call waits for all
        gradients. With ``skip_nonfinite``, a mean that is not finite skips its update, and the accumulators start anew.
        ``optax.inject_hyperparams`` needs it in its ``static_args``, and goes on with its own schedules at every call.
      name: the optimizer's identity in the store; needed where two have the same rule and the same leaves.
      foreign_params: what to do where 16-bit params were replaced from outside between two updates: ``"watch"`` adopts
        them with a warning and refuses if it happens in two steps running (then a transform behind this one changes
        its updates), ``"adopt"`` always adopts, ``"error"`` always refuses.

    Returns:
      A GradientTransformation with state :class:`OffloadState`, inside an :class:`optax.MultiStepsState` where gradients
      are accumulated; :func:`read_state` gives optax's of both. For float32 params its updates are optax's. For
      bfloat16 and float16 params they are float32 and must reach ``apply_updates`` as they are.

    Raises:
      TypeError, ValueError: for arguments that make no sense, here or at ``init``; they name value and remedy.
"""


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    store: Store | None = None,
    nu_dtype: Any = None,
    accumulator_dtype: Any = None,
    mesh: Mesh | None = None,
    param_specs: Any = None,
    skip_nonfinite: bool = False,
    accumulate_steps: Steps = None,
    name: str | None = None,
    foreign_params: str = "watch",
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter 2019) with its state in ``store``: :func:`optax.adamw` on float32 masters.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added outside the root.
      eps_root: added inside the root.
      mu_dtype: storage of the first moment, float32 (None) or bfloat16.
      weight_decay: a number or a schedule.
      mask: which leaves decay: a tree of bools, a prefix of one, or a callable from the params.
      nesterov: whether to use Nesterov's momentum.
      nu_dtype: storage of the second moment, float32 (None) or bfloat16.
      accumulator_dtype: storage of the mean of micro-gradients, float32 (None) or bfloat16; it is worked out in float32.
    """
    options = Options.check(store, mesh, param_specs, skip_nonfinite, name, foreign_params)
    rule = AdamRule(learning_rate, b1, b2, eps, eps_root, mu_dtype, nu_dtype, weight_decay, mask, nesterov)
    return accumulated(offloaded(rule, options), accumulate_steps, accumulator_dtype)


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
    store: Store | None = None,
    nu_dtype: Any = None,
    accumulator_dtype: Any = None,
    mesh: Mesh | None = None,
    param_specs: Any = None,
    skip_nonfinite: bool = False,
    accumulate_steps: Steps = None,
    name: str | None = None,
    foreign_params: str = "watch",
) -> optax.GradientTransformationExtraArgs:
    """Adam (Kingma & Ba 2015) with its state in ``store``: :func:`optax.adam` on float32 masters.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added outside the root.
      eps_root: added inside the root.
      mu_dtype: storage of the first moment, float32 (None) or bfloat16.
      nesterov: whether to use Nesterov's momentum.
      nu_dtype: storage of the second moment, float32 (None) or bfloat16.
      accumulator_dtype: storage of the mean of micro-gradients, float32 (None) or bfloat16; it is worked out in float32.
    """
    options = Options.check(store, mesh, param_specs, skip_nonfinite, name, foreign_params)
    rule = AdamRule(learning_rate, b1, b2, eps, eps_root, mu_dtype, nu_dtype, None, None, nesterov)
    return accumulated(offloaded(rule, options), accumulate_steps, accumulator_dtype)


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Any = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
    *,
    store: Store | None = None,
    mesh: Mesh | None = None,
    param_specs: Any = None,
    skip_nonfinite: bool = False,
    accumulate_steps: Steps = None,
    name: str | None = None,
    foreign_params: str = "watch",
) -> optax.GradientTransformationExtraArgs:
    """SGD with its momentum in ``store``: :func:`optax.sgd` on float32 masters.

    Args:
      learning_rate: a number or a schedule.
      momentum: decay of the accumulated gradients; None: no momentum (float32 params then keep no state at all).
      nesterov: whether to use Nesterov's momentum (Sutskever et al. 2013).
      accumulator_dtype: storage of the momentum, and of the mean of micro-gradients where they are accumulated: float32
        (None) or bfloat16.
    """
    options = Options.check(store, mesh, param_specs, skip_nonfinite, name, foreign_params)
    rule = SgdRule(learning_rate, momentum, nesterov, accumulator_dtype)
    return accumulated(offloaded(rule, options), accumulate_steps, accumulator_dtype)


for _factory in (adamw, adam, sgd):
    _factory.__doc__ = (_factory.__doc__ or "").rstrip() + _COMMON
