"""Time, memory and link of one system's steps, and the least that a step could take.

A step is timed in two ways: with a wait after each, and dispatched ahead with one wait at the end. The second tells how far
Python runs ahead: a system that blocks it dispatches for as long as it computes. Counts of the link are those of the counted
steps only. Thread contract: the main thread.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from benchmarks import limit, pump, report, workload
from benchmarks.gpu.settings import WARM_UP, Settings, mesh_of
from benchmarks.gpu.systems import OURS, System, fresh_state, opened
from benchmarks.limit import Bandwidth, Overlap
from jax_mlp_offload import accelerators, native
from models import training, transformer

LINK_BYTES, LINK_REPEATS = 256 * 2**20, 10
WAYS, ON_DEVICE = ("to_host", "to_device"), "on_device"
_PROBES = 5


# -- the link


def link(settings: Settings) -> dict[str, Any]:
    """What a plain pinned copy moves each way, alone and both at once, by device."""
    settings.need_gpu("a link")
    return {"devices": [measured_link(device) for device in range(jax.local_device_count())]}


def measured_link(device: int) -> dict[str, Any]:
    """Bytes/s of one device's link, by pinned copies of one large block; both at once: the sum of the two directions."""
    accelerator = accelerators.cuda()
    number = accelerator.device(device)
    to_host_bps, to_device_bps, both_bps = native.measure_link(accelerator.runtime, number, LINK_BYTES, LINK_REPEATS)
    return {"to_host_bps": to_host_bps, "to_device_bps": to_device_bps, "both_bps": both_bps}


def moved(before: dict[str, Any], after: dict[str, Any], steps: int, record_bytes: int) -> list[dict[str, Any]]:
    """What each accelerator's link did between two ``stats()``.

    Args:
      before: the first.
      after: the second.
      steps: so many later.
      record_bytes: of all records of a device: where the device updates, each crosses the link twice in a step.

    Returns:
      For each of ``to_host``, ``to_device`` and ``on_device`` bytes and busy seconds a step, and bytes/s while it was busy
      (None where nothing was moved).
    """
    found = []
    for old, new in zip(before["devices"], after["devices"], strict=True):
        line: dict[str, Any] = {"update_on": new["update_on"]}
        for way in (*WAYS, ON_DEVICE):
            moved_bytes = (new[f"bytes_{way}"] - old[f"bytes_{way}"]) / steps if way in WAYS else 2 * record_bytes
            busy_s = (new[f"{way}_busy_s"] - old[f"{way}_busy_s"]) / steps
            line[f"{way}_bytes_per_step"] = moved_bytes if busy_s > 0 else 0
            line[f"{way}_busy_s_per_step"] = busy_s
            line[f"{way}_bps"] = moved_bytes / busy_s if moved_bytes and busy_s > 0 else None
        found.append(line)
    return found


# -- passes alone


def passes(settings: Settings) -> dict[str, Any]:
    """Forward and backward without an optimizer, and forward alone: best seconds."""
    config, mesh = settings.config(), mesh_of(1)
    tokens = training.place_batch(settings.tokens(config, 1), mesh)
    tx = optax.sgd(1e-6)  # so that gradients are consumed, as in a train step, and nearly nothing else is done
    state = fresh_state(config, tx, mesh, config.param_dtype)
    forward = jax.jit(functools.partial(_loss, config, mesh))
    forward_s = _best_s(lambda: forward(state.params, tokens))
    step = training.make_train_step(config, tx, mesh, state)
    held = [state]

    def run() -> Any:
        held[0], loss = step(held[0], tokens)
        return loss

    passes_s = _best_s(run)
    # forward is at most a third of the arithmetic; a program of its own may take longer than its part of a step
    return {"passes_s": passes_s, "forward_alone_s": forward_s, "first_gradient_s": min(forward_s, passes_s / 3)}


def _loss(config: transformer.Config, mesh: jax.sharding.Mesh, params: Any, tokens: jax.Array) -> jax.Array:
    logits = transformer.apply(config, params, tokens[:, :-1], mesh)
    loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss


def _best_s(function: Callable[[], Any]) -> float:
    for _ in range(WARM_UP):
        jax.block_until_ready(function())
    times = []
    for _ in range(_PROBES):
        begin_s = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begin_s)
    return min(times)


# -- steps


def steps(name: str, settings: Settings) -> dict[str, Any]:
    """Times, peak memory, and for ours the link, of one system in this process."""
    with opened(name, settings) as system:
        made = _peak_bytes()
        figures = _timed(system, settings.steps)
        elements = transformer.count_params(system.config)
        figures |= {"params": elements, **_peak(made, _peak_bytes(), elements)}
        if system.store is not None:
            figures |= _engine(system, elements)
    if name in OURS and settings.on_gpu:
        figures["link"] = measured_link(0)  # when nothing of the store's uses it any more
    return figures


