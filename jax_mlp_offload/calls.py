"""The FFI calls of one device's update: whole, or split in two where gradients and params are an accelerator's.

What always holds: every call has side effects, so XLA neither drops, merges nor repeats it; it orders them by their
operands only. So all pushes of an optimizer on a device come before its first pull, since each pull takes the maximum of
all tokens. A gradient's buffer belongs to the push from then on: it is the push's output, and the result is written there.
Where gradient and param differ in dtype the result has a buffer of its own, and the gradient lies *apart*.

What is read between push and pull has to stay where it is. XLA may work out any other value again for its second use, and
give the first one's memory away; so the pull gets what came back from the push: gradients that lie apart, and params that
were *cut* here. Whole params are inputs of the program, or carried by its loop, and stay.
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
      cut: leaves whose params were worked out in this program.
    """

    grads: list[Array]
    params: list[Array]
    dtype: np.dtype[Any]
    cut: list[int]

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
        token, *back = _push(bucket, ticket, hyper, _attributes(store, instance, index))
        tokens.append(token)
        pushed.append(back)
    token = functools.reduce(jnp.maximum, tokens)
    tickets, outs = [], []
    for index, (bucket, back) in enumerate(zip(buckets, pushed, strict=True)):
        new_ticket, *results = _pull(bucket, token, back, _attributes(store, instance, index))
        tickets.append(new_ticket)
        outs.append(results)
    return tickets, outs


def _push(bucket: Operands, ticket: Array, hyper: Array, attributes: dict[str, np.int64]) -> list[Array]:
    """Token, results' places, gradients that lie apart, params that were cut."""
    leaves, apart = len(bucket.grads), bucket.apart
    kept = [bucket.grads[leaf] for leaf in apart] + [bucket.params[leaf] for leaf in bucket.cut]
    aliases = {2 + leaf: 1 + leaf for leaf in range(leaves) if leaf not in apart}
    aliases |= {2 + leaf: 1 + leaves + place for place, leaf in enumerate(apart)}
    aliases |= {2 + leaves + leaf: 1 + leaves + len(apart) + place for place, leaf in enumerate(bucket.cut)}
    call = jax.ffi.ffi_call(
        "jmo_push",
        [TICKET, *bucket.results, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept)],
        has_side_effect=True,
        input_output_aliases=aliases,
    )
    result = call(
        ticket, hyper, *bucket.grads, *bucket.params, apart=_indices(apart), kept=_indices(bucket.cut), **attributes
    )
    return list(result)


def _pull(bucket: Operands, token: Array, back: list[Array], attributes: dict[str, np.int64]) -> list[Array]:
    """Ticket and results, from what the push gave back."""
    leaves, apart = len(bucket.grads), bucket.apart
    places, held, kept = back[:leaves], back[leaves : leaves + len(apart)], back[leaves + len(apart) :]
    params = list(bucket.params)
    for leaf, param in zip(bucket.cut, kept, strict=True):
        params[leaf] = param
    call = jax.ffi.ffi_call(
        "jmo_pull",
        [TICKET, *bucket.results],
        has_side_effect=True,
        input_output_aliases={1 + leaf: 1 + leaf for leaf in range(leaves)},
    )
    result = call(token, *places, *held, *params, apart=_indices(apart), **attributes)
    return list(result)


def _indices(leaves: list[int]) -> np.ndarray[Any, Any]:
    return np.array(leaves, np.int64)


def _attributes(store: int, instance: int, bucket: int) -> dict[str, np.int64]:
    return {"store": np.int64(store), "instance": np.int64(instance), "bucket": np.int64(bucket)}
