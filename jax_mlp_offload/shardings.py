"""How an optimizer learns over which devices its params lie, and in which shards.

Taken from the first of: ``param_specs=`` (PartitionSpecs with ``mesh=``, or NamedShardings), the types of the params
where the mesh has Explicit axes, and the concrete params that ``init`` saw. Otherwise params are taken to lie on one
device; a program on several is then refused when it is lowered. Nothing is ever gathered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Given = tuple[Mesh, tuple[PartitionSpec, ...]]
"""A mesh, and a spec for each leaf."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh (None: one device), each leaf's spec, and the ordinals of this process's devices."""

    mesh: Mesh | None
    specs: tuple[PartitionSpec, ...]
    devices: tuple[int, ...]
    wrap: bool  # whether the ops have to be put into a shard_map

    def shard_shape(self, leaf: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One device's shard of a leaf of global ``shape``."""
        if self.mesh is None or not self.wrap:
            return shape
        return tuple(NamedSharding(self.mesh, self.specs[leaf]).shard_shape(shape))


def specs_of_tree(param_specs: Any, params: Any, mesh: Mesh | None) -> Given:
    """Specs as the user gave them (a tree, or a prefix of one), a leaf each.

    Raises:
      ValueError: if the mesh is missing or the trees do not fit.
      TypeError: if an entry is neither PartitionSpec nor NamedSharding.
    """

    def is_spec(x: Any) -> bool:
        return isinstance(x, (PartitionSpec, NamedSharding))

    try:
        flat = jax.tree.leaves(
            jax.tree.map(lambda s, part: jax.tree.map(lambda _: _Box(s), part), param_specs, params, is_leaf=is_spec),
            is_leaf=lambda x: isinstance(x, _Box),
        )
    except ValueError as error:
        raise ValueError(f"param_specs does not fit the params' tree: {error}") from None
    specs = []
    for box in flat:
        spec = box.spec
        if isinstance(spec, NamedSharding):
            mesh = cast("Mesh", mesh or spec.mesh)
            spec = spec.spec
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"param_specs holds {spec!r}; give jax.sharding.PartitionSpec or NamedSharding")
        specs.append(spec)
    if mesh is None:
        raise ValueError("param_specs= holds PartitionSpecs, so the mesh has to be given too: pass mesh=")
    return mesh, tuple(specs)


def specs_of_leaves(leaves: Sequence[Any], mesh: Mesh | None = None) -> Given | None:
    """Specs that the leaves carry themselves: concrete arrays on a mesh, or types on Explicit axes; None if not."""
    shardings = [_sharding(leaf, mesh) for leaf in leaves]
    named = [s for s in shardings if isinstance(s, NamedSharding)]
    if not named or named[0].mesh.size == 1:
        return None
    specs = tuple(s.spec if isinstance(s, NamedSharding) else PartitionSpec() for s in shardings)
    return cast("Mesh", named[0].mesh), specs


def _sharding(leaf: Any, known: Mesh | None) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        sharding = jax.typeof(leaf).sharding
        mesh = sharding.mesh
        explicit = not mesh.empty and all(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types)
        if not explicit:
            return None
        return NamedSharding(known or _concrete(mesh), sharding.spec)
    return getattr(leaf, "sharding", None)


def _concrete(mesh: Any) -> Mesh:
    """The mesh of an Explicit type has no devices: it is taken to be over all of them, in their order."""
    if mesh.size != jax.device_count():
        raise ValueError(
            f"the params' types name a mesh of {mesh.size} devices, but there are {jax.device_count()}; pass mesh= to the "
            "optimizer, or call init with the sharded arrays"
        )
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


def resolve(
    mesh: Mesh | None,
    given: Given | None,
    leaves: Sequence[Any],
    paths: Sequence[str],
    device: int | None,
) -> Layout:
    """Puts together what is known.

    Args:
      mesh: the user's ``mesh=``.
      given: from ``specs_of_tree`` or ``specs_of_leaves``, or None.
      leaves: with their (global) shapes.
      paths: their names.
      device: ordinal of the device that single-device params lie on, if known.

    Raises:
      ValueError: if a mesh was given but no shardings, or a leaf does not divide.
    """
    manual = _manual_mesh_size()
    if manual:
        ordinals = _ordinals(mesh) if mesh is not None else tuple(d.id for d in jax.local_devices()[:manual])
        return Layout(mesh, (), ordinals, wrap=False)
    if given is None:
        if mesh is not None and mesh.size > 1:
            raise ValueError(
                f"mesh={mesh!r} was given, but not how the params are sharded over it; pass param_specs= (a tree of "
                "PartitionSpec, PartitionSpec() for what is replicated), or call init with sharded arrays"
            )
        return Layout(None, (), (_one_device(device),), wrap=False)
    mesh, specs = given
    if mesh.size == 1:
        return Layout(None, (), _ordinals(mesh), wrap=False)
    for leaf, path, spec in zip(leaves, paths, specs, strict=True):
        _check_divides(tuple(leaf.shape), path, spec, mesh)
    specs = tuple(_whole(spec, len(leaf.shape)) for leaf, spec in zip(leaves, specs, strict=True))
    return Layout(mesh, specs, _ordinals(mesh), wrap=True)


def _whole(spec: PartitionSpec, dimensions: int) -> PartitionSpec:
    """The spec with an entry for each dimension: P() and P(None) of one leaf are the same optimizer."""
    entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in spec]
    return PartitionSpec(*entries, *[None] * (dimensions - len(entries)))


def _check_divides(shape: tuple[int, ...], path: str, spec: PartitionSpec, mesh: Mesh) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"param_specs: {spec} has more entries than {path!r} of shape {shape} has dimensions")
    for size, axes in zip(shape, spec, strict=False):
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        missing = [name for name in names if name not in mesh.shape]
        if missing:
            raise ValueError(
                f"param_specs: {spec} of {path!r} names axis {missing[0]!r}; the mesh has {mesh.axis_names}"
            )
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            raise ValueError(
                f"param_specs: {path!r} of shape {shape} does not divide by {parts} along {names}; "
                "shard a dimension that does, or replicate the leaf with PartitionSpec()"
            )


def _manual_mesh_size() -> int:
    """Size of the mesh if the caller is inside a shard_map over all of its axes, else 0."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.axis_types:
        return 0
    kinds = set(mesh.axis_types)
    if jax.sharding.AxisType.Manual not in kinds:
        return 0
    if len(kinds) > 1:
        raise ValueError(
            "the optimizer is called inside a shard_map that leaves some mesh axes automatic; make all axes manual "
            "there, or call it outside"
        )
    return int(mesh.size)


def _ordinals(mesh: Mesh) -> tuple[int, ...]:
    here = jax.process_index()
    return tuple(d.id for d in mesh.devices.flat if d.process_index == here)


def _one_device(device: int | None) -> int:
    if device is not None:
        return device
    default = getattr(jax.config, "jax_default_device", None)
    chosen = default if isinstance(default, jax.Device) else jax.local_devices()[0]
    return int(chosen.id)


@dataclasses.dataclass(frozen=True)
class _Box:
    """Keeps a PartitionSpec from being taken for a tree."""

    spec: Any
