"""Update rules: what each keeps in a record, which hyperparameters its kernel reads, and how its state looks in optax.

The hyperparameters are computed in XLA with optax's own expressions and handed to the op as one float32 vector, so a
schedule or an injected value never recompiles and has the bits that optax would have used. The order of the vector is
that of ``ffi/core/update.h``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jax_mlp_offload import native
from jax_mlp_offload.plan import Layout

Array = jax.Array
ScalarOrSchedule = Any  # a float, an array, or a callable from the count (optax.ScalarOrSchedule)


class Rule(Protocol):
    """What the frame needs to know of an optimizer."""

    @property
    def kind(self) -> str:
        """The rule's name: part of an optimizer's identity."""

    @property
    def mask(self) -> Any:
        """Which leaves decay, as optax takes it."""

    @property
    def decays(self) -> bool:
        """Whether the rule has weight decay."""

    def layout(self, dtype: str) -> Layout:
        """The record of params of this dtype."""

    def spec(self, dtype: str) -> native.RuleSpec:
        """The native kernel for params of this dtype."""

    def needs_params(self, dtype: str, decays: bool) -> bool:
        """Whether the op has to see the params."""

    def hyper(self, count: Array, count_inc: Array) -> Array:
        """f32 vector of hyperparameters; ``count`` is that of the state, ``count_inc`` one more."""

    def stateless_update(self, grad: Array, hyper: Array) -> Array:
        """The float32 update of a leaf whose record would be empty, from its gradient and ``hyper``'s vector."""

    def reference(self) -> optax.GradientTransformation:
        """The same optimizer in optax: its state is what ``read_state`` returns."""

    def moments(self) -> dict[str, str]:
        """The fields of optax's state that records hold: field name -> section (``mu`` or ``nu``)."""


def _dtype_name(dtype: Any, what: str, default: str = "float32") -> str:
    if dtype is None:
        return default
    name: str = jnp.dtype(dtype).name
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"{what}={name!r} is not supported; use float32 or bfloat16")
    return name


def _master_bytes(dtype: str) -> int:
    """bf16: the 16 bits that the param lacks; f16: a whole float32 master."""
    return {"float32": 0, "bfloat16": 2, "float16": 4}[dtype]


def _at(value: ScalarOrSchedule, count: Array) -> Any:
    return value(count) if callable(value) else value


def _f32(value: Any) -> Array:
    return jnp.asarray(value).astype(jnp.float32)


def _as_multiplied(decay: Any, dtype: str) -> Array:
    """``decay`` with the precision in which JAX multiplies it with an array of ``dtype`` (a Python float takes it over)."""
    return _f32(decay * jnp.ones((), jnp.dtype(dtype)))


@jax.jit
def _bias_correction(decay: Any, count: Array) -> Array:
    # jitted apart, as in optax.tree.bias_correction: decay becomes a traced scalar there too
    return jnp.asarray(1 - decay**count)


