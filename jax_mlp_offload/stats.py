"""What a store counts, as plain dicts.

Thread contract: the driver's thread, but for ``endurance``, which is pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax_mlp_offload import native
from jax_mlp_offload.placement import Placement, Tier

if TYPE_CHECKING:
    from jax_mlp_offload.engine import Engine


def collect(engine: Engine) -> dict[str, Any]:
    """Counts so far, as ``Store.stats`` describes them."""
    scheduler = engine.scheduler
    slots = sum(len(cache.slots) for cache in scheduler.devices.values())
    slot_bytes = engine.slot_bytes
    instances = scheduler.instances.values()
    tiers = of_tiers(scheduler.placement)
    elapsed_s = native.now_s() - engine.started_s
    for tier, backend in zip(tiers, engine.backends, strict=True):
        tier["endurance"] = endurance(backend.tier.number("endurance"), tier["bytes_written"], elapsed_s)
        tier |= {"retries": 0} | backend.facts()
    return {
        "steps": sum(instance.steps for instance in instances),
        "hits": scheduler.hits,
        "misses": scheduler.misses,
        "hit_rate": _part(scheduler.hits, scheduler.hits + scheduler.misses),
        "bytes_read": sum(tier["bytes_read"] for tier in tiers),
        "bytes_written": sum(tier["bytes_written"] for tier in tiers),
        "skipped_steps": sum(instance.skipped for instance in instances),
        "adopted_steps": sum(instance.adopted for instance in instances),
        "records": len(scheduler.records),
        "record_bytes_total": sum(record.size_bytes for record in scheduler.records),
        "slots": slots,
        "slot_bytes": slot_bytes,
        "host_bytes": slots * slot_bytes,
        "tiers": tiers,
        "devices": engine.devices.stats(),
        "optimizers": {
            instance.name: {
                "steps": instance.steps,
                "skipped_steps": instance.skipped,
                "adopted_steps": instance.adopted,
                "failed": None if instance.error is None else str(instance.error),
            }
            for instance in instances
        },
    }


def of_tiers(placement: Placement) -> list[dict[str, Any]]:
    """What placement knows of each tier."""
    read = sum(tier.read.bytes for tier in placement.tiers)
    written = sum(tier.written.bytes for tier in placement.tiers)
    whole_phases = max(0, placement.phases - 1)
    return [
        {
            "name": tier.spec.name,
            "device": _plain(tier.spec.device),
            "retired": tier.retired,
            "bytes_read": tier.read.bytes,
            "bytes_written": tier.written.bytes,
            "read_share": _part(tier.read.bytes, read),
            "share": _part(tier.written.bytes, written),
            **_speeds(tier),
            "bytes_read_per_step": tier.read.last_phase_bytes,
            "bytes_written_per_step": tier.written.last_phase_bytes,
            "mean_bytes_read_per_step": _part(tier.read.whole_phases_bytes, whole_phases),
            "mean_bytes_written_per_step": _part(tier.written.whole_phases_bytes, whole_phases),
            "reads": tier.read.requests,
            "writes": tier.written.requests,
            "largest_read_bytes": tier.read.largest_bytes,
            "largest_write_bytes": tier.written.largest_bytes,
            "stored_bytes": tier.files.stored_bytes,
            "held_bytes": tier.files.held_bytes,
            "capacity_bytes": tier.spec.capacity_bytes,
            "free_bytes": tier.files.system.free_bytes,
        }
        for tier in placement.tiers
    ]


def _speeds(tier: Tier) -> dict[str, Any]:
    return {
        "read_bps": tier.read.mean_bps,
        "write_bps": tier.written.mean_bps,
        "estimated_read_bps": tier.read_bps,
        "estimated_write_bps": tier.write_bps,
        "read_busy_s": tier.read.busy_s,
        "write_busy_s": tier.written.busy_s,
        "read_queue_s": tier.read.mean_queue_s,
        "write_queue_s": tier.written.mean_queue_s,
    }


def endurance(rated_bytes: int | None, written_bytes: int, elapsed_s: float) -> dict[str, Any] | None:
    """How a run uses a drive's rating.

    Args:
      rated_bytes: what it may write over its life (TBW); None: unknown.
      written_bytes: what this run wrote.
      elapsed_s: how long that took.

    Returns:
      None without a rating, else a dict: ``rated_bytes``, ``written_bytes``, ``used`` (this run's part of the rating) and
      ``left_at_this_rate_s`` (until all of it is used at this run's mean rate, 0 once it is; None before any write).
    """
    if rated_bytes is None:
        return None
    left_bytes = max(0, rated_bytes - written_bytes)
    return {
        "rated_bytes": rated_bytes,
        "written_bytes": written_bytes,
        "used": _part(written_bytes, rated_bytes),
        "left_at_this_rate_s": left_bytes / written_bytes * elapsed_s if written_bytes else None,
    }


def _part(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _plain(device: Any) -> int | str | None:
    return device if device is None or isinstance(device, (int, str)) else str(device)
