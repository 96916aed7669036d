"""Meshes, and how the dimensions of the decoder's arrays lie on them: logical axes, and one table of rules.

Always true here: a model names what its dimensions are ("embed", "heads"), never where they lie; `RULES` alone says
over which mesh axes each is split. A rule's mesh axis that the mesh lacks, or whose size does not divide the
dimension, is left out, so every mesh of the axes in `AXES` fits every model.

Threads: pure functions, safe from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES: Mapping[str, str] = {
    "data": "each replica has all weights, the batch is split",
    "fsdp": "weights and batch are split",
    "tensor": "heads, hidden units and vocabulary are split",
}
"""Mesh axes and what they do, from the slowest network to the fastest: neighbouring devices share a `tensor` group."""

BATCH_AXES = ("data", "fsdp")

RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    ("batch", BATCH_AXES),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head_dim", None),
    ("hidden", "tensor"),
    ("vocab", "tensor"),
    ("norm", None),
)
"""Mesh axes of each logical axis, in the form of Flax's `logical_axis_rules`."""


def parse_mesh(text: str) -> dict[str, int]:
    """Reads `"data=2,fsdp=4"`; the result has the order of `AXES`, whatever that of the text.

    Raises:
      ValueError: It is no such list, or names an unknown axis, one twice, or a size below 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not size.lstrip("-").isdecimal():
            raise ValueError(f"mesh {text!r}: {part.strip()!r} is no axis=size; write it like data=2,fsdp=4")
        if axis not in AXES:
            raise ValueError(f"mesh {text!r}: there is no axis {axis!r}; choose from {', '.join(AXES)}")
        if axis in sizes:
            raise ValueError(f"mesh {text!r}: axis {axis!r} comes twice; give its size once")
        if int(size) < 1:
            raise ValueError(f"mesh {text!r}: {axis} {size} is not positive; leave an unused axis out")
        sizes[axis] = int(size)
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def format_mesh(sizes: Mapping[str, int]) -> str:
    """The text that `parse_mesh` reads."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def device_count(sizes: Mapping[str, int]) -> int:
    """Devices of a mesh of these sizes."""
    return math.prod(sizes.values())


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh with automatic axes of these sizes, over the first devices.

    Raises:
      ValueError: There are fewer devices, or more over several processes: each process has to take part.
    """
    needed = device_count(sizes)
    found = jax.devices()
    seen = f"--mesh {format_mesh(sizes)} takes {needed}; JAX sees {len(found)} device(s) of platform "
    seen += f"{found[0].platform!r}"
    if len(found) < needed:
        raise ValueError(seen)
    if jax.process_count() > 1 and len(found) != needed:
        raise ValueError(f"{seen} in {jax.process_count()} processes, and the mesh has to take all of them")
    automatic = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), automatic, devices=found[:needed])


def fit(spec: Sequence[str | tuple[str, ...] | None], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns what of a spec a mesh and a shape allow.

    Args:
      spec: Mesh axes of each dimension.
      shape: The array's sizes.
      mesh: Axes that it lacks are left out, and so are those that would not divide their dimension.
    """
    entries: list[str | tuple[str, ...] | None] = []
    for wanted, extent in zip(spec, shape, strict=True):
        kept: list[str] = []
        parts = 1
        for axis in (wanted,) if isinstance(wanted, str) else wanted or ():
            if axis in mesh.shape and extent % (parts * mesh.shape[axis]) == 0:
                kept.append(axis)
                parts *= mesh.shape[axis]
        entries.append(tuple(kept) if len(kept) > 1 else kept[0] if kept else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def constrain(x: jax.Array, mesh: Mesh | None, *names: str | None) -> jax.Array:
    """Lays an activation out by the rules.

    Args:
      x: The activation.
      mesh: None leaves it to the compiler.
      *names: The logical axis of each dimension; None for one that is not split.
    """
    if mesh is None:
        return x
    rules = dict(RULES)
    spec = fit([rules[name] if name else None for name in names], x.shape, mesh)
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return constrained


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where arrays `[batch, ...]` lie."""
    return NamedSharding(mesh, PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in mesh.shape) or None))


def batch_parts(sizes: Mapping[str, int]) -> int:
    """Into how many parts a batch is cut on a mesh of these sizes."""
    return math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
