"""What a pre-training run says: progress while it runs, one JSON line a step, tables at the end.

Always true here: `metrics.jsonl` gets one line a step, flushed at once, so a killed run keeps what it measured; a run
that is resumed drops the lines of steps that it does again;
traffic in it is that of the step (the difference between two snapshots), traffic in the summary is the run's.

Threads: one reporter belongs to the thread that made it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PLAIN_LINES = 12
"""How many progress lines a run prints where there is no terminal."""

COMPARED_STEPS = 20
AVERAGED_STEPS = 10
TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Tier:
    """Traffic of one tier: bytes so far, share of all bytes written, bytes/s while busy."""

    name: str
    bytes_read: int
    bytes_written: int
    share: float
    read_bps: float
    write_bps: float


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A snapshot of a store's counters; the default is that of a run without one."""

    hits: int = 0
    misses: int = 0
    record_bytes: int = 0
    tiers: tuple[Tier, ...] = ()

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Traffic:
        """Reads the dict that `Store.stats()` gives."""
        names = [field.name for field in dataclasses.fields(Tier)]
        tiers = tuple(Tier(**{name: tier[name] for name in names}) for tier in stats["tiers"])
        return cls(stats["hits"], stats["misses"], stats["record_bytes_total"], tiers)


@dataclasses.dataclass
class Result:
    """What a run came to.

    Attributes:
      label: The optimizer's name.
      start: Steps done before, by the run that this one goes on with.
      losses: One a step.
      step_s: Seconds of each step, the first with compilation.
      total_s: Seconds from the start of initialisation until the store was closed.
      traffic: The last snapshot.
      state_bytes: Optimizer state, with float32 masters where the run keeps such.
      interrupted: Ended by SIGINT or SIGTERM.
      checkpoint: The step of the newest one, None if there is none.
    """

    label: str
    start: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    step_s: list[float] = dataclasses.field(default_factory=list)
    total_s: float = 0.0
    traffic: Traffic = Traffic()
    state_bytes: int = 0
    interrupted: bool = False
    checkpoint: int | None = None


