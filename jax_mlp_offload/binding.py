"""An optimizer as a store knows it: which one it is, how its leaves are divided, and its compiled op.

``declare`` notes at ``init`` what is known of the params; ``bind`` finds or makes, when an update is traced, the plan for
what is traced: the same optimizer on another mesh is another binding. An optimizer is known by its ``name``, else by its
rule and the canonical paths of its leaves: factories create nothing, since ``inject_hyperparams`` runs them many times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jax_mlp_offload import shardings
from jax_mlp_offload.division import Division, divide
from jax_mlp_offload.instances import ForeignParams
from jax_mlp_offload.ops import Program
from jax_mlp_offload.plan import LeafSpec, Plan
from jax_mlp_offload.registry import Declared, Leaves, Registry
from jax_mlp_offload.replicas import Part, make_parts
from jax_mlp_offload.rules import Rule, decay_flags

Array = jax.Array
DTYPES = ("float32", "bfloat16", "float16")
"""Of params and gradients."""


@dataclasses.dataclass(frozen=True)
class Binding:
    """An optimizer as registered with a store.

    Attributes:
      key: its identity in the store: its name, else its rule and the paths of its leaves.
      name: for messages.
      number: in the store.
      rule: without values of a trace.
      leaves: in tree order, one device's shards.
      shapes: of the whole leaves.
      layout: where they lie.
      parts: the operands, as the plan counts them.
      plan: one device's buckets and records.
      treedef: of the params.
      run: see :class:`Program`.
    """

    key: Any
    name: str
    number: int
    rule: Rule
    leaves: tuple[LeafSpec, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: shardings.Layout
    parts: tuple[Part, ...]
    plan: Plan
    treedef: Any
    run: Callable[..., tuple[Array, list[Array | None]]]

    def section_dtype(self, leaf: int, section: str) -> np.dtype[Any]:
        """What a leaf's records hold of a section (mu, nu or master)."""
        param = self.leaves[leaf].dtype
        if section == "master":
            return np.dtype(np.int16 if param == "bfloat16" else np.float32)
        kernel = self.rule.spec(param)
        name = kernel.mu_dtype if section == "mu" else kernel.nu_dtype
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else np.float32)

    def division(self) -> Division:
        """Which device of the job keeps what of each leaf.

        Raises:
          ValueError: if that cannot be told.
        """
        found = divide(self.layout, self.plan, self.parts, self.shapes, jax.process_index())
        if found is None:
            raise ValueError(
                f"optimizer {self.name!r} is used inside a shard_map without param_specs=, so it cannot be told how its "
                "shards make up whole leaves; pass mesh= and param_specs= to it"
            )
        return found

    def masters(self) -> list[int]:
        """Leaves of which records hold what the params lack of float32 masters."""
        return [
            leaf
            for bucket in self.plan.buckets
            if bucket.layout.master_bytes
            for part in bucket.leaves
            for leaf in self.parts[part].leaves
        ]


@dataclasses.dataclass(frozen=True)
class Options:
    """What every factory takes beside its rule's own parameters."""

    store: Registry
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
          TypeError: if the store or the mesh is none.
          ValueError: for an unknown ``foreign_params``, or an empty name.
        """
        if not isinstance(store, Registry):
            raise TypeError(f"store={store!r}: pass store=jmo.Store(...), which owns the memory and tiers of the state")
        if mesh is not None:
            shardings.check_mesh(mesh, "mesh=")
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"name={name!r} must be a non-empty string")
        kinds = [kind.value for kind in ForeignParams]
        if foreign_params not in kinds:
            raise ValueError(f"foreign_params={foreign_params!r} is unknown; use one of {', '.join(kinds)}")
        return cls(store, mesh, param_specs, bool(skip_nonfinite), name, ForeignParams(foreign_params))


# -- what init sees


def flatten(params: Any) -> tuple[list[tuple[str, Any]], Any]:
    """(canonical path, leaf) of each leaf, and the treedef."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    return [(canonical_path(path), leaf) for path, leaf in flat], treedef


def canonical_path(path: Sequence[Any]) -> str:
    """A path as text, as both ``init`` and ``update`` see it."""
    keys = shardings.param_keys(path)
    return jax.tree_util.keystr(keys) if keys else "params"


def _fingerprint(leaves: Sequence[tuple[str, Any]]) -> Leaves:
    return tuple((path, tuple(leaf.shape), jnp.dtype(leaf.dtype).name) for path, leaf in leaves)


