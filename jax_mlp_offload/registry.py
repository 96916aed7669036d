"""What a store knows of its optimizers: what ``init`` saw of each, how its state is divided, and what was made for it.

``Store`` is a registry that users make; the optimizers and whatever reads their state see no more of it than this.
Thread contract: any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_mlp_offload import errors
from jax_mlp_offload.engine import Engine
from jax_mlp_offload.shardings import Given

Leaves = tuple[tuple[str, tuple[int, ...], str], ...]
"""(path, shape, dtype) of each leaf."""

_live: weakref.WeakSet[Registry] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Declared:
    """What ``init`` saw of an optimizer's params."""

    leaves: Leaves
    given: Given | None = None  # their shardings, if they are known
    device: jax.Device | None = None  # the one that they lie on, if they are concrete and lie on one
    initial: Callable[[], Any] | None = dataclasses.field(default=None, compare=False)  # shapes of optax's state
    bind: Callable[[Sequence[Any]], Any] | None = dataclasses.field(default=None, compare=False)  # for these params
    order: int = dataclasses.field(default_factory=itertools.count().__next__, compare=False)  # among all calls of init


class Registry:
    """See the module's text.

    Args:
      engine: moves the records of its optimizers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._declared: dict[Any, Declared] = {}
        self._settled: dict[Any, Given] = {}  # by optimizer, how its state was divided at the first update
        self._bound: dict[Any, Any] = {}
        _live.add(self)

    @property
    def engine(self) -> Engine:
        """The machinery. Not part of the public interface."""
        self._check_open()
        return self._engine

    def declare(self, key: Any, declared: Declared) -> None:
        """Notes what ``init`` saw.

        Raises:
          ValueError: if another optimizer of this store has the same identity but other params.
        """
        self._check_open()
        with self._lock:
            known = self._declared.get(key)
            if known is not None and known.leaves != declared.leaves:
                raise ValueError(
                    f"two optimizers of one store have the same identity, {_difference(known, declared)}; "
                    "give each its own name=, or use another Store"
                )
            if known is None or declared.given is not None or declared.device is not None:
                self._declared[key] = declared
                if known is not None and declared.given != known.given:
                    self._settled.pop(key, None)
            else:
                self._declared[key] = dataclasses.replace(known, order=declared.order, bind=declared.bind)

    def known(self, key: Any) -> Declared | None:
        """What ``init`` saw of an optimizer, if it was called."""
        self._check_open()
        with self._lock:
            return self._declared.get(key)

    def settled(self, key: Any) -> Given | None:
        """How an optimizer's state is divided, if it was updated since ``init`` last saw shardings."""
        with self._lock:
            return self._settled.get(key)

    def settle(self, key: Any, given: Given) -> None:
        """Notes how an optimizer's state is divided."""
        with self._lock:
            self._settled[key] = given

    def declared(self, key: Any, leaves: Leaves) -> Declared:
        """What ``init`` saw of the optimizer whose update is traced.

        Raises:
          ValueError: if init saw another tree, or none.
        """
        self._check_open()
        with self._lock:
            known = self._declared.get(key)
            if known is None:
                raise ValueError(_unknown(leaves, list(self._declared.values())))
            if known.leaves != leaves:
                raise ValueError(
                    f"the params given to update are not those given to init: {_difference(known, leaves)}"
                )
            return known

    def declared_shapes(self, key: Any, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> Declared:
        """The same where update got no params, so that their dtypes are known from init only."""
        self._check_open()
        with self._lock:
            known = self._declared.get(key)
        leaves = tuple((path, shape, "float32") for path, shape in shapes)
        if known is None or tuple((path, shape) for path, shape, _ in known.leaves) != shapes:
            return self.declared(key, leaves)
        return known

    def bind(self, key: Any, make: Any) -> Any:
        """Returns what ``make()`` once made for this key."""
        with self._lock:
            self._check_open()
            if key not in self._bound:
                self._bound[key] = make()
            return self._bound[key]

    def declarations(self) -> dict[Any, Declared]:
        """What every ``init`` saw, by the optimizer's identity."""
        with self._lock:
            return dict(self._declared)

    def bindings(self) -> list[Any]:
        """Everything that was bound."""
        with self._lock:
            return list(self._bound.values())

    def _check_open(self) -> None:
        if self._engine.closed:
            raise errors.ClosedError(f"{self!r} was used after it had been closed, or in a fork; make a new Store")


def live_stores() -> list[Any]:
    """Stores that are open."""
    return [store for store in _live if not store._engine.closed]


def identity_of(key: Any) -> str:
    """An optimizer's identity in a store, as text: its name, else its rule and its leaves."""
    return key if isinstance(key, str) else f"{key[0]}: {', '.join(key[1])}"


def _difference(known: Declared, other: Declared | Leaves) -> str:
    theirs = other.leaves if isinstance(other, Declared) else other
    for a, b in zip(known.leaves, theirs, strict=False):
        if a != b:
            return f"{a[0]!r} of shape {a[1]} and dtype {a[2]} against {b[0]!r} of shape {b[1]} and dtype {b[2]}"
    return f"{len(known.leaves)} leaves against {len(theirs)}"


def _unknown(leaves: Leaves, known: list[Declared]) -> str:
    if not known:
        return "update was called, but init never was with this store; call init(params) first (also after a restore)"
    closest = max(known, key=lambda d: len(set(d.leaves) & set(leaves)))
    return (
        "the params given to update are not those given to init with this store: "
        f"{_difference(closest, leaves)}; call init(params) again after the tree has changed"
    )