class Reporter:
    """Shows and records the steps of one run. A context manager.

    Args:
      console: Where to write; a bar if it is a terminal, else a plain line every few steps.
      out: An existing folder for `metrics.jsonl`; None records nothing.
      label: The run's name.
      steps: How many steps there will be, with those before `start`.
      start: How many are done. `metrics.jsonl` keeps their lines and no others.
    """

    def __init__(self, console: Console, out: Path | None, label: str, steps: int, start: int = 0) -> None:
        self._console = console
        self._label = label
        self._steps = steps
        self._start = start
        self._every = max(1, steps // PLAIN_LINES)
        self._before = Traffic()
        path = Path(os.devnull)
        if out is not None:
            path = out / "metrics.jsonl"
            _keep_lines(path, start)
        self._file = path.open("a", encoding="utf-8")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(label, total=steps, completed=start, status="compiling")

    def __enter__(self) -> Reporter:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.closing(self._file):
            self._progress.stop()

    def step(self, step: int, loss: float, tokens: int, step_s: float, traffic: Traffic) -> None:
        """Shows and records step `step`, counted from 1, that trained on `tokens` tokens in `step_s` seconds."""
        before = {tier.name: tier for tier in self._before.tiers}
        record = {
            "step": step,
            "loss": loss,
            "tokens_per_s": tokens / step_s,
            "step_s": step_s,
            "hits": traffic.hits - self._before.hits,
            "misses": traffic.misses - self._before.misses,
            "tiers": [_tier_record(tier, before.get(tier.name)) for tier in traffic.tiers],
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        status = " · ".join([f"loss {loss:.4f}", f"{tokens / step_s:,.0f} tokens/s", *_traffic_words(record, traffic)])
        self._before = traffic
        if self._console.is_terminal:
            self._progress.update(self._task, completed=step, status=status)
        elif step == self._start + 1 or step == self._steps or step % self._every == 0:
            line = f"{self._label} step {step}/{self._steps} · {status} · {step_s:.2f} s"
            self._console.print(Text(line), soft_wrap=True)


def _keep_lines(path: Path, steps: int) -> None:
    """Leaves the lines of the first `steps` steps in a file of metrics; a line cut off by a crash ends them."""
    kept: list[str] = []
    if steps and path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if record["step"] > steps:
                break
            kept.append(line + "\n")
    part = path.with_suffix(".part")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(path)


def _tier_record(tier: Tier, before: Tier | None) -> dict[str, Any]:
    return {
        "name": tier.name,
        "bytes_read": tier.bytes_read - (before.bytes_read if before else 0),
        "bytes_written": tier.bytes_written - (before.bytes_written if before else 0),
        "share": tier.share,
    }


def _traffic_words(record: Mapping[str, Any], traffic: Traffic) -> list[str]:
    """The store's half of a progress line: hits of this step, then bandwidth and share of each tier."""
    if not traffic.tiers and not traffic.hits:
        return []
    words = [f"hits {record['hits']}/{record['hits'] + record['misses']}"]
    for tier in traffic.tiers:
        words.append(
            f"{Path(tier.name).name} r {tier.read_bps / 1e9:.2f} w {tier.write_bps / 1e9:.2f} GB/s {tier.share:.0%}"
        )
    return words


def summary_table(result: Result, *, params: int, host_memory: str, processes: int = 1) -> Table:
    """Returns the final table of one run; of several processes it shows the memory and traffic of the first."""
    title = f"{result.label}: summary"
    if processes > 1:
        title += f" (host memory, hits, tiers: process 0 of {processes})"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    rows = [
        ("parameters", f"{params:,}"),
        ("state", format_bytes(result.state_bytes)),
        ("host memory for it", host_memory),
        ("steps", _steps_words(result)),
        ("time", f"{result.total_s:.1f} s"),
    ]
    if result.step_s:
        rows.append(("first step, with compilation", f"{result.step_s[0]:.2f} s"))
        rows.append(("final loss", f"{result.losses[-1]:.4f}, from {result.losses[0]:.4f}"))
    if result.checkpoint is not None:
        rows.append(("newest checkpoint", f"step {result.checkpoint}"))
    if len(result.losses) > AVERAGED_STEPS:
        mean = statistics.fmean(result.losses[-AVERAGED_STEPS:])
        rows.append((f"mean loss of the last {AVERAGED_STEPS} steps", f"{mean:.4f}"))
    if len(result.step_s) > 1:
        rows.append(("median of the other steps", f"{statistics.median(result.step_s[1:]):.3f} s"))
    if result.traffic.tiers:
        rows.append(("hits / misses", f"{result.traffic.hits} / {result.traffic.misses}"))
    for tier in result.traffic.tiers:
        moved = f"read {format_bytes(tier.bytes_read)}, written {format_bytes(tier.bytes_written)}"
        rows.append((f"tier {Path(tier.name).name}", f"{moved}, share {tier.share:.1%}"))
    for what, value in rows:
        table.add_row(Text(what), Text(value))
    return table


def _steps_words(result: Result) -> str:
    words = f"{len(result.losses)}"
    if result.start:
        words += f", resumed after step {result.start}"
    return words + (" (interrupted)" if result.interrupted else "")


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns |a - b| / |b| of each step both runs did."""
    return [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=False)]


def comparison_table(result: Result, reference: Result) -> tuple[Table, str, bool]:
    """Returns the table of both runs' losses, the verdict, and whether it is good.

    Good is a relative difference of at most `TOLERANCE` in each of the first `COMPARED_STEPS` steps.
    """
    differences = relative_differences(result.losses, reference.losses)
    table = Table(title="losses", title_justify="left")
    for heading in ("step", result.label, reference.label, "relative difference"):
        table.add_column(heading, justify="right")
    for index, difference in enumerate(differences):
        losses = result.losses[index], reference.losses[index]
        table.add_row(str(index + 1), *(f"{loss:.6f}" for loss in losses), f"{difference:.2e}")
    head = differences[:COMPARED_STEPS]
    largest = math.nan if any(map(math.isnan, head)) else max(head, default=math.nan)
    agree = largest <= TOLERANCE
    verdict = "within" if agree else "above"
    return table, f"largest over the first {len(head)} steps: {largest:.2e}, {verdict} {TOLERANCE:g}", agree


def format_bytes(size: int) -> str:
    """Returns a size in words: 1,536 → "1.5 KiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{size} B"
        value /= 1024
    return f"{value:.1f} TiB"
