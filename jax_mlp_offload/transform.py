"""The frame of every offloaded optimizer: an optax transformation around a rule and a store.

1. ``init`` is pure and lazy: it checks the params, notes their shapes with the store, and returns count 0, ticket 0.
2. ``update`` finds (at trace time) the optimizer's binding in the store: plan, records, compiled op. Hyperparameters
   are computed in XLA; each bucket is one op; their tickets are joined.
3. float32 params get optax's update. 16-bit params get ``f32(new) - f32(old)``, 0 where they are equal: adding it to
   the old params gives the new ones, so what follows must leave it as it is.

An optimizer is known by its ``name``, else by its rule and the canonical paths of its leaves: factories create nothing,
since ``inject_hyperparams`` runs them many times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jax_mlp_offload import shardings
from jax_mlp_offload.instances import ForeignParams
from jax_mlp_offload.ops import Program
from jax_mlp_offload.plan import LeafSpec, Plan
from jax_mlp_offload.rules import Rule, decay_flags
from jax_mlp_offload.state import OffloadState
from jax_mlp_offload.store import Declared, Leaves, Store

Array = jax.Array
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Binding:
    """An optimizer as registered with a store."""

    key: Any
    name: str
    number: int
    rule: Rule
    plan: Plan
    layout: shardings.Layout
    shapes: tuple[tuple[int, ...], ...]  # global
    treedef: Any
    run: Callable[..., tuple[Array, list[Array | None]]]


@dataclasses.dataclass(frozen=True)
class Options:
    """What every factory takes beside its rule's own parameters."""

    store: Store
    mesh: Mesh | None
    param_specs: Any
    skip_nonfinite: bool
    name: str | None
    foreign_params: ForeignParams

    @classmethod
    def check(
        cls,
        store: Any,
        mesh: Mesh | None,
        param_specs: Any,
        skip_nonfinite: bool,
        name: str | None,
        foreign_params: str,
    ) -> Options:
        """Checks them.

        Raises:
          TypeError: if the store is none.
          ValueError: for an unknown ``foreign_params``, or an empty name.
        """
        if not isinstance(store, Store):
            raise TypeError(f"store={store!r}: pass store=jmo.Store(...), which owns the memory and tiers of the state")
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"name={name!r} must be a non-empty string")
        kinds = [kind.value for kind in ForeignParams]
        if foreign_params not in kinds:
            raise ValueError(f"foreign_params={foreign_params!r} is unknown; use one of {', '.join(kinds)}")
        return cls(store, mesh, param_specs, bool(skip_nonfinite), name, ForeignParams(foreign_params))


def offloaded(rule: Rule, options: Options) -> optax.GradientTransformationExtraArgs:
    """The transformation for a rule."""

    def init_fn(params: Any) -> OffloadState:
        leaves, treedef = _flatten(params)
        shapes = tuple(tuple(leaf.shape) for _, leaf in leaves if hasattr(leaf, "shape"))
        kept = _without_tracers(rule)
        initial = functools.partial(state_shapes, kept, treedef, shapes)
        declared = dataclasses.replace(_declare(leaves, options, params), initial=initial)
        options.store.declare(_key(rule, options, leaves), declared)
        return OffloadState(count=jnp.zeros([], jnp.int32), ticket=jnp.zeros([1], jnp.uint32))

    def update_fn(updates: Any, state: OffloadState, params: Any = None, **extra_args: Any) -> tuple[Any, OffloadState]:
        del extra_args
        shaped = updates if params is None else params
        leaves, treedef = _flatten(shaped)
        grads = treedef.flatten_up_to(updates)
        _check_gradients(grads, leaves)
        if not leaves:
            return updates, OffloadState(optax.safe_increment(state.count), state.ticket)
        binding = _bind(rule, options, leaves, treedef, shaped, params is not None)
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


# -- params


def _flatten(params: Any) -> tuple[list[tuple[str, Any]], Any]:
    """(canonical path, leaf) of each leaf, and the treedef."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    return [(canonical_path(path), leaf) for path, leaf in flat], treedef


def canonical_path(path: Sequence[Any]) -> str:
    """A path as text. nnx has ``.value`` at its end at init and not at update: it is left out."""
    keys = list(path)
    if keys and str(keys[-1]) in (".value", "['value']") and isinstance(keys[-1], jax.tree_util.GetAttrKey):
        keys.pop()
    return jax.tree_util.keystr(tuple(keys)) if keys else "params"


def _fingerprint(leaves: Sequence[tuple[str, Any]]) -> Leaves:
    return tuple((path, tuple(leaf.shape), jnp.dtype(leaf.dtype).name) for path, leaf in leaves)


def _key(rule: Rule, options: Options, leaves: Sequence[tuple[str, Any]]) -> Any:
    return options.name or (rule.kind, tuple(path for path, _ in leaves))


def _declare(leaves: Sequence[tuple[str, Any]], options: Options, params: Any) -> Declared:
    for path, leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(f"param {path} is {leaf!r}; give jax or numpy arrays")
        if jnp.dtype(leaf.dtype).name not in _DTYPES:
            raise ValueError(
                f"param {path} has dtype {leaf.dtype}, which cannot be offloaded; use {', '.join(_DTYPES)}, or leave "
                "it out with optax.masked or optax.partition"
            )
    arrays = [leaf for _, leaf in leaves]
    given = _given(options, params, arrays, options.mesh)
    concrete = [leaf for leaf in arrays if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    if given is not None or concrete:
        shardings.resolve(options.mesh, given, arrays, [path for path, _ in leaves], None)
    device = None
    if given is None and concrete and len(concrete[0].devices()) == 1:
        device = next(iter(concrete[0].devices())).id
    return Declared(_fingerprint(leaves), given, device)


def _given(options: Options, params: Any, leaves: Sequence[Any], mesh: Mesh | None) -> shardings.Given | None:
    """The params' shardings: as the user gave them, else as the leaves carry them; None if neither tells."""
    if options.param_specs is not None:
        return shardings.specs_of_tree(options.param_specs, params, options.mesh)
    return shardings.specs_of_leaves(leaves, mesh)


