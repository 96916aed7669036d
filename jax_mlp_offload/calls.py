"""The FFI calls of one device's update: whole, or split in two where gradients and params are an accelerator's.

What always holds: every call has side effects, so XLA neither drops, merges nor moves it out of a loop; it orders them by
their operands only. So all pushes of a device come before its first pull, since each pull takes the maximum of all
tokens. A gradient's buffer belongs to the push from then on: it is the push's output, and the result is written there.
Where gradient and param differ in dtype the result has a buffer of its own, and the pull takes the gradient as well, so
that it stays until then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
TICKET = jax.ShapeDtypeStruct((1,), jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Operands:
    """One bucket's arrays on one device.

    Attributes:
      grads: by leaf of the bucket.
      params: likewise; empty where the op does not read them.
      dtype: of the params, and so of the results.
    """

    grads: list[Array]
    params: list[Array]
    dtype: np.dtype[Any]

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """What comes back."""
        return [jax.ShapeDtypeStruct(grad.shape, self.dtype) for grad in self.grads]

    @property
    def apart(self) -> list[int]:
        """Leaves whose results cannot take their gradients' place."""
        return [leaf for leaf, grad in enumerate(self.grads) if grad.dtype != self.dtype]


def run_whole(
    store: int, instance: int, ticket: Array, hyper: Array, buckets: Sequence[Operands]
) -> tuple[list[Array], list[list[Array]]]:
    """``jmo_update`` of each bucket; returns the tickets, and the results by bucket and leaf."""
    tickets, outs = [], []
    for index, bucket in enumerate(buckets):
        call = jax.ffi.ffi_call("jmo_update", [TICKET, *bucket.results], has_side_effect=True)
        new_ticket, *results = call(ticket, hyper, *bucket.grads, *bucket.params, **_attributes(store, instance, index))
        tickets.append(new_ticket)
        outs.append(results)
    return tickets, outs


def run_split(
    store: int, instance: int, ticket: Array, hyper: Array, buckets: Sequence[Operands]
) -> tuple[list[Array], list[list[Array]]]:
    """``jmo_push`` of every bucket, then ``jmo_pull`` of each; returns as ``run_whole`` does."""
    tokens, pushed = [], []
    for index, bucket in enumerate(buckets):
        aliased = [leaf for leaf in range(len(bucket.grads)) if leaf not in bucket.apart]
        call = jax.ffi.ffi_call(
            "jmo_push",
            [TICKET, *bucket.results],
            has_side_effect=True,
            input_output_aliases={2 + leaf: 1 + leaf for leaf in aliased},
        )
        token, *places = call(ticket, hyper, *bucket.grads, *bucket.params, **_attributes(store, instance, index))
        tokens.append(token)
        pushed.append(places)
    token = functools.reduce(jnp.maximum, tokens)
    tickets, outs = [], []
    for index, (bucket, places) in enumerate(zip(buckets, pushed, strict=True)):
        call = jax.ffi.ffi_call(
            "jmo_pull",
            [TICKET, *bucket.results],
            has_side_effect=True,
            input_output_aliases={1 + leaf: 1 + leaf for leaf in range(len(places))},
        )
        held = [bucket.grads[leaf] for leaf in bucket.apart]
        apart = np.array(bucket.apart, np.int64)
        new_ticket, *results = call(
            token, *places, *held, *bucket.params, apart=apart, **_attributes(store, instance, index)
        )
        tickets.append(new_ticket)
        outs.append(results)
    return tickets, outs


def _attributes(store: int, instance: int, bucket: int) -> dict[str, np.int64]:
    return {"store": np.int64(store), "instance": np.int64(instance), "bucket": np.int64(bucket)}