@dataclasses.dataclass(frozen=True)
class AdamRule:
    """Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019), with Nesterov's momentum (Dozat 2016) on request."""

    learning_rate: ScalarOrSchedule
    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    mu_dtype: Any
    nu_dtype: Any
    weight_decay: ScalarOrSchedule | None  # None: adam
    mask: Any
    nesterov: bool
    kind: str = "adam"

    def __post_init__(self) -> None:
        _dtype_name(self.mu_dtype, "mu_dtype")
        _dtype_name(self.nu_dtype, "nu_dtype")

    @property
    def decays(self) -> bool:
        """Adamw does, adam does not."""
        return self.weight_decay is not None

    def layout(self, dtype: str) -> Layout:
        """[mu | nu | master]."""
        mu, nu = _dtype_name(self.mu_dtype, "mu_dtype"), _dtype_name(self.nu_dtype, "nu_dtype")
        return Layout(jnp.dtype(mu).itemsize, jnp.dtype(nu).itemsize, _master_bytes(dtype), dtype != "float32")

    def spec(self, dtype: str) -> native.RuleSpec:
        """The fused kernel's parameters."""
        mu, nu = _dtype_name(self.mu_dtype, "mu_dtype"), _dtype_name(self.nu_dtype, "nu_dtype")
        return native.RuleSpec("adam", mu, nu, True, self.nesterov, native.ADAM_HYPER_COUNT)

    def needs_params(self, dtype: str, decays: bool) -> bool:
        """16-bit params always; float32 ones for weight decay only."""
        return dtype != "float32" or decays

    def hyper(self, count: Array, count_inc: Array) -> Array:
        """See ``AdamHyper`` in ``ffi/core/update.h``."""
        mu, nu = _dtype_name(self.mu_dtype, "mu_dtype"), _dtype_name(self.nu_dtype, "nu_dtype")
        decay = 0.0 if self.weight_decay is None else _at(self.weight_decay, count)
        values = (
            -1 * _at(self.learning_rate, count),
            _as_multiplied(self.b1, mu),
            1 - self.b1,
            _as_multiplied(self.b2, nu),
            1 - self.b2,
            self.eps,
            self.eps_root,
            decay,
            _bias_correction(self.b1, count_inc),
            _bias_correction(self.b2, count_inc),
            _bias_correction(self.b1, optax.safe_increment(count_inc)),
            self.b1,
        )
        return jnp.stack([_f32(value) for value in values])

    def stateless_update(self, grad: Array, hyper: Array) -> Array:
        """Adam always has state."""
        raise AssertionError("Adam has no leaves without state")

    def reference(self) -> optax.GradientTransformation:
        """optax.adam or optax.adamw of the same parameters."""
        common = {"eps": self.eps, "eps_root": self.eps_root, "mu_dtype": self.mu_dtype, "nesterov": self.nesterov}
        if self.weight_decay is None:
            return optax.adam(self.learning_rate, self.b1, self.b2, **common)
        return optax.adamw(
            self.learning_rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=self.mask, **common
        )

    def moments(self) -> dict[str, str]:
        """ScaleByAdamState's."""
        return {"mu": "mu", "nu": "nu"}


@dataclasses.dataclass(frozen=True)
class SgdRule:
    """Stochastic gradient descent, with momentum and Nesterov's on request (Sutskever et al. 2013)."""

    learning_rate: ScalarOrSchedule
    momentum: Any
    nesterov: bool
    accumulator_dtype: Any
    mask: Any = None
    kind: str = "sgd"

    def __post_init__(self) -> None:
        _dtype_name(self.accumulator_dtype, "accumulator_dtype")

    @property
    def _mu(self) -> str:
        return _dtype_name(self.accumulator_dtype, "accumulator_dtype")

    @property
    def decays(self) -> bool:
        """Never."""
        return False

    def layout(self, dtype: str) -> Layout:
        """[momentum | master]."""
        mu_bytes = 0 if self.momentum is None else jnp.dtype(self._mu).itemsize
        return Layout(mu_bytes, 0, _master_bytes(dtype), dtype != "float32")

    def spec(self, dtype: str) -> native.RuleSpec:
        """The fused kernel's parameters."""
        has_mu = self.momentum is not None
        return native.RuleSpec("sgd", self._mu, "float32", has_mu, self.nesterov, native.SGD_HYPER_COUNT)

    def needs_params(self, dtype: str, decays: bool) -> bool:
        """16-bit params only."""
        return dtype != "float32"

    def hyper(self, count: Array, count_inc: Array) -> Array:
        """See ``SgdHyper`` in ``ffi/core/update.h``."""
        momentum = 0.0 if self.momentum is None else _as_multiplied(self.momentum, self._mu)
        return jnp.stack([_f32(-1 * _at(self.learning_rate, count)), _f32(momentum)])

    def stateless_update(self, grad: Array, hyper: Array) -> Array:
        """-learning_rate * gradient: float32 params without momentum need no record."""
        return hyper[0] * grad.astype(jnp.float32)

    def reference(self) -> optax.GradientTransformation:
        """optax.sgd of the same parameters."""
        return optax.sgd(self.learning_rate, self.momentum, self.nesterov, self.accumulator_dtype)

    def moments(self) -> dict[str, str]:
        """TraceState's."""
        return {} if self.momentum is None else {"trace": "mu"}


def decay_flags(mask: Any, params: Any) -> Any:
    """The tree of bools that tells which leaves decay, from optax's ``mask`` (a tree, a prefix of one, or a callable)."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    tree: Any = mask(params) if isinstance(mask, Callable) else mask  # type: ignore[arg-type]
    return jax.tree.map(lambda flag, part: jax.tree.map(lambda _: bool(flag), part), tree, params)
