"""What a store counts, as a plain dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_mlp_offload.engine import Engine


def collect(engine: Engine) -> dict[str, Any]:
    """Counts so far, as ``Store.stats`` describes them. Thread contract: the driver's thread."""
    scheduler = engine.scheduler
    tiers = scheduler.placement.tiers
    written = sum(tier.writes.bytes for tier in tiers)
    slots = sum(len(cache.slots) for cache in scheduler.devices.values())
    slot_bytes = engine.slot_bytes
    instances = scheduler.instances.values()
    return {
        "steps": sum(instance.steps for instance in instances),
        "hits": scheduler.hits,
        "misses": scheduler.misses,
        "skipped_steps": sum(instance.skipped for instance in instances),
        "adopted_steps": sum(instance.adopted for instance in instances),
        "records": len(scheduler.records),
        "record_bytes_total": sum(record.size_bytes for record in scheduler.records),
        "slots": slots,
        "slot_bytes": slot_bytes,
        "host_bytes": slots * slot_bytes,
        "tiers": [
            {
                "name": tier.spec.name,
                "bytes_read": tier.reads.bytes,
                "bytes_written": tier.writes.bytes,
                "share": tier.writes.bytes / written if written else 0.0,
                "read_bps": tier.reads.mean_bps,
                "write_bps": tier.writes.mean_bps,
                "retired": tier.retired,
            }
            for tier in tiers
        ],
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
