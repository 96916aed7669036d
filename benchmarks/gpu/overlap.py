"""Whether copies run beside the backward pass: a profiler trace of some steps, and the schedule of their program.

Thread contract: the main thread.
"""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.gpu import schedule, timeline
from benchmarks.gpu.settings import WARM_UP, NotMeasured, Settings
from benchmarks.gpu.systems import opened

TRACED_STEPS = 3


def overlap(name: str, settings: Settings) -> dict[str, Any]:
    """One of our systems, traced; ``schedule`` and ``timeline`` each have figures, or say why there are none."""
    with opened(name, settings) as system:
        lower: Any = system.step
        compiled = lower.lower(system.state, system.tokens).compile()
        state = system.state
        for _ in range(WARM_UP):
            state, loss = jax.block_until_ready(compiled(state, system.tokens))
        with timeline.traced() as trace:
            for _ in range(TRACED_STEPS):
                state, loss = compiled(state, system.tokens)
            jax.block_until_ready((state, loss))
    return {
        "steps": TRACED_STEPS,
        "graph_launches": timeline.graph_launches(trace),
        "schedule": _or_reason(lambda: schedule.placement(compiled.as_text())),
        "timeline": _or_reason(lambda: timeline.overlap(timeline.events(trace))),
    }


def _or_reason(measure: Any) -> dict[str, Any]:
    try:
        figures: dict[str, Any] = measure()
    except NotMeasured as reason:
        return {"not_measured": str(reason)}
    return figures
