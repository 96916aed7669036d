"""Whether the same numbers come out in every form of a program: conditionals, loops, command buffers, donation, meshes.

Gradients are given, where nothing else is said, so that bits depend on the update alone: sums of a backward pass may come in
another order in another program. Digests are of masters and moments. Thread contract: the main thread.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mlp_offload as jmo
from benchmarks import workload
from benchmarks.gpu import schedule, timeline
from benchmarks.gpu.settings import NotMeasured, Settings
from benchmarks.gpu.systems import LEARNING_RATE, PLAIN, WEIGHT_DECAY, System, opened
from benchmarks.workload import Params, Workload

ALLOWED_DIFFERENCE = 1e-6  # of the leaf's largest value, between forms
ALLOWED_LOSS_DIFFERENCE = 1e-2  # of the loss, where sums may come in another order
MOST_ELEMENTS = 20_000_000
_LAYERS, _BUCKETS = 8, 4
Leaves = dict[str, np.ndarray[Any, Any]]
Update = Callable[[Params, Any, Params], tuple[Params, Any]]


# -- forms


def forms(settings: Settings) -> dict[str, Any]:
    """The same steps called one by one, under ``lax.cond``, in ``lax.scan`` and in ``lax.while_loop``.

    Returns:
      ``digests`` of each form, ``differences`` from the first (of each leaf's largest value), and how many
      CUDA graphs each launched (``graph_launches``).
    """
    load = _load(settings)
    found = {name: _run(load, make, settings.steps) for name, make in _FORMS.items()}
    first = found["call"][0]
    return {
        "elements": load.elements,
        "digests": {name: _digest(leaves) for name, (leaves, _) in found.items()},
        "differences": {name: _difference(leaves, first) for name, (leaves, _) in found.items() if name != "call"},
        "graph_launches": {name: count for name, (_, count) in found.items()},
    }


def _load(settings: Settings) -> Workload:
    return Workload.of(min(settings.params, MOST_ELEMENTS), _LAYERS, jnp.bfloat16, 1)


def _run(load: Workload, make: Callable[..., Any], steps: int) -> tuple[Leaves, int]:
    """Masters and moments after so many updates in one form, and the graphs that it launched."""
    with jmo.Store(subgroup_elements=max(4096, load.elements // _BUCKETS)) as store:
        tx = jmo.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY, store=store)

        def update(params: Params, state: Any, grads: Params) -> tuple[Params, Any]:
            updates, state = tx.update(grads, state, params)
            return jmo.apply_updates(params, updates), state

        params = load.draw(seed=0, scale=load.width**-0.5)
        grads = load.draw(seed=1, scale=1e-3)
        with timeline.traced() as trace:
            params, state = jax.block_until_ready(make(update, steps, params, tx.init(params), grads))
        return _leaves(state, params), timeline.graph_launches(trace)


def _call(update: Update, steps: int, params: Params, state: Any, grads: Params) -> Any:
    step = jax.jit(update, donate_argnums=(0, 1))
    for _ in range(steps):
        params, state = step(params, state, grads)
    return params, state


def _cond(update: Update, steps: int, params: Params, state: Any, grads: Params) -> Any:
    """One call more, which leaves all as it is."""

    def maybe(run: jax.Array, params: Params, state: Any, grads: Params) -> tuple[Params, Any]:
        result: tuple[Params, Any] = jax.lax.cond(run, update, lambda p, s, _: (p, s), params, state, grads)
        return result

    step = jax.jit(maybe, donate_argnums=(1, 2))
    for run in [True, False, *[True] * (steps - 1)]:
        params, state = step(jnp.array(run), params, state, grads)
    return params, state


def _scan(update: Update, steps: int, params: Params, state: Any, grads: Params) -> Any:
    def whole(params: Params, state: Any, grads: Params) -> Any:
        return jax.lax.scan(lambda held, _: (update(held[0], held[1], grads), None), (params, state), length=steps)[0]

    return jax.jit(whole, donate_argnums=(0, 1))(params, state, grads)


def _while(update: Update, steps: int, params: Params, state: Any, grads: Params) -> Any:
    def whole(params: Params, state: Any, grads: Params) -> Any:
        def body(held: Any) -> Any:
            return held[0] + 1, *update(held[1], held[2], grads)

        return jax.lax.while_loop(lambda held: held[0] < steps, body, (jnp.int32(0), params, state))[1:]

    return jax.jit(whole, donate_argnums=(0, 1))(params, state, grads)


_FORMS: dict[str, Callable[..., Any]] = {"call": _call, "cond": _cond, "scan": _scan, "while": _while}


def _leaves(state: Any, params: Params) -> Leaves:
    named = {"master": jmo.read_masters(state, params), "state": jmo.read_state(state)}
    flat = jax.tree_util.tree_flatten_with_path(named)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def _digest(leaves: Leaves) -> str:
    digest = hashlib.sha256()
    for path in sorted(leaves):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(leaves[path]).tobytes())
    return digest.hexdigest()


def _difference(leaves: Leaves, expected: Leaves) -> float:
    """The largest difference of an element, as a part of its leaf's largest value."""
    worst = 0.0
    for path, other in expected.items():
        a, b = (np.asarray(leaf, np.float64) for leaf in (leaves[path], other))
        largest = np.abs(b).max(initial=0.0)
        worst = max(worst, float(np.abs(a - b).max(initial=0.0) / (largest or 1.0)))
    return worst


# -- donation


def donation(settings: Settings) -> dict[str, Any]:
    """A train step that takes its whole state, beside the same step that leaves it alone.

    Returns:
      ``kept``: arrays of the first state that were not taken; ``refused``: what JAX warned of; ``digests`` of both.
    """
    load = _load(settings)
    digests: dict[str, str] = {}
    kept = -1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("donated", "not donated"):
            with jmo.Store(subgroup_elements=max(4096, load.elements // _BUCKETS)) as store:
                tx = jmo.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY, store=store)
                donated: Any = workload.update_step(tx)
                step = donated if name == "donated" else jax.jit(donated.__wrapped__)
                params, grads = load.draw(0, load.width**-0.5), load.draw(1, 1e-3)
                state = tx.init(params)
                for index in range(settings.steps):
                    before = jax.tree.leaves((params, state))
                    params, state = jax.block_until_ready(step(params, state, grads))
                    if name == "donated" and index == 0:
                        kept = sum(not leaf.is_deleted() for leaf in before)
                digests[name] = _digest(_leaves(state, params))
    refused = sorted({str(warning.message).splitlines()[0] for warning in caught if "donated" in str(warning.message)})
    return {"elements": load.elements, "kept": kept, "refused": refused, "digests": digests}


# -- several devices


def collectives(settings: Settings) -> dict[str, Any]:
    """The decoder on all devices, weights and batch split: losses of ours beside those of plain optax.

    Raises:
      NotMeasured: if there is only one device.
    """
    devices = jax.local_device_count()
    if devices < 2:
        raise NotMeasured("there is only one device")
    losses = {}
    for name in (PLAIN, "memory-host"):
        with opened(name, settings, devices) as system:
            losses[name], collective = _losses(system, settings.steps)
    plain, ours = (np.asarray(losses[name]) for name in losses)
    return {
        "devices": devices,
        "collectives": collective,
        "losses": losses,
        "loss_difference": float(np.max(np.abs(ours - plain) / np.abs(plain))),
    }


def _losses(system: System, steps: int) -> tuple[list[float], int]:
    """Losses of steps that are dispatched ahead, and the collectives of the program."""
    lower: Any = system.step
    compiled = lower.lower(system.state, system.tokens).compile()
    found, _ = schedule.computations(compiled.as_text())
    count = sum(
        instruction.operation.startswith(("all-", "reduce-scatter", "collective-"))
        and not instruction.operation.endswith("-done")
        for body in found.values()
        for instruction in body
    )
    state, losses = system.state, []
    for _ in range(steps):
        state, loss = compiled(state, system.tokens)
        losses.append(loss)
    jax.block_until_ready(state)
    return [float(loss) for loss in losses], count