def _key(rule: Rule, options: Options, leaves: Sequence[tuple[str, Any]]) -> Any:
    return options.name or (rule.kind, tuple(path for path, _ in leaves))


def declare(rule: Rule, options: Options, params: Any) -> None:
    """Notes with the store what ``init`` sees of the params.

    Raises:
      ValueError: for params that cannot be offloaded, specs that do not fit, or another optimizer of this identity.
      TypeError: for leaves that are no arrays.
    """
    leaves, treedef = flatten(params)
    if not leaves:
        return  # nothing is kept; tree_map_params asks so, with a stand-in for the params
    for path, leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(f"param {path} is {leaf!r}; give jax or numpy arrays")
        if jnp.dtype(leaf.dtype).name not in DTYPES:
            raise ValueError(
                f"param {path} has dtype {leaf.dtype}, which cannot be offloaded; use {', '.join(DTYPES)}, or leave "
                "it out with optax.masked or optax.partition"
            )
    arrays = [leaf for _, leaf in leaves]
    given = _given(options, params, arrays, options.mesh)
    concrete = [leaf for leaf in arrays if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    layout = None
    if given is not None or concrete:
        paths = [path for path, _ in leaves]
        layout = shardings.resolve(options.mesh, given, arrays, paths, None)
        layout.check_arrays(arrays, paths)
    device = None
    if given is None and concrete and len(concrete[0].devices()) == 1:
        device = next(iter(concrete[0].devices()))
    shapes = tuple(tuple(leaf.shape) for leaf in arrays)
    rule, fingerprint = _without_tracers(rule), _fingerprint(leaves)
    initial = functools.partial(state_shapes, rule, treedef, shapes, layout)
    bind_later = functools.partial(_bind_declared, rule, options, treedef, fingerprint)
    options.store.declare(_key(rule, options, leaves), Declared(fingerprint, given, device, initial, bind_later))


def _given(options: Options, params: Any, leaves: Sequence[Any], mesh: Mesh | None) -> shardings.Given | None:
    """The params' shardings: as the user gave them, else as the leaves carry them; None if neither tells."""
    if options.param_specs is not None:
        return shardings.specs_of_tree(options.param_specs, params, options.mesh)
    return shardings.specs_of_leaves(leaves, mesh)


def _bind_declared(rule: Rule, options: Options, treedef: Any, leaves: Leaves, placed: Sequence[Any]) -> Binding:
    """Binds an optimizer outside of an update, for params that lie as ``placed`` says (shardings, or None)."""
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
        for (_, shape, dtype), sharding in zip(leaves, placed, strict=True)
    ]
    paths = [path for path, _, _ in leaves]
    return bind(rule, options, list(zip(paths, arrays, strict=True)), jax.tree.unflatten(treedef, arrays), True)


# -- updates


def bind(rule: Rule, options: Options, leaves: Sequence[tuple[str, Any]], shaped: Any, have_params: bool) -> Binding:
    """The optimizer of the update that is traced.

    Args:
      rule: with the values of this trace.
      options: of the factory.
      leaves: (canonical path, leaf) of the params, or of the gradients where there are no params.
      shaped: the tree that they are of.
      have_params: whether they are params.

    Raises:
      ValueError: for params that ``init`` did not see, or that are needed and not there.
    """
    key = _key(rule, options, leaves)
    known = options.store.known(key)
    paths, arrays = [path for path, _ in leaves], [leaf for _, leaf in leaves]
    if known is None or [path for path, _, _ in known.leaves] != paths:
        known = options.store.declared(key, _fingerprint(leaves))  # says what is wrong
    settled = options.store.settled(key)
    seen = settled or known.given
    given = _given(options, shaped, arrays, options.mesh or (seen[0] if seen else None)) or known.given
    if settled and options.param_specs is None and (given is None or given[0] == settled[0]):
        given = settled  # params that were moved on their mesh: the state stays divided as it is
    layout = shardings.resolve(options.mesh, given, arrays, paths, known.device)
    whole = tuple(layout.global_shape(index, tuple(leaf.shape)) for index, leaf in enumerate(arrays))
    declared = _declared(options, key, known, leaves, whole, have_params)
    decays = [bool(flag) and rule.decays for flag in jax.tree.leaves(decay_flags(rule.mask, shaped))]
    dtypes = [dtype for _, _, dtype in declared.leaves]
    if not have_params and any(map(rule.needs_params, dtypes, decays)):
        raise ValueError(
            "update needs the params: call tx.update(grads, state, params) (16-bit params and weight decay are worked "
            "out from them)"
        )
    described = (key, layout, tuple(decays), tuple(rule.spec(d) for d in sorted(set(dtypes))))
    local = tuple((path, tuple(leaf.shape), dtype) for path, leaf, dtype in zip(paths, arrays, dtypes, strict=True))
    treedef = jax.tree.structure(shaped)
    if given is not None:
        options.store.settle(key, given)
    binding: Binding = options.store.bind(
        described, lambda: _register(key, rule, options, local, whole, treedef, layout, decays)
    )
    return dataclasses.replace(binding, treedef=treedef)


