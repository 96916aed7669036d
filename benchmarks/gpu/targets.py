"""What the parts' figures say of the targets: one row each, with what was measured, what is asked for, and the verdict.

A row without a target has no verdict, nor has one whose figure was not measured, and in a rehearsal none that is about time
or memory. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.gpu import numbers, timing
from benchmarks.gpu.parts import MEASURED, NOT_MEASURED
from benchmarks.gpu.settings import NotMeasured, Settings
from benchmarks.gpu.systems import OURS, PINNED_HOST, PLAIN, SYSTEMS

LINK_SHARE = 0.85  # of a plain pinned copy
BYTES_BELOW_PLAIN = 10.0  # a param, at the peak
STEP_RATIO = 1.1  # of a step of ours to its limit
BLOCKING_SHARE = 0.02  # of a step
EARLY_SHARE = 0.9  # of the bytes that could be pushed before the last gradient
_WAYS = {"to_host": "to host", "to_device": "to device"}
_LINK = {way: (shown, f"{way}_bps") for way, shown in _WAYS.items()} | {timing.ON_DEVICE: ("both ways", "both_bps")}
Outcomes = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      name: What is measured.
      measured: The figure, or why there is none.
      target: What is asked for; empty: nothing.
      passed: The verdict; None: none.
      values: The figures behind it.
    """

    name: str
    measured: str
    target: str = ""
    passed: bool | None = None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def rows(outcomes: Outcomes, settings: Settings) -> list[Row]:
    """All rows, in the order of the parts."""
    found: list[Row] = []
    for name, make in _GROUPS:
        try:
            found += make(_Figures(outcomes, settings))
        except NotMeasured as reason:
            found.append(Row(name, str(reason)))
    return found


class _Figures:
    """Figures of parts by name; asking for those of a part that has none raises ``NotMeasured``."""

    def __init__(self, outcomes: Outcomes, settings: Settings) -> None:
        self._outcomes = outcomes
        self.on_gpu = settings.on_gpu

    def __getitem__(self, part: str) -> dict[str, Any]:
        outcome = self._outcomes.get(part)
        if outcome is None:
            raise NotMeasured(f"{part} was not run")
        if outcome["state"] == MEASURED:
            figures: dict[str, Any] = outcome["figures"]
            return figures
        if outcome["state"] == NOT_MEASURED:
            raise NotMeasured(f"{NOT_MEASURED}: {outcome['reason']}")
        raise NotMeasured(f"{part} failed: {str(outcome['reason']).strip().splitlines()[-1]}")

    def judged(self, passed: bool) -> bool | None:
        """The verdict on a time or a size, which a rehearsal has not."""
        return passed if self.on_gpu else None


def _rows_of_build(parts: _Figures) -> Iterator[Row]:
    figures = parts["build"]
    yield Row("CUDA extension", f"{', '.join(figures['built'])}; {', '.join(figures['devices'])}", values=figures)


