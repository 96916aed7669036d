"""What one run of ``benchmarks.step`` measured: filled by it, read by ``step_report``. Plain data."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmarks import workload
from benchmarks.trace import Trace


@dataclasses.dataclass
class Run:
    """What was measured; steps without the warm-up. Times of ``steps`` are (begin, end) of the engine's clock."""

    load: workload.Workload
    steps: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    trace: Trace | None = None
    record_bytes: list[int] = dataclasses.field(default_factory=list)
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)  # at the end
    stats_before: dict[str, Any] = dataclasses.field(default_factory=dict)  # after the warm-up
    events: int = 0  # that the driver handled
    driver_cpu_s: float = 0.0
    process_cpu_s: float = 0.0
    page_faults: int = 0
    imported_bytes: int = 0  # resident before anything was made
    peak_bytes: int = 0  # resident, most after the warm-up
    steady_bytes: int = 0  # resident after the last step

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step."""
        return [end_s - begin_s for begin_s, end_s in self.steps]

    @property
    def median_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_s)
