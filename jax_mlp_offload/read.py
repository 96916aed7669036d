"""Reading an offloaded state back as ordinary arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import NamedSharding

from jax_mlp_offload.errors import OffloadError
from jax_mlp_offload.state import OffloadState
from jax_mlp_offload.store import Store, live_stores
from jax_mlp_offload.transform import Binding, canonical_path, state_shapes

_Records = dict[tuple[int, int], list[np.ndarray[Any, Any] | None]]


def read_state(state: Any) -> Any:
    """Returns the ordinary optax state of an offloaded one, moments and all, as arrays.

    Args:
      state: an optimizer state in which :class:`OffloadState` stands anywhere (inside ``chain``, ``partition``, ...).

    Returns:
      The same tree, each OffloadState replaced by what the optax optimizer of the same parameters holds on float32
      masters; moments are float32 (or ``mu_dtype``), sharded as their params.

    Raises:
      ValueError: if no open store holds the state (it belongs to another process, or to an earlier step).
      OffloadError: if a record cannot be read, or the last update failed.
    """
    return _map(state, _optax_state)


def read_masters(state: Any, params: Any) -> Any:
    """Returns float32 masters: 16-bit params put together with what the store holds of them.

    Args:
      state: an optimizer state in which :class:`OffloadState` stands anywhere, also several times.
      params: the params that belong to it.

    Returns:
      A tree like ``params``, float32. float32 params, and leaves that no offloaded optimizer holds, are as they are.

    Raises:
      ValueError: if there is no OffloadState, no open store holds it, or ``params`` lacks a leaf of it.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    masters = {canonical_path(path): param for path, param in flat}
    states = [leaf for leaf in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(leaf)]
    if not states:
        raise ValueError("read_masters: there is no OffloadState in this state; give that of an offloaded optimizer")
    for found in states:
        if not masters or not _ticket(found):
            continue  # no update yet: the masters are the params
        store, binding = _find(found)
        records = _records(found, store, binding)
        for index, (leaf, shape) in enumerate(zip(binding.plan.leaves, binding.shapes, strict=True)):
            param = masters.get(leaf.path)
            if param is None or (param.shape, param.dtype.name) != (shape, leaf.dtype):
                raise ValueError(
                    f"read_masters: the state is that of a param {leaf.path} of shape {shape} and dtype {leaf.dtype}, "
                    "which the given params lack; give the whole tree of params that the optimizer updates"
                )
            if param.dtype != jnp.float32 and param.size and records is not None:
                masters[leaf.path] = _join(param, _section(binding, records, index, "master"))
    return jax.tree.unflatten(treedef, [jnp.asarray(master).astype(jnp.float32) for master in masters.values()])


def _is_state(x: Any) -> bool:
    return isinstance(x, OffloadState)


def _map(state: Any, function: Callable[[OffloadState], Any]) -> Any:
    return jax.tree.map(lambda x: function(x) if _is_state(x) else x, state, is_leaf=_is_state)


def _find(state: OffloadState) -> tuple[Store, Binding]:
    """The store and optimizer that this state belongs to."""
    ticket = _ticket(state)
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


def _holders(ticket: int, candidates: list[tuple[Store, Binding]]) -> list[tuple[Store, Binding]]:
    """The optimizers whose last step returned this ticket."""
    holders, cause = [], None
    for store in {store for store, _ in candidates}:
        try:
            latest = store.engine.latest_tickets()
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


def _initial() -> Any:
    """The optax state before the first update, where it is the same for every optimizer that was initialised."""
    references = [d.initial() for store in live_stores() for d in store.declarations() if d.initial is not None]
    if not references or any(reference != references[0] for reference in references):
        raise ValueError(
            "the moments of this state cannot be told: no update has been made from it yet, and several optimizers "
            "(or none) could be meant; make one first"
        )
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), references[0])


def _ticket(state: OffloadState) -> int:
    return int(np.asarray(state.ticket)[0])


def _records(state: OffloadState, store: Store, binding: Binding) -> _Records | None:
    """The records of a state; None if nothing is stored, as before the first update and after a first one skipped."""
    ticket = _ticket(state)
    records = store.engine.read_records(binding.number, ticket) if ticket else {}
    return records if any(record is not None for row in records.values() for record in row) else None


def _optax_state(state: OffloadState) -> Any:
    if _ticket(state) == 0 and int(state.count) == 0:
        return _initial()
    store, binding = _find(state)
    records = _records(state, store, binding)
    reference = _reference(binding)
    values: dict[str, Any] = {"count": state.count}
    for field, section in binding.rule.moments().items():
        leaves = [_section(binding, records, index, section) for index in range(len(binding.shapes))]
        values[field] = jax.tree.unflatten(binding.treedef, leaves)
    if not any(name == "count" for name in _fields(reference)):
        del values["count"]
    return optax.tree.set(reference, **values)


def _fields(state: Any) -> list[str]:
    names: list[str] = []
    for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]:
        names.extend(getattr(key, "name", "") for key in path)
    return names


def _section(binding: Binding, records: _Records | None, leaf: int, section: str) -> jax.Array:
    """One section (mu, nu or master) of a leaf, put together from the records of all devices."""
    dtype = _section_dtype(binding, leaf, section)
    shape = binding.shapes[leaf]
    layout = binding.layout
    shard_shape = layout.shard_shape(leaf, shape)
    place = _place(binding, leaf)
    if place is None or records is None:
        return jnp.zeros(shape, dtype)
    shards = {device: _shard(binding, records, leaf, place, device, section, dtype) for device in layout.devices}
    if layout.mesh is None or not layout.wrap:
        return jnp.asarray(shards[layout.devices[0]].reshape(shape))
    sharding = NamedSharding(layout.mesh, layout.specs[leaf])
    by_id = {d.id: d for d in layout.mesh.devices.flat}
    arrays = [jax.device_put(shards[i].reshape(shard_shape), by_id[i]) for i in layout.devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _place(binding: Binding, leaf: int) -> tuple[int, int] | None:
    """The bucket that holds a leaf, and the leaf's first element in it; None for leaves without a record."""
    for index, bucket in enumerate(binding.plan.buckets):
        begin = 0
        for member in bucket.leaves:
            if member == leaf:
                return index, begin
            begin += binding.plan.leaves[member].elements
    return None


def _section_dtype(binding: Binding, leaf: int, section: str) -> Any:
    param = binding.plan.leaves[leaf].dtype
    if section == "master":
        return np.int16 if param == "bfloat16" else np.float32
    kernel = binding.rule.spec(param)
    name = kernel.mu_dtype if section == "mu" else kernel.nu_dtype
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.float32


def _shard(
    binding: Binding, records: _Records, leaf: int, place: tuple[int, int], device: int, section: str, dtype: Any
) -> np.ndarray[Any, Any]:
    """One device's shard of a leaf's section, flat: its part of each of the bucket's records."""
    bucket, begin = place
    end = begin + binding.plan.leaves[leaf].elements
    plan = binding.plan.buckets[bucket]
    offset = {"mu": plan.mu_offset, "nu": plan.nu_offset, "master": plan.master_offset}[section]
    element_bytes = np.dtype(dtype).itemsize
    parts = []
    for (first, count), record in zip(plan.subgroups, records[bucket, device], strict=True):
        low, high = max(begin, first), min(end, first + count)
        if low >= high:
            continue
        if record is None:
            parts.append(np.zeros(high - low, dtype))
        else:
            at = offset + (low - first) * element_bytes
            parts.append(record[at : at + (high - low) * element_bytes].view(dtype))
    return np.concatenate(parts)  # a copy, also of one part: the records are not handed out


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