def _declared(
    options: Options,
    key: Any,
    known: Declared,
    leaves: Sequence[tuple[str, Any]],
    whole: Sequence[tuple[int, ...]],
    have_params: bool,
) -> Declared:
    """What init saw of these params: shards, as the update does, or (inside a shard_map) the whole leaves."""
    fingerprint = _fingerprint(leaves)
    if [shape for _, shape, _ in known.leaves] == list(whole):
        fingerprint = tuple((path, shape, dtype) for (path, _, dtype), shape in zip(fingerprint, whole, strict=True))
    if have_params:
        return options.store.declared(key, fingerprint)
    # without params only the gradients' shapes are known; their dtypes may differ from the params'
    return options.store.declared_shapes(key, tuple((path, shape) for path, shape, _ in fingerprint))


def _register(
    key: Any,
    rule: Rule,
    options: Options,
    leaves: Leaves,
    whole: tuple[tuple[int, ...], ...],
    treedef: Any,
    layout: shardings.Layout,
    decays: Sequence[bool],
) -> Binding:
    dtypes = sorted({dtype for _, _, dtype in leaves})
    layouts = {dtype: rule.layout(dtype) for dtype in dtypes}
    any_decay = any(decays)
    reads = {dtype: rule.needs_params(dtype, any_decay) for dtype in dtypes}
    specs = []
    for index, ((path, shape, dtype), decay) in enumerate(zip(leaves, decays, strict=True)):
        elements = int(np.prod(layout.shard_shape(index, shape), dtype=np.int64))
        # a leaf whose record would be empty is worked out in XLA and takes part in no bucket
        specs.append(LeafSpec(path, elements if layouts[dtype].element_bytes else 0, dtype, decay))
    parts = make_parts(specs, [layout.replicated(index) for index in range(len(specs))], layout.sizes)
    more = f"+{len(leaves) - 1}" if len(leaves) > 1 else ""
    name = options.name or f"{rule.kind}:{leaves[0][0]}{more}"
    engine = options.store.engine
    split = engine.serve(layout.platform)
    number, plan = engine.add_instance(
        name,
        [spec for _, spec in parts],
        layouts,
        {dtype: rule.spec(dtype) for dtype in dtypes},
        reads,
        layout.devices,
        options.foreign_params,
        layout.spans,
    )
    bucket_reads = tuple(reads[plan.leaves[bucket.leaves[0]].dtype] for bucket in plan.buckets)
    operands = tuple(part for part, _ in parts)
    program = Program(engine.number, number, plan, operands, bucket_reads, layout, split)
    return Binding(
        key, name, number, _without_tracers(rule), tuple(specs), whole, layout, operands, plan, treedef, program.make()
    )


def state_shapes(
    rule: Rule, treedef: Any, shapes: Sequence[tuple[int, ...]], layout: shardings.Layout | None = None
) -> Any:
    """Shapes and dtypes of the state that optax has for float32 params of these (global) shapes, laid out so."""
    shaped = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    reference = rule.reference()
    state = jax.eval_shape(reference.init, shaped)
    if layout is None or layout.mesh is None or not layout.specs or layout.manual:
        return state
    placed = jax.tree.unflatten(treedef, [NamedSharding(layout.mesh, spec) for spec in layout.specs])

    def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return optax.tree.map_params(reference, place, state, placed)


def _without_tracers(rule: Rule) -> Rule:
    """The rule to keep beyond this trace: which optimizer it is stays, values that live in the trace do not."""
    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}  # type: ignore[arg-type]
    traced = {name: 0.0 for name, value in fields.items() if isinstance(value, jax.core.Tracer)}
    return dataclasses.replace(rule, **traced) if traced else rule  # type: ignore[type-var]
