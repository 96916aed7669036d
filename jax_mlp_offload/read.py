"""Reading an offloaded state back as ordinary arrays.

A leaf is put together from every device's records of it; what replicas share is gathered by XLA. Where a mesh spans
processes, that takes all of them. Thread contract: any thread of the user's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_mlp_offload import shardings
from jax_mlp_offload.binding import Binding, canonical_path, state_shapes
from jax_mlp_offload.errors import OffloadError
from jax_mlp_offload.filling import lacks_masters
from jax_mlp_offload.plan import BucketPlan
from jax_mlp_offload.registry import Registry, live_stores
from jax_mlp_offload.replicas import Part
from jax_mlp_offload.state import OffloadState
from jax_mlp_offload.types import POISON

_Records = dict[tuple[int, int], list[np.ndarray[Any, Any] | None]]


def read_state(state: Any) -> Any:
    """Returns the ordinary optax state of an offloaded one, moments and all, as arrays.

    Args:
      state: an optimizer state in which :class:`OffloadState` stands anywhere (inside ``chain``, ``partition``, ...).

    Returns:
      The same tree, each OffloadState replaced by what the optax optimizer of the same parameters holds on float32
      masters; moments are float32 (or ``mu_dtype``), sharded as their params. Where the mesh spans processes, all of
      them have to call this, as any computation on such arrays.

    Raises:
      ValueError: if no open store holds the state (it belongs to another process, or to an earlier step).
      OffloadError: if a record cannot be read, or the last update failed.
    """
    return _map(state, _read)


def read_masters(state: Any, params: Any) -> Any:
    """Returns float32 masters: 16-bit params put together with what the store holds of them.

    Args:
      state: an optimizer state in which :class:`OffloadState` stands anywhere, also several times.
      params: the params that belong to it.

    Returns:
      A tree like ``params``, float32. float32 params, and leaves that no offloaded optimizer holds, are as they are.
      Where the mesh spans processes, all of them have to call this.

    Raises:
      ValueError: if there is no OffloadState, no open store holds it, or ``params`` lacks a leaf of it.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    masters = {canonical_path(path): param for path, param in flat}
    states = [leaf for leaf in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(leaf)]
    if not states:
        raise ValueError("read_masters: there is no OffloadState in this state; give that of an offloaded optimizer")
    for found in states:
        if not masters or not ticket_of(found):
            continue  # no update yet: the masters are the params
        store, binding = find_optimizer(found)
        records = _records(found, store, binding)
        remainders = {} if records is None else _sections(binding, records, "master")
        for index, (leaf, shape) in enumerate(zip(binding.leaves, binding.shapes, strict=True)):
            param = masters.get(leaf.path)
            if param is None or (param.shape, param.dtype.name) != (shape, leaf.dtype):
                raise ValueError(
                    f"read_masters: the state is that of a param {leaf.path} of shape {shape} and dtype {leaf.dtype}, "
                    "which the given params lack; give the whole tree of params that the optimizer updates"
                )
            if index in remainders:
                masters[leaf.path] = _join(param, remainders[index])
    return jax.tree.unflatten(treedef, [jnp.asarray(master).astype(jnp.float32) for master in masters.values()])


def _is_state(x: Any) -> bool:
    return isinstance(x, OffloadState)


def _map(state: Any, function: Callable[[OffloadState], Any]) -> Any:
    return jax.tree.map(lambda x: function(x) if _is_state(x) else x, state, is_leaf=_is_state)


def find_optimizer(state: OffloadState) -> tuple[Registry, Binding]:
    """The store and optimizer that this state belongs to."""
    ticket = ticket_of(state)
    if ticket == POISON:
        raise OffloadError(
            "this state comes from an update that failed: its moments are lost. flush() of its store says why; go on with "
            "store.restore_snapshot, or restore params from a checkpoint and call init again"
        )
    candidates = [
        (store, binding) for store in live_stores() for binding in store.bindings() if isinstance(binding, Binding)
    ]
    if ticket:
        candidates = _holders(ticket, candidates)
    else:
        # updates without a ticket: an optimizer that keeps nothing in the store
        candidates = [(store, binding) for store, binding in candidates if not binding.plan.buckets]
        if candidates and all(_reference(b) == _reference(candidates[0][1]) for _, b in candidates):
            candidates = candidates[:1]  # no moments at all: one is as good as another
    if len(candidates) != 1:
        reason = (
            "several optimizers (or none) could be meant; give each a store of its own"
            if ticket == 0
            else f"no open store holds ticket {ticket}: it is of an earlier step, another process or a closed store; "
            "read the state that the last update returned, before its store is closed"
        )
        raise ValueError(f"the moments of this state cannot be told: {reason}")
    return candidates[0]


