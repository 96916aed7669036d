"""How an optimizer learns over which devices its params lie, in which shards, and along which axes they have replicas.

Taken from the first of: ``param_specs=`` (PartitionSpecs with ``mesh=``, or NamedShardings), the types of the params
where the mesh has Explicit axes only, and the concrete params that ``init`` saw. Otherwise params are taken to lie on
one device; a program on several is then refused when it is lowered. Nothing that is sharded is ever gathered.

Inside the user's own ``shard_map`` leaves are shards along its manual axes already. ``param_specs=`` says which of them
hold replicas; without it every device is taken to have a shard of its own. Pure functions, safe from any thread.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax._src.mesh import get_concrete_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_NAMES_SHOWN = 8

Given = tuple[Mesh, tuple[PartitionSpec, ...]]
"""A mesh, and a spec for each leaf."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How leaves lie on devices.

    Attributes:
      mesh: None: one device, or inside a shard_map of which nothing is known.
      specs: by leaf, how it is sharded over the whole mesh, an entry for each dimension; empty: nothing is known, or
        there is no mesh.
      manual: axes that are manual already where the optimizer is called.
      devices: ordinals of this process's devices.
      spans: whether the mesh has devices of other processes.
      platform: JAX's name of what the devices are.
    """

    mesh: Mesh | None
    specs: tuple[PartitionSpec, ...]
    devices: tuple[int, ...]
    manual: tuple[str, ...] = ()
    spans: bool = False
    platform: str = "cpu"

    @property
    def wrapped(self) -> tuple[str, ...]:
        """Axes that a shard_map around the ops has to make manual."""
        if self.mesh is None or not self.specs:
            return ()
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.manual)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Devices along each axis."""
        return {} if self.mesh is None else dict(self.mesh.shape)

    def replicated(self, leaf: int) -> tuple[str, ...]:
        """Axes along which a leaf is replicated."""
        if self.mesh is None or not self.specs:
            return ()
        used = {axis for entry in self.specs[leaf] for axis in _axes(entry)}
        return tuple(axis for axis in self.mesh.axis_names if axis not in used)

    def spec(self, leaf: int) -> PartitionSpec:
        """A leaf's spec over the axes that are not manual yet."""
        return _without(self.specs[leaf], self.manual)

    def check_arrays(self, arrays: Sequence[Any], paths: Sequence[str]) -> None:
        """Whether concrete params lie as they are said to.

        Raises:
          ValueError: if one is sharded along an axis along which it is said to be replicated: each update would gather it.
        """
        if not self.wrapped or self.manual:
            return
        for leaf, (array, path) in enumerate(zip(arrays, paths, strict=True)):
            held = getattr(array, "sharding", None)
            if isinstance(array, jax.core.Tracer) or not isinstance(held, NamedSharding) or held.mesh != self.mesh:
                continue
            lost = {axis for entry in held.spec for axis in _axes(entry)}.intersection(self.replicated(leaf))
            if any(self.sizes[axis] > 1 for axis in lost):
                raise ValueError(
                    f"param {path} is sharded as {held.spec}, but param_specs= says {self.specs[leaf]}: every update would "
                    "gather it; pass the specs that the params have"
                )

    def shard_shape(self, leaf: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One device's shard of a leaf that has ``shape`` where the optimizer is called."""
        if not self.wrapped:
            return shape
        return tuple(
            size // math.prod(self.sizes[axis] for axis in _axes(entry))
            for size, entry in zip(shape, self.spec(leaf), strict=True)
        )

    def global_shape(self, leaf: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The whole leaf's shape, of one that has ``shape`` where the optimizer is called."""
        if not self.specs:
            return shape
        return tuple(
            size * math.prod(self.sizes[axis] for axis in _axes(entry) if axis in self.manual)
            for size, entry in zip(shape, self.specs[leaf], strict=True)
        )


def specs_of_tree(param_specs: Any, params: Any, mesh: Mesh | None) -> Given:
    """Specs as the user gave them (a tree, or a prefix of one), a leaf each.

    They are found by their paths: nnx wraps leaves at ``init`` and not at ``update``, boxes come and go, and masks take
    whole branches out. What is said of leaves that are not there is left alone.

    Raises:
      ValueError: if the mesh is missing, there are several, or nothing is said of a leaf.
      TypeError: if an entry is neither PartitionSpec nor NamedSharding.
    """
    flat = jax.tree_util.tree_flatten_with_path(param_specs, is_leaf=_is_spec)[0]
    given = {tuple(map(_raw, param_keys(path))): spec for path, spec in flat}
    for spec in given.values():
        if not _is_spec(spec):
            raise TypeError(f"param_specs holds {spec!r}; give jax.sharding.PartitionSpec or NamedSharding")
    specs = []
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        keys = tuple(map(_raw, param_keys(path)))
        spec = next((given[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in given), None)
        if spec is None:
            known = ", ".join(jax.tree_util.keystr(other) for other, _ in flat[:_NAMES_SHOWN])
            raise ValueError(
                f"param_specs does not fit the params' tree: it says nothing of {jax.tree_util.keystr(path)} "
                f"(PartitionSpec() for what is replicated), but of {known}"
            )
        if isinstance(spec, NamedSharding):
            named = _concrete(spec.mesh)
            if mesh is not None and not _same(named, mesh):
                raise ValueError(
                    f"param_specs holds a NamedSharding on {named!r}, but others (or mesh=) name {mesh!r}; all params "
                    "of an optimizer lie on one mesh"
                )
            mesh, spec = mesh or named, spec.spec
        specs.append(spec)
    if mesh is None:
        raise ValueError("param_specs= holds PartitionSpecs, so the mesh has to be given too: pass mesh=")
    return mesh, tuple(specs)


def _is_spec(x: Any) -> bool:
    return isinstance(x, (PartitionSpec, NamedSharding))


def param_keys(path: Sequence[Any]) -> tuple[Any, ...]:
    """A path without the box at its end: linen's boxes and nnx's variables have ``.value`` there, or not."""
    keys = tuple(path)
    boxed = keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value"
    return keys[:-1] if boxed else keys


def _raw(key: Any) -> Any:
    """A key whatever kind of node it is of: nnx's states and dicts of the same names are the same tree."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _same(one: Mesh, other: Mesh) -> bool:
    """Whether meshes have the same devices in the same places; how their axes are typed may differ."""
    return one.axis_names == other.axis_names and np.array_equal(one.device_ids, other.device_ids)


def check_mesh(mesh: Any, what: str) -> None:
    """Whether something is a mesh of devices.

    Raises:
      TypeError: if it is none.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"{what} is {mesh!r}; give a jax.sharding.Mesh, which has devices (in optax.inject_hyperparams, "
            "which takes a mesh for a schedule: static_args=('mesh',), or NamedShardings in param_specs= and no mesh=)"
        )


def specs_of_leaves(leaves: Sequence[Any], mesh: Mesh | None = None) -> Given | None:
    """Specs that the leaves carry themselves: concrete arrays on a mesh, or types on Explicit axes; None if not."""
    shardings = [_sharding(leaf, mesh) for leaf in leaves]
    named = [s for s in shardings if isinstance(s, NamedSharding)]
    if not named or named[0].mesh.size == 1:
        return None
    specs = tuple(s.spec if isinstance(s, NamedSharding) else PartitionSpec() for s in shardings)
    return cast("Mesh", named[0].mesh), specs


def _sharding(leaf: Any, known: Mesh | None) -> Any:
    traced = isinstance(leaf, jax.core.Tracer)
    sharding = jax.typeof(leaf).sharding if traced else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh):
        return sharding
    mesh = sharding.mesh
    if mesh.empty or (traced and any(kind != AxisType.Explicit for kind in mesh.axis_types)):
        return None  # along other axes the type of a value tells nothing
    same = known is not None and known.shape_tuple == mesh.shape_tuple
    return NamedSharding(known if known is not None and same else _concrete(mesh), sharding.spec)


def _concrete(mesh: Any) -> Mesh:
    """The mesh with its devices. One of types or shapes has none: it is the one that is set, else over all, in order."""
    if isinstance(mesh, Mesh):
        return mesh
    current = get_concrete_mesh()
    if current.shape_tuple == mesh.shape_tuple:
        return current
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
    device: jax.Device | None,
) -> Layout:
    """Puts together what is known.

    Args:
      mesh: the user's ``mesh=``.
      given: from ``specs_of_tree`` or ``specs_of_leaves``, or None.
      leaves: with their shapes.
      paths: their names.
      device: the one that single-device params lie on, if known.

    Raises:
      ValueError: if a mesh was given but no shardings, a spec does not fit its leaf or the mesh, or the mesh cannot be
        told inside a shard_map.
    """
    manual = _manual_axes()
    if given is None and manual:
        return _unknown_shards(mesh, manual, device)
    if given is None:
        if mesh is not None and mesh.size > 1:
            raise ValueError(
                f"mesh={mesh!r} was given, but not how the params are sharded over it; pass param_specs= (a tree of "
                "PartitionSpec, PartitionSpec() for what is replicated), or call init with sharded arrays"
            )
        return _on_one(device)
    if mesh is not None and not _same(mesh, given[0]):
        raise ValueError(f"mesh={mesh!r} was given, but the params lie on {given[0]!r}; pass the mesh that they lie on")
    mesh, specs = given
    if mesh.size == 1:
        return Layout(None, (), _ordinals(mesh), platform=_platform(mesh))
    _check_manual(mesh, manual)
    fitted = [
        _fit(tuple(leaf.shape), path, spec, mesh, manual) for leaf, path, spec in zip(leaves, paths, specs, strict=True)
    ]
    return Layout(mesh, tuple(fitted), _ordinals(mesh), manual, _spans(mesh), _platform(mesh))


