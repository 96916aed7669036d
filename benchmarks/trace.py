"""What the scheduler did and when: every transfer and kernel, seen at the scheduler's own interface.

A trace wraps the event methods and ``take_actions`` of one scheduler object. A transfer begins when its action is given
out and ends when the scheduler is told. Times are seconds of the engine's clock (``native.now_s``, which is that of
``time.monotonic``). Thread contract: written by the driver's thread; read while nothing is in flight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax_mlp_offload import native
from jax_mlp_offload.scheduler import Scheduler
from jax_mlp_offload.types import Read, Record, Update, Write

READ, WRITE, UPDATE = "read", "write", "update"


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One transfer, or one run of the kernel (``tier`` None)."""

    kind: str
    tier: int | None
    record: int
    size_bytes: int
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """What one tier did in one direction during a step; offsets in seconds from the step's begin."""

    requests: int
    size_bytes: int
    busy_s: float  # at least one request in flight
    first_s: float  # when the first request began (0 without any)
    last_s: float  # when the last one ended


class Trace:
    """Notes what a scheduler does from now on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.spans: list[Span] = []
        self.arrivals_s: list[float] = []
        self.events = 0
        self._open: dict[int, tuple[str, int | None, float]] = {}  # by record; it does one thing at a time
        self._wrap_actions(scheduler)
        self._wrap_arrived(scheduler)
        for name in ("read_done", "write_done", "update_done"):
            self._wrap_end(scheduler, name)

    def between(self, begin_s: float, end_s: float) -> list[Span]:
        """The spans that ended in this time."""
        return [span for span in self.spans if begin_s < span.end_s <= end_s]

    # methods are replaced through vars(): the object's own attributes come before its class's

    def _wrap_actions(self, scheduler: Scheduler) -> None:
        inner = scheduler.take_actions

        def take_actions() -> list[Any]:
            actions = inner()
            now_s = native.now_s() if actions else 0.0
            for action in actions:
                match action:
                    case Read(record):
                        self._open[record.index] = (READ, record.tier, now_s)
                    case Write(record):
                        self._open[record.index] = (WRITE, record.tier, now_s)
                    case Update(record):
                        self._open[record.index] = (UPDATE, None, now_s)
            return actions

        vars(scheduler)["take_actions"] = take_actions

    def _wrap_arrived(self, scheduler: Scheduler) -> None:
        inner = scheduler.arrived

        def arrived(*args: Any, **named: Any) -> None:
            self.events += 1
            self.arrivals_s.append(native.now_s())
            inner(*args, **named)

        vars(scheduler)["arrived"] = arrived

    def _wrap_end(self, scheduler: Scheduler, name: str) -> None:
        inner = getattr(scheduler, name)

        def ended(record: Record, *args: Any, **named: Any) -> None:
            self.events += 1
            kind, tier, begin_s = self._open.pop(record.index)
            self.spans.append(Span(kind, tier, record.index, record.size_bytes, begin_s, native.now_s()))
            inner(record, *args, **named)

        vars(scheduler)[name] = ended


def busy_s(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans was under way."""
    total_s, until_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_s):
        total_s += max(0.0, span.end_s - max(span.begin_s, until_s))
        until_s = max(until_s, span.end_s)
    return total_s


def activity(spans: Sequence[Span], kind: str, tier: int | None, begin_s: float) -> Activity:
    """What a tier did in one direction (or the kernel, ``tier`` None) among the spans of a step."""
    mine = [span for span in spans if span.kind == kind and span.tier == tier]
    return Activity(
        requests=len(mine),
        size_bytes=sum(span.size_bytes for span in mine),
        busy_s=busy_s(mine),
        first_s=min((span.begin_s for span in mine), default=begin_s) - begin_s,
        last_s=max((span.end_s for span in mine), default=begin_s) - begin_s,
    )