def _check_gradients(grads: Sequence[Any], leaves: Sequence[tuple[str, Any]]) -> None:
    for grad, (path, leaf) in zip(grads, leaves, strict=True):
        if not hasattr(grad, "shape") or not hasattr(grad, "dtype"):
            raise TypeError(
                f"the gradient of {path} is {grad!r}; give an array (zeros where there is none), or leave the param "
                "out with optax.masked or optax.partition"
            )
        if tuple(grad.shape) != tuple(leaf.shape):
            raise ValueError(f"the gradient of {path} has shape {grad.shape}, the param {leaf.shape}; they must agree")
        if jnp.dtype(grad.dtype).name not in _DTYPES:
            raise ValueError(f"the gradient of {path} has dtype {grad.dtype}; use one of {', '.join(_DTYPES)}")


# -- binding


def _bind(
    rule: Rule, options: Options, leaves: Sequence[tuple[str, Any]], treedef: Any, shaped: Any, have_params: bool
) -> Binding:
    key = _key(rule, options, leaves)
    declared = _declared(rule, options, leaves, key, have_params)
    paths = [path for path, _ in leaves]
    arrays = [leaf for _, leaf in leaves]
    seen = options.mesh or (declared.given[0] if declared.given else None)
    given = _given(options, shaped, arrays, seen) or declared.given
    layout = shardings.resolve(options.mesh, given, arrays, paths, declared.device)
    flags = jax.tree.leaves(decay_flags(rule.mask, shaped))
    decays = [bool(flag) and rule.decays for flag in flags]
    dtypes = [dtype for _, _, dtype in declared.leaves]
    if not have_params and any(map(rule.needs_params, dtypes, decays)):
        raise ValueError(
            "update needs the params: call tx.update(grads, state, params) (16-bit params and weight decay are worked "
            "out from them)"
        )
    described = (key, layout, tuple(decays), tuple(rule.spec(d) for d in sorted(set(dtypes))))
    binding: Binding = options.store.bind(
        described, lambda: _register(rule, options, key, declared, treedef, layout, decays)
    )
    return dataclasses.replace(binding, treedef=treedef)


def _declared(rule: Rule, options: Options, leaves: Sequence[tuple[str, Any]], key: Any, have_params: bool) -> Declared:
    fingerprint = _fingerprint(leaves)
    if have_params:
        return options.store.declared(key, fingerprint)
    # without params only the gradients' shapes are known; their dtypes may differ from the params'
    return options.store.declared_shapes(key, tuple((path, shape) for path, shape, _ in fingerprint))


def _register(
    rule: Rule,
    options: Options,
    key: Any,
    declared: Declared,
    treedef: Any,
    layout: shardings.Layout,
    decays: Sequence[bool],
) -> Binding:
    dtypes = sorted({dtype for _, _, dtype in declared.leaves})
    layouts = {dtype: rule.layout(dtype) for dtype in dtypes}
    any_decay = any(decays)
    reads = {dtype: rule.needs_params(dtype, any_decay) for dtype in dtypes}
    specs = []
    for index, ((path, shape, dtype), decay) in enumerate(zip(declared.leaves, decays, strict=True)):
        elements = int(np.prod(layout.shard_shape(index, shape), dtype=np.int64))
        # a leaf whose record would be empty is worked out in XLA and takes part in no bucket
        specs.append(LeafSpec(path, elements if layouts[dtype].element_bytes else 0, dtype, decay))
    engine = options.store.engine
    name = options.name or f"{rule.kind}:{declared.leaves[0][0]}" + (
        f"+{len(declared.leaves) - 1}" if len(declared.leaves) > 1 else ""
    )
    number, plan = engine.add_instance(
        name,
        specs,
        layouts,
        {dtype: rule.spec(dtype) for dtype in dtypes},
        reads,
        layout.devices,
        options.foreign_params,
    )
    bucket_reads = tuple(reads[plan.leaves[bucket.leaves[0]].dtype] for bucket in plan.buckets)
    program = Program(engine.number, number, plan, bucket_reads, layout.mesh if layout.wrap else None, layout.specs)
    shapes = tuple(shape for _, shape, _ in declared.leaves)
    return Binding(key, name, number, _without_tracers(rule), plan, layout, shapes, treedef, program.make())


def state_shapes(rule: Rule, treedef: Any, shapes: Sequence[tuple[int, ...]]) -> Any:
    """Shapes and dtypes of the state that optax has for float32 params of these (global) shapes."""
    shaped = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    return jax.eval_shape(rule.reference().init, shaped)


def _without_tracers(rule: Rule) -> Rule:
    """The rule to keep beyond this trace: which optimizer it is stays, values that live in the trace do not."""
    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}  # type: ignore[arg-type]
    traced = {name: 0.0 for name, value in fields.items() if isinstance(value, jax.core.Tracer)}
    return dataclasses.replace(rule, **traced) if traced else rule  # type: ignore[type-var]
