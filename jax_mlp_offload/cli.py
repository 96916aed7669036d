"""The command line: ``python -m jax_mlp_offload probe PATH_OR_URL...``.

Results go to standard output, all else to standard error; a progress bar only where that is a terminal. Exit codes: 0, 1
for a tier or file that fails, 2 for wrong arguments, 128 + the number of the signal that stopped it.

Thread contract: ``main`` belongs to the main thread, whose signal handlers it borrows.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jax_mlp_offload import probe
from jax_mlp_offload.profile import FILE_NAME, TierProfile, as_json, profile_name, write_profile
from jax_mlp_offload.sizes import format_bytes, parse_bytes
from jax_mlp_offload.tiers import File, Tier, as_tiers

_PLAIN_COLUMNS = 1000  # of a table that goes to a file: nothing is folded

_PROBE_TEXT = """\
Measures how fast tiers read, write and do both at once, with records as large as those of training and by the same
code. The figures are saved where jax_mlp_offload.Store finds them: in a tiers.json in each directory. A key-value store
has none; give --output FILE for all of them together, and pass it as Store(..., profile=FILE).

It takes about 15 s a tier, memory for 4 records (a key-value store: 8), and room for 8 records in each tier. All that is
written there is removed again. Directories on one device are measured once.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: of the command line; None: those of this process.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jax_mlp_offload", description="Tools for optimizer state of JAX training on storage tiers."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_probe(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _add_probe(commands: Any) -> None:
    command = commands.add_parser(
        "probe",
        help="measure how fast tiers are",
        description=_PROBE_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "tiers",
        nargs="+",
        metavar="PATH_OR_URL",
        help="a directory, a URL (s3://bucket/path), or a kvstore spec as JSON",
    )
    command.add_argument(
        "--record", type=_record, default="64MiB", metavar="SIZE", help="size of a record (default: %(default)s)"
    )
    command.add_argument(
        "--seconds", type=_seconds, default=3.0, help="to read, to write, and to do both, each (default: %(default)g)"
    )
    command.add_argument("--output", type=_output, metavar="FILE", help="save there, instead of in the directories")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=_probe)


def _record(text: str) -> int:
    try:
        size_bytes = parse_bytes(text, "--record")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size_bytes < probe.PAGE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is too small; the least is {probe.PAGE_BYTES}")
    return size_bytes


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def _output(text: str) -> str:
    folder = os.path.dirname(os.path.abspath(text))
    if not os.path.isdir(folder):  # better known now than after the measurement
        raise argparse.ArgumentTypeError(f"there is no directory {folder!r}")
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a directory; give a file")
    return text


# -- probe


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    tier: Tier
    profile: TierProfile
    same_device_as: str | None  # the tier that was measured in its place


def _probe(options: argparse.Namespace) -> int:
    try:
        tiers = as_tiers([json.loads(tier) if tier.startswith("{") else tier for tier in options.tiers])
        first = probe.measured_with(tiers)
    except (ValueError, OSError) as error:
        return _complain(error)
    with _stop_on_signals() as stop:
        measured, failed = _measure_all(tiers, first, options, stop)
        if stop.number is not None:
            print("stopped; nothing was saved", file=sys.stderr)
            return 128 + stop.number
    profiles = [entry.profile for entry in measured]
    if options.json:
        print(json.dumps(as_json(profiles), indent=2))
    elif measured:
        _print_table(measured)
    saved = _save(measured, options.output) if measured else True
    return 1 if failed or not saved else 0


def _measure_all(
    tiers: Sequence[Tier], first: Sequence[int], options: argparse.Namespace, stop: _Stop
) -> tuple[list[_Measured], bool]:
    """What could be measured, and whether there is something that could not."""
    from rich import console, progress  # costs time that --help need not take

    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
        console=console.Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    found: dict[int, _Measured] = {}  # by the first of a path's tiers
    measured = []
    with bar:
        for tier, path in zip(tiers, first, strict=True):
            task = bar.add_task(tier.name, total=1.0)

            def show(phase: probe.Phase, share: float, task: Any = task, name: str = tier.name) -> None:
                bar.update(task, completed=share, description=f"{name}: {phase.value}")

            try:
                if path in found:
                    probe.check(tier)
                    profile = dataclasses.replace(found[path].profile, name=profile_name(tier))
                    measured.append(_Measured(tier, profile, found[path].tier.name))
                else:
                    profile = probe.measure(tier, options.record, options.seconds, show, stop.event)
                    measured.append(found.setdefault(path, _Measured(tier, profile, None)))
            except probe.ProbeStoppedError:
                break
            except (OSError, RuntimeError, ValueError) as error:
                _complain(error)
            bar.remove_task(task)
    return measured, len(measured) < len(tiers)


def _print_table(measured: Sequence[_Measured]) -> None:
    from rich import box, console, table, text

    largest_bytes = max(entry.profile.record_bytes for entry in measured)
    title = f"Tiers, with records of {format_bytes(largest_bytes)}"
    shown = table.Table("tier", title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.columns[0].overflow = "fold"
    for heading in ("read", "write", "both, each way"):
        shown.add_column(heading, justify="right", width=12)
    for heading in ("read latency", "write latency"):
        shown.add_column(heading, justify="right", width=8)
    for entry in measured:
        profile, lines = entry.profile, [entry.tier.name]
        if entry.same_device_as:
            lines.append(f"(same device as {entry.same_device_as})")
        if profile.record_bytes < largest_bytes:
            lines.append(f"(records of {format_bytes(profile.record_bytes)})")
        cells = [f"{format_bytes(bps)}/s" for bps in (profile.read_bps, profile.write_bps, profile.mixed_bps)]
        cells += [_latency(profile.read_latency_s), _latency(profile.write_latency_s)]
        shown.add_row(*map(text.Text, ["\n".join(lines), *cells]))  # names are no markup
    console.Console(width=None if sys.stdout.isatty() else _PLAIN_COLUMNS).print(shown)


def _latency(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _save(measured: Sequence[_Measured], output: str | None) -> bool:
    """Saves in ``output``, or beside the data of each directory; whether all went well."""
    if output is not None:
        files = {os.path.abspath(output): [entry.profile for entry in measured]}
    else:
        files = {
            os.path.join(entry.profile.name, FILE_NAME): [entry.profile]
            for entry in measured
            if isinstance(entry.tier, File)
        }
        remote = [entry.profile for entry in measured if not isinstance(entry.tier, File)]
        if remote:
            print("Key-value stores have no place for their figures; use --output FILE, or save this:", file=sys.stderr)
            print(json.dumps(as_json(remote)), file=sys.stderr)
    well = True
    for path, profiles in files.items():
        try:
            if output is None:
                pathlib.Path(path).parent.mkdir(mode=0o700, exist_ok=True)  # the probe leaves none behind
            write_profile(path, profiles)
            print(f"saved {path}", file=sys.stderr)
        except OSError as error:
            _complain(error)
            well = False
    return well


def _complain(error: Exception) -> int:
    # an OSError with a sentence of ours needs no number before it and no path after it
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    print(f"error: {text}", file=sys.stderr)
    return 1


class _Stop:
    """Set by the first signal; the handlers of before are then back, so that a second one ends the process."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.number: int | None = None


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    stop = _Stop()
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not Python's

    def handle(number: int, frame: object) -> None:
        stop.number = number
        stop.event.set()
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