def _timed(system: System, count: int) -> dict[str, Any]:
    step, tokens, store = system.step, system.tokens, system.store
    state, losses, synced_s = system.state, [], []
    # the system holds the first state too, whose arrays the first step takes: nothing may use it again
    for _ in range(WARM_UP):
        state, loss = jax.block_until_ready(step(state, tokens))
        losses.append(float(loss))
    before = store.stats() if store is not None else {}
    for _ in range(count):
        begin_s = time.perf_counter()
        state, loss = jax.block_until_ready(step(state, tokens))
        synced_s.append(time.perf_counter() - begin_s)
        losses.append(float(loss))
    begin_s = time.perf_counter()
    for _ in range(count):
        state, loss = step(state, tokens)
    dispatch_s = time.perf_counter() - begin_s
    jax.block_until_ready((state, loss))
    ahead_s = time.perf_counter() - begin_s
    figures: dict[str, Any] = {
        "synced_step_s": synced_s,
        "median_synced_s": statistics.median(synced_s),
        "ahead_step_s": ahead_s / count,
        "dispatch_step_s": dispatch_s / count,
        "run_ahead": 1 - dispatch_s / ahead_s,
        "losses": [*losses, float(loss)],
    }
    if store is not None:
        store.flush()
        after = store.stats()
        records = store.engine.scheduler.records
        figures["record_bytes"] = [record.size_bytes for record in records]
        figures["moved"] = moved(before, after, 2 * count, sum(figures["record_bytes"]))
        for kind in ("hits", "misses"):
            figures[f"{kind}_per_step"] = (after[kind] - before[kind]) / (2 * count)
    return figures


def _peak(made: int | None, now: int | None, elements: int) -> dict[str, Any]:
    """The steps' peak in bytes, and for each param; or why it is not known.

    Args:
      made: the peak when the state had been made, before the first step.
      now: the peak after the last step.
      elements: params.
    """
    figures: dict[str, Any] = {"peak_bytes": now, "peak_bytes_per_param": None, "peak_unknown": None}
    if made is None or now is None:
        figures["peak_unknown"] = "this platform does not count it"
    elif made == now:
        figures |= {"peak_bytes": None, "peak_unknown": f"making the state took {now} bytes, more than any step"}
    else:
        figures["peak_bytes_per_param"] = now / elements
    return figures


def _peak_bytes() -> int | None:
    """The most of the first device's memory that was ever in use in this process; None where JAX does not count it."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else int(stats["peak_bytes_in_use"])


def _engine(system: System, elements: int) -> dict[str, Any]:
    """What the store has, and what the limit of its update needs to know."""
    assert system.store is not None
    stats = system.store.stats()
    return {
        "slots": stats["slots"],
        "slot_bytes": stats["slot_bytes"],
        "kernel_s": workload.time_kernel(elements, system.config.param_dtype, report.machine()["cores"]),
        "tier_bps": None if system.tier is None else pump.bandwidths([(system.tier, None)])[0].sustained_bps,
    }


# -- the least that a step could take


def step_limit(figures: dict[str, Any], passes_figures: dict[str, Any], link_figures: dict[str, Any]) -> dict[str, Any]:
    """The limit of a step of ours: storage, link and kernel at once, from the first gradient on, beside the passes.

    Args:
      figures: of ``steps``.
      passes_figures: of ``passes``.
      link_figures: bandwidths of the link in the same run.

    Returns:
      ``link_s``, ``io_s``, ``kernel_s`` (0 where the device updates: its kernel is as fast as the link), ``limit_s`` and
      ``ratio``.
    """
    line = figures["moved"][0]
    link_s = max(line[f"{way}_bytes_per_step"] / link_figures[f"{way}_bps"] for way in WAYS)
    link_s += line[f"{ON_DEVICE}_bytes_per_step"] / link_figures["both_bps"]
    kernel_s = figures["kernel_s"] if line["update_on"] == "host" else 0.0
    tiers = [] if figures["tier_bps"] is None else [Bandwidth(figures["tier_bps"], figures["tier_bps"])]
    update = limit.update_limit(figures["record_bytes"], figures["slots"], tiers, kernel_s)
    limit_s = limit.iteration_limit(
        Overlap.BACKWARD,
        max(update.update_s, link_s),
        passes_figures["passes_s"],
        passes_figures["first_gradient_s"],
    )
    return {
        "link_s": link_s,
        "io_s": update.io_s,
        "kernel_s": kernel_s,
        "limit_s": limit_s,
        "ratio": figures["ahead_step_s"] / limit_s,
    }