def _unknown_shards(mesh: Mesh | None, manual: tuple[str, ...], device: jax.Device | None) -> Layout:
    """Inside a shard_map without ``param_specs``: each device has its own shard."""
    abstract = jax.sharding.get_abstract_mesh()
    if len(manual) < len(abstract.axis_names):
        raise ValueError(
            f"the optimizer is called inside a shard_map that is manual over {manual} and leaves other axes automatic; "
            "pass mesh= and param_specs= (over all axes of the mesh), or call it outside"
        )
    if mesh is None and abstract.size == 1:
        return _on_one(device, manual)
    if mesh is None:
        if abstract.size != jax.device_count():
            raise ValueError(
                f"the optimizer is called inside a shard_map over {abstract.size} of {jax.device_count()} devices; pass "
                "mesh= to it"
            )
        devices = jax.local_devices()
        spans = len(devices) < jax.device_count()
        return Layout(None, (), tuple(map(ordinal, devices)), manual, spans, platform_of(devices[0]))
    _check_manual(mesh, manual)
    return Layout(mesh, (), _ordinals(mesh), manual, _spans(mesh), _platform(mesh))


def _check_manual(mesh: Mesh, manual: tuple[str, ...]) -> None:
    here = dict(jax.sharding.get_abstract_mesh().shape)
    if manual and here != dict(mesh.shape):
        raise ValueError(
            f"mesh= has axes {dict(mesh.shape)}, but the optimizer is called inside a shard_map over {here}; pass the "
            "mesh of that shard_map"
        )


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    return PartitionSpec(*(_entry([axis for axis in _axes(entry) if axis not in axes]) for entry in spec))


