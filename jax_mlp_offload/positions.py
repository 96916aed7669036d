"""Offloaded states in a tree: where they stand, and putting something else in their place.

A state is an :class:`OffloadState`, or what ``flax.nnx.state`` makes of one: a mapping of ``count`` and ``ticket``. Its two
leaves may be wrapped (nnx variables); what takes their place is then wrapped likewise. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mlp_offload.registry import Leaves
from jax_mlp_offload.shardings import param_keys
from jax_mlp_offload.state import OffloadState

Keys = tuple[str, ...]
"""A path as Orbax names it."""


@dataclasses.dataclass(frozen=True)
class Position:
    """An offloaded state in a tree.

    Attributes:
      keys: the path to it.
      node: what stands there.
      state: its leaves, unwrapped.
    """

    keys: Keys
    node: Any
    state: OffloadState

    @property
    def named(self) -> bool:
        """Whether the node has its own type, so that optax's types may stand in its place."""
        return isinstance(self.node, OffloadState)

    def wrap(self, leaf: Any) -> Any:
        """A leaf as the node's own are wrapped."""
        return jax.tree.unflatten(jax.tree.structure(_children(self.node)[0]), [leaf])

    def with_leaves(self, count: Any, ticket: Any) -> Any:
        """A node like this one with other leaves."""
        if self.named:
            return OffloadState(self.wrap(count), self.wrap(ticket))
        return type(self.node)({"count": self.wrap(count), "ticket": self.wrap(ticket)})


def keys_of(path: Sequence[Any]) -> Keys:
    """A path of jax.tree_util as Orbax names it."""
    return tuple(str(_name(key)) for key in path)


def _name(key: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    raise TypeError(f"{key!r} is no key of a tree")


def unboxed(keys: Keys) -> Keys:
    """Keys without the ``value`` that nnx's variables have at their end."""
    return keys[:-1] if keys and keys[-1] == "value" else keys


def find(tree: Any) -> list[Position]:
    """All offloaded states of a tree, in its order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_node)
    found = []
    for path, node in flat:
        if _is_node(node):
            count, ticket = (jax.tree.leaves(child)[0] for child in _children(node))
            found.append(Position(keys_of(path), node, OffloadState(count, ticket)))
    return found


def replace(tree: Any, replacement: Callable[[int], Any]) -> Any:
    """The tree with ``replacement(i)`` in the place of its i-th offloaded state."""
    numbers = iter(range(len(find(tree))))
    return jax.tree.map(lambda node: replacement(next(numbers)) if _is_node(node) else node, tree, is_leaf=_is_node)


def put(tree: Any, states: Sequence[Any], others: Sequence[Any]) -> Any:
    """A tree like this one with other states and other leaves, each in the tree's order."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=_is_node)
    state, other = iter(states), iter(others)
    return jax.tree.unflatten(treedef, [next(state) if _is_node(node) else next(other) for node in nodes])


def nested(tree: Any) -> Any:
    """A tree as dicts alone, by raw keys and without empty nodes: as ``flax.nnx.state`` shows one."""
    result: dict[Any, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        *parents, last = [_name(key) for key in path]
        at = result
        for key in parents:
            at = at.setdefault(key, {})
        at[last] = leaf
    return result


def _children(node: Any) -> tuple[Any, Any]:
    return (node.count, node.ticket) if isinstance(node, OffloadState) else (node["count"], node["ticket"])


def _is_node(node: Any) -> bool:
    if isinstance(node, OffloadState):
        return True
    if not isinstance(node, Mapping) or set(node) != {"count", "ticket"}:
        return False
    leaves = jax.tree.leaves(node["ticket"])
    return len(leaves) == 1 and getattr(leaves[0], "shape", None) == (1,) and leaves[0].dtype == jnp.uint32


def shardings_of_params(leaves: Leaves, tree: Any, positions: Sequence[Position]) -> list[Any]:
    """How the tree's params lie that an optimizer updates: a sharding for each of its leaves, or None.

    They are found by their paths: below some prefix the tree has all leaves of the optimizer, of their shapes.
    """
    inside = [position.keys for position in positions]
    by_prefix: dict[str, Mapping[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = keys_of(path)
        if not any(keys[: len(prefix)] == prefix for prefix in inside):
            for cut in range(len(path) + 1):
                by_prefix.setdefault(jax.tree_util.keystr(path[:cut]), {})[_text(path[cut:])] = leaf  # type: ignore[index]
    wanted = {path: shape for path, shape, _ in leaves}
    for below in by_prefix.values():
        if all(path in below and np.shape(below[path]) == shape for path, shape in wanted.items()):
            return [getattr(below[path], "sharding", None) for path in wanted]
    return [None] * len(wanted)


def _text(path: Sequence[Any]) -> str:
    keys = param_keys(path)
    return jax.tree_util.keystr(keys) if keys else "params"


def small_array(value: np.ndarray[Any, Any], sharding: jax.sharding.Sharding | None) -> jax.Array:
    """A count or a ticket on devices, the same in every process; None: on whichever JAX takes."""
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