def _holders(ticket: int, candidates: list[tuple[Registry, Binding]]) -> list[tuple[Registry, Binding]]:
    """The optimizers whose last step returned this ticket."""
    holders, cause = [], None
    for store in {store for store, _ in candidates}:
        try:
            latest = store.engine.states.latest_tickets()
        except OffloadError as error:
            cause = error  # says why only if no other store holds the state
        else:
            holders += [pair for pair in candidates if pair[0] is store and latest.get(pair[1].number) == ticket]
    if cause is not None and not holders:
        raise cause
    return holders


def _reference(binding: Binding) -> Any:
    """The shapes of optax's state."""
    return state_shapes(binding.rule, binding.treedef, binding.shapes)


def initial_state() -> Any:
    """Shapes of the optax state before the first update, where it is the same for every optimizer there is.

    Raises:
      ValueError: if it is not.
    """
    declared = [found for store in live_stores() for found in store.declarations().values()]
    references = [found.initial() for found in declared if found.initial is not None]
    if not references or any(reference != references[0] for reference in references):
        raise ValueError(
            "the moments of this state cannot be told: no update has been made from it yet, and several optimizers "
            "(or none) could be meant; make one first"
        )
    return references[0]


def ticket_of(state: OffloadState) -> int:
    """A state's ticket, once the step that it comes from is done."""
    return int(np.asarray(state.ticket)[0])


def _records(state: OffloadState, store: Registry, binding: Binding) -> _Records | None:
    """The records of a state; None if nothing is stored, as before the first update and after a first one skipped."""
    ticket = ticket_of(state)
    error: OffloadError | None = None
    records: _Records = {}
    try:
        records = store.engine.states.read(binding.number, ticket) if ticket else {}
    except OffloadError as found:
        error = found
    if _fails_anywhere(binding, error is not None):
        raise error or OffloadError(
            f"optimizer {binding.name!r}: another process cannot read its records; its own message says why"
        )
    return records if any(record is not None for row in records.values() for record in row) else None


def _fails_anywhere(binding: Binding, here: bool) -> bool:
    """Whether a process fails: where several have a part in what is read, none may wait in a gather for one that does."""
    mesh = binding.layout.mesh
    if mesh is None or not binding.layout.spans:
        return here
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    flags = jax.make_array_from_callback((mesh.size,), everywhere, lambda _: np.full(1, here, np.uint32))
    return bool(jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(flags))


def _read(state: OffloadState) -> Any:
    if ticket_of(state) == 0 and int(state.count) == 0:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), initial_state())
    store, binding = find_optimizer(state)
    records = _records(state, store, binding)

    def moments(section: str) -> list[Any]:
        found = {} if records is None else _sections(binding, records, section)
        return [
            found[leaf] if leaf in found else _zeros(binding, leaf, binding.section_dtype(leaf, section))
            for leaf in range(len(binding.leaves))
        ]

    return optax_state(binding, state.count, moments)


def optax_state(binding: Binding, count: Any, moments: Callable[[str], list[Any]]) -> Any:
    """The state that optax has of the optimizer.

    Args:
      binding: the optimizer.
      count: updates so far.
      moments: what to put in the place of a section's (mu or nu) moments, one for each leaf.
    """
    reference = _reference(binding)
    values: dict[str, Any] = {"count": count}
    for field, section in binding.rule.moments().items():
        values[field] = jax.tree.unflatten(binding.treedef, moments(section))
    if not any(name == "count" for name in _fields(reference)):
        del values["count"]
    return optax.tree.set(reference, **values)


def _fields(state: Any) -> list[str]:
    names: list[str] = []
    for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]:
        names.extend(getattr(key, "name", "") for key in path)
    return names


def _sections(binding: Binding, records: _Records, section: str) -> dict[int, jax.Array]:
    """One section (mu, nu or master) of every leaf that has it, put together from the records of all devices."""
    found: dict[int, jax.Array] = {}
    for bucket, plan in enumerate(binding.plan.buckets):
        if not plan.has(section):
            continue
        rows = [records[bucket, device] for device in binding.layout.devices]
        if section == "master" and any(r is not None and lacks_masters(plan, r) for row in rows for r in row):
            continue
        begin = 0
        for index in plan.leaves:
            part = binding.parts[index]
            dtype, end = binding.section_dtype(part.leaves[0], section), begin + part.share
            shares = {
                device: _range(plan, records[bucket, device], begin, end, section, dtype)
                for device in binding.layout.devices
            }
            found.update(zip(part.leaves, _whole(binding, part, shares), strict=True))
            begin = end
    return found