def _rows_of_suites(parts: _Figures) -> Iterator[Row]:
    figures = parts["suites"]
    shown = ", ".join(f"{figures[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    passed = figures["failed"] == 0 and figures["passed"] > 0
    yield Row("tests", shown, "0 failed", passed, {kind: figures[kind] for kind in ("passed", "failed", "skipped")})


def _rows_of_link(parts: _Figures) -> Iterator[Row]:
    for device, line in enumerate(parts["link"]["devices"]):
        shown = ", ".join(f"{way} {_rate(line[f'{key}_bps'])}" for key, way in _WAYS.items())
        yield Row(f"link of device {device}", f"{shown}, both at once {_rate(line['both_bps'])}", values=line)


def _rows_of_passes(parts: _Figures) -> Iterator[Row]:
    figures = parts["passes"]
    yield Row("forward and backward alone", f"{figures['passes_s'] * 1e3:.2f} ms", values=figures)


def _rows_of_step(system: str, parts: _Figures) -> Iterator[Row]:
    figures = parts[f"step-{system}"]
    shown, values = f"{figures['ahead_step_s'] * 1e3:.2f} ms", {"step_s": figures["ahead_step_s"]}
    target, passed = "", None
    if system in OURS:
        target = f"at most {STEP_RATIO} times the limit"
        try:
            limits = timing.step_limit(figures, parts["passes"], figures.get("link") or _no_link())
            shown += f"; limit {limits['limit_s'] * 1e3:.2f} ms, ratio {limits['ratio']:.3f}"
            values |= limits
            passed = parts.judged(limits["ratio"] <= STEP_RATIO)
        except NotMeasured as reason:
            shown += f"; limit: {reason}"
    for other in (PLAIN, PINNED_HOST):
        try:
            times = figures["ahead_step_s"] / parts[f"step-{other}"]["ahead_step_s"]
        except NotMeasured:
            continue
        if other != system:
            shown += f"; {times:.2f} times {other}"
            values[f"times_{other}"] = times
    yield Row(f"step, {system}", shown, target, passed, values)


def _no_link() -> dict[str, Any]:
    raise NotMeasured("the link was not measured here")


def _rows_of_share(system: str, parts: _Figures) -> Iterator[Row]:
    figures = parts[f"step-{system}"]
    link = figures.get("link") or _no_link()
    line = figures["moved"][0]
    for way, (shown, measured) in _LINK.items():
        reached = line[f"{way}_bps"]
        if reached is None:
            continue  # the other place of updates does not use it
        share = reached / link[measured]
        yield Row(
            f"link {shown} in steps, {system}",
            f"{_rate(reached)} of {_rate(link[measured])}: {share:.1%}",
            f"≥ {LINK_SHARE:.0%}",
            parts.judged(share >= LINK_SHARE),
            {"share": share, "reached_bps": reached, "link_bps": link[measured]},
        )


def _rows_of_memory(parts: _Figures) -> Iterator[Row]:
    peaks: dict[str, float] = {}
    for system in SYSTEMS:
        try:
            figures = parts[f"step-{system}"]
        except NotMeasured as reason:
            yield Row(f"peak of device memory, {system}", str(reason))
            continue
        if figures["peak_unknown"] is not None:
            yield Row(f"peak of device memory, {system}", f"{NOT_MEASURED}: {figures['peak_unknown']}")
            continue
        peaks[system] = figures["peak_bytes_per_param"]
        shown, values = f"{peaks[system]:.2f} B/param", {"bytes_per_param": peaks[system]}
        if system not in OURS or PLAIN not in peaks:
            yield Row(f"peak of device memory, {system}", shown, values=values)
            continue
        below = peaks[PLAIN] - peaks[system]
        yield Row(
            f"peak of device memory, {system}",
            f"{shown}, {below:.2f} below {PLAIN}",
            f"≥ {BYTES_BELOW_PLAIN:g} below",
            parts.judged(below >= BYTES_BELOW_PLAIN),
            values | {"below_plain": below},
        )


def _rows_of_overlap(place: str, parts: _Figures) -> Iterator[Row]:
    figures = parts[f"overlap-{place}"]
    line = figures["timeline"]
    name = f"under XLA's compute, update on {place}"
    if "not_measured" in line:
        yield Row(name, f"{NOT_MEASURED}: {line['not_measured']}")
    else:
        shown = [
            f"{title} {line[key]['overlapped']:.1%} of {line[key]['seconds'] * 1e3:.2f} ms"
            for key, title in ({**_WAYS, "update": "update"}).items()
            if line[key]["overlapped"] is not None
        ]
        idle = "" if line["idle_share"] is None else f"; GPU idle {line['idle_share']:.1%}"
        yield Row(name, (", ".join(shown) or "nothing was moved") + idle, values=line)
    order = figures["schedule"]
    name = f"pushes before the last gradient, update on {place}"
    if "not_measured" in order:
        yield Row(name, f"{NOT_MEASURED}: {order['not_measured']}")
        return
    share = order["early_bytes_share"]
    shown_share = "none could be" if share is None else f"{share:.1%} of the bytes that could be"
    yield Row(
        name,
        f"{order['early']} of {order['could_be_early']} ({shown_share}); {order['most_late']} instructions late at most",
        f"≥ {EARLY_SHARE:.0%} of bytes",
        None if share is None else parts.judged(share >= EARLY_SHARE),
        order,
    )


def _rows_of_blocking(parts: _Figures) -> Iterator[Row]:
    plain = parts[f"step-{PLAIN}"]
    gain_s = max(0.0, plain["median_synced_s"] - plain["ahead_step_s"])
    for system in ("memory-host", "memory-device"):
        name = f"run-ahead that the blocking pull gives up, {system}"
        try:
            figures = parts[f"step-{system}"]
        except NotMeasured as reason:
            yield Row(name, str(reason))
            continue
        share = gain_s / figures["ahead_step_s"]
        yield Row(
            name,
            f"{share:.2%} of a step ({PLAIN} gains {gain_s * 1e3:.3f} ms by {plain['run_ahead']:.0%} run-ahead; "
            f"here {figures['run_ahead']:.0%})",
            f"≤ {BLOCKING_SHARE:.0%}",
            parts.judged(share <= BLOCKING_SHARE),
            {
                "share": share,
                "gain_s": gain_s,
                "run_ahead": figures["run_ahead"],
                "run_ahead_plain": plain["run_ahead"],
            },
        )


def _rows_of_forms(parts: _Figures) -> Iterator[Row]:
    figures = parts["forms"]
    worst = max(figures["differences"].values())
    same = len(set(figures["digests"].values())) == 1
    yield Row(
        "cond, scan and while beside calls",
        "the same bits" if same else f"off by {worst:.2g} of a leaf's largest value",
        f"≤ {numbers.ALLOWED_DIFFERENCE:g}",
        worst <= numbers.ALLOWED_DIFFERENCE,
        {"differences": figures["differences"], "same_bits": same},
    )


def _rows_of_command_buffers(parts: _Figures) -> Iterator[Row]:
    figures = parts["forms"]
    without = parts["forms-without-command-buffers"]
    differ = [form for form, digest in figures["digests"].items() if without["digests"][form] != digest]
    counts = ", ".join(f"{form} {count}" for form, count in figures["graph_launches"].items())
    yield Row(
        "command buffers on and off",
        f"{'bits differ: ' + ', '.join(differ) if differ else 'the same bits'} (graphs launched: {counts})",
        "the same bits",
        not differ,
        {"differ": differ, "graph_launches": figures["graph_launches"]},
    )


def _rows_of_donation(parts: _Figures) -> Iterator[Row]:
    figures = parts["donation"]
    same = len(set(figures["digests"].values())) == 1
    problems = [*figures["refused"], *([f"{figures['kept']} arrays were not taken"] if figures["kept"] else [])]
    yield Row(
        "donation of the whole state",
        "; ".join([*problems, "the same bits" if same else "bits differ"]),
        "all taken, same bits",
        same and not problems,
        {"kept": figures["kept"], "same_bits": same},
    )


def _rows_of_collectives(parts: _Figures) -> Iterator[Row]:
    figures = parts["collectives"]
    difference = figures["loss_difference"]
    yield Row(
        f"collectives beside the ops, {figures['devices']} devices",
        f"losses off by {difference:.2g} from {PLAIN}'s; {figures['collectives']} collectives",
        f"≤ {numbers.ALLOWED_LOSS_DIFFERENCE:g}",
        difference <= numbers.ALLOWED_LOSS_DIFFERENCE,
        {"devices": figures["devices"], "loss_difference": difference},
    )


def _for(make: Callable[[str, _Figures], Iterator[Row]], what: str) -> Callable[[_Figures], Iterator[Row]]:
    return lambda parts: make(what, parts)


_GROUPS: list[tuple[str, Callable[[_Figures], Iterator[Row]]]] = [
    ("CUDA extension", _rows_of_build),
    ("tests", _rows_of_suites),
    ("link", _rows_of_link),
    ("forward and backward alone", _rows_of_passes),
    *((f"step, {system}", _for(_rows_of_step, system)) for system in SYSTEMS),
    *((f"link in steps, {system}", _for(_rows_of_share, system)) for system in ("memory-host", "memory-device")),
    ("peak of device memory", _rows_of_memory),
    *((f"overlap, update on {place}", _for(_rows_of_overlap, place)) for place in ("host", "device")),
    ("run-ahead that the blocking pull gives up", _rows_of_blocking),
    ("cond, scan and while beside calls", _rows_of_forms),
    ("command buffers on and off", _rows_of_command_buffers),
    ("donation of the whole state", _rows_of_donation),
    ("collectives beside the ops", _rows_of_collectives),
]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