def _entry(axes: Sequence[str]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def explicit_part(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """What of a spec a value's type may name: Explicit axes only."""
    others = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Explicit]
    return _without(spec, others)


def _fit(shape: tuple[int, ...], path: str, spec: PartitionSpec, mesh: Mesh, manual: Collection[str]) -> PartitionSpec:
    """The spec as the leaf can have it: a dimension that does not divide cannot be sharded in JAX, so it is whole.

    It has an entry for each dimension: P() and P(None) of one leaf are the same optimizer.
    """
    if len(spec) > len(shape):
        raise ValueError(f"param_specs: {spec} has more entries than {path!r} of shape {shape} has dimensions")
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ValueError(f"param_specs: {spec} of {path!r} leaves a dimension unconstrained; say how it is sharded")
    entries: list[Any] = []
    named = [name for entry in spec for name in _axes(entry)]
    if len(set(named)) < len(named):
        raise ValueError(f"param_specs: {spec} of {path!r} names an axis twice")
    for name in named:
        if name not in mesh.shape:
            raise ValueError(f"param_specs: {spec} of {path!r} names axis {name!r}; the mesh has {mesh.axis_names}")
    by_dimension = [*map(_axes, spec), *[()] * (len(shape) - len(spec))]
    for size, names in zip(shape, by_dimension, strict=True):
        done = [name for name in names if name in manual]  # cut first, whatever their place in the spec
        rest = [name for name in names if name not in manual]
        divides = size % math.prod(mesh.shape[name] for name in rest) == 0
        entries.append(_entry([*done, *rest] if divides else done))
    return PartitionSpec(*entries)


def _manual_axes() -> tuple[str, ...]:
    """Axes of the shard_map that the caller is inside of, if he is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.axis_types:
        return ()
    return tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual)


def _spans(mesh: Mesh) -> bool:
    return len({device.process_index for device in mesh.devices.flat}) > 1


def ordinal(device: jax.Device) -> int:
    """The number by which a handler knows a device of this process: on CPU XLA gives it the global one."""
    return int(device.id if device.platform == "cpu" else device.local_hardware_id)


def _ordinals(mesh: Mesh) -> tuple[int, ...]:
    here = jax.process_index()
    return tuple(ordinal(d) for d in mesh.devices.flat if d.process_index == here)


def platform_of(device: Any) -> str:
    """JAX's name of what a device is; it calls those of ROCm ``gpu``, too."""
    rocm = device.platform == "gpu" and "rocm" in device.client.platform_version.lower()
    return "rocm" if rocm else str(device.platform)


def _platform(mesh: Mesh) -> str:
    return platform_of(mesh.devices.flat[0])


def _on_one(device: jax.Device | None, manual: tuple[str, ...] = ()) -> Layout:
    """On this device; None: on JAX's default one."""
    if device is None:
        default = getattr(jax.config, "jax_default_device", None)  # a device, a platform's name, or None
        device = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    return Layout(None, (), (ordinal(device),), manual, platform=platform_of(device))