def _range(
    plan: BucketPlan, records: list[np.ndarray[Any, Any] | None], begin: int, end: int, section: str, dtype: Any
) -> np.ndarray[Any, Any]:
    """Elements ``[begin, end)`` of a bucket's section on one device: their part of each record."""
    offset = plan.offset(section)
    element_bytes = np.dtype(dtype).itemsize
    found = []
    for (first, count), record in zip(plan.subgroups, records, strict=True):
        low, high = max(begin, first), min(end, first + count)
        if low >= high:
            continue
        if record is None:
            found.append(np.zeros(high - low, dtype))
        else:
            at = offset + (low - first) * element_bytes
            found.append(record[at : at + (high - low) * element_bytes].view(dtype))
    return np.concatenate(found)  # a copy, also of a single one: the records are not handed out


def _whole(binding: Binding, part: Part, shares: dict[int, np.ndarray[Any, Any]]) -> list[jax.Array]:
    """The leaves of a part as arrays, sharded as their params."""
    layout, shapes = binding.layout, [binding.shapes[leaf] for leaf in part.leaves]
    if not layout.specs:
        if len(layout.devices) > 1 or layout.spans:
            raise ValueError(
                f"optimizer {binding.name!r} was updated inside a shard_map without param_specs=, so it cannot be told how "
                "its shards make up whole leaves; pass mesh= and param_specs= to it"
            )
        return [jnp.asarray(shares[layout.devices[0]].reshape(shapes[0]))]
    assert layout.mesh is not None
    devices = {shardings.ordinal(device): device for device in layout.mesh.local_devices}
    specs = [layout.specs[leaf] for leaf in part.leaves]
    if not part.axes:
        sharding = NamedSharding(layout.mesh, specs[0])
        local = sharding.shard_shape(shapes[0])
        placed = [jax.device_put(share.reshape(local), devices[i]) for i, share in shares.items()]
        return [jax.make_array_from_single_device_arrays(shapes[0], sharding, placed)]
    everywhere = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
    placed = [jax.device_put(share, devices[i]) for i, share in shares.items()]
    flat = jax.make_array_from_single_device_arrays((layout.mesh.size * part.share,), everywhere, placed)
    numbered = dataclasses.replace(part, leaves=tuple(range(len(part.leaves))))
    joined: list[jax.Array] = _joiner(layout.mesh, numbered, tuple(shapes), tuple(specs))(flat)
    return joined


@functools.lru_cache(maxsize=256)
def _joiner(
    mesh: Mesh, part: Part, shapes: tuple[tuple[int, ...], ...], specs: tuple[PartitionSpec, ...]
) -> Callable[[jax.Array], list[jax.Array]]:
    """Gathers a part along its axes. Where the mesh spans processes, all of them have to call it."""
    local = [NamedSharding(mesh, spec).shard_shape(shape) for spec, shape in zip(specs, shapes, strict=True)]
    body = jax.shard_map(
        lambda share: part.join(share, local),
        mesh=mesh,
        in_specs=PartitionSpec(mesh.axis_names),
        out_specs=list(specs),
        check_vma=False,
    )
    return jax.jit(body)


def _zeros(binding: Binding, leaf: int, dtype: Any) -> jax.Array:
    """What a leaf without a record holds."""
    zeros = functools.partial(jnp.zeros, binding.shapes[leaf], dtype)
    if binding.layout.mesh is None or not binding.layout.specs:
        return zeros()
    placed: jax.Array = jax.jit(zeros, out_shardings=NamedSharding(binding.layout.mesh, binding.layout.specs[leaf]))()
    return placed


@jax.jit
def _join(param: jax.Array, section: jax.Array) -> jax.Array:
    """Masters from params and what the record adds to them (int16 remainders, or whole float32 masters)."""
    if section.dtype == jnp.float32:
        return section
    bits = jax.lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << 16
    whole = bits + section.astype(jnp.int32).astype(jnp.uint32)
    master = jax.lax.bitcast_convert_type(whole, jnp.float32)
    lost = jnp.isnan(master) & ~jnp.isnan(param)
    return jnp.where(lost, jax.lax.bitcast_convert_type(bits, jnp.float32), master)
