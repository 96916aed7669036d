"""Everything that is asked of the GPU path, by one command on a machine with a GPU: ``python -m benchmarks.gpu_check``.

1. The CUDA extension is built, if it is not there, and the tests of numbers run on the GPU.
2. Bandwidth of the link beside a plain pinned copy; step time of plain optax, of JAX's own offload to pinned host memory and
   of ours, in host memory and on disk, updated on the host and on the device, beside the least it could take; peak of device
   memory of each; how much of the copies runs under the backward pass, and where the scheduler puts them; what a blocking
   pull costs; conditionals, loops, command buffers, donation and collectives.
3. One JSON and one table, with a verdict beside each target. The exit code is 1 if a target is missed or a part failed.

Each part runs in a process of its own, so that peaks do not mix and one that fails takes no other with it; the JSON is
written anew after each. ``--platform cpu`` rehearses all that runs without a GPU, over an emulated link: its times mean
nothing, no target of time or memory is judged, and what needs a GPU is said to be not measured.
Thread contract: the main thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.gpu import build, targets
from benchmarks.gpu.parts import FAILED, PARTS, run, run_here
from benchmarks.gpu.settings import Settings
from models import transformer

_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"params": 300e6, "steps": 10, "batch": 8, "seq": 512},
    "cpu": {"params": 2e5, "steps": 3, "batch": 2, "seq": 16},
}
_REHEARSED = pathlib.Path("runs/gpu_check_rehearsal.json")
_REHEARSED_SUBGROUPS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.part is not None:
        return run_here(args.part, Settings.from_json(args.settings), pathlib.Path(args.json))
    settings = _settings(args)
    try:
        outcomes = _earlier(args.json, settings) if args.add else {}
    except (OSError, ValueError) as error:
        print(f"gpu_check: error: --add: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as programs:
        for name in args.only or PARTS:
            outcomes.pop(name, None)
            outcomes[name] = run(name, settings, args.timeout, programs)
            print(f"{name}: {_told(outcomes[name])}", flush=True)
            _write(args.json, settings, outcomes)
    rows = targets.rows(outcomes, settings)
    passed = _passed(outcomes, rows)
    _print(settings, rows)
    judged = sum(row.passed is not None for row in rows)
    word = ("passed" if settings.on_gpu else "rehearsed") if passed else "FAILED"
    print(f"written: {args.json}\n{word}; {judged} targets were judged")
    return 0 if passed else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    add = parser.add_argument
    add("--platform", choices=_DEFAULTS, default="cuda", help="cpu: a rehearsal")
    add("--params", type=float, default=None, help="elements of the model (300e6; in a rehearsal 2e5)")
    add("--steps", type=int, default=None, help="counted steps (10; 3)")
    add("--batch", type=int, default=None, help="sequences a step (8; 2)")
    add("--seq", type=int, default=None, help="tokens a sequence (512; 16)")
    add("--subgroup-elements", type=int, default=None, help="of the store (automatic; an eighth of the params)")
    add("--tier", default=None, help="directory for state on disk; a folder in it is used, and removed")
    add("--only", nargs="+", choices=PARTS, default=None, metavar="PART", help=f"of {', '.join(PARTS)}")
    add(
        "--add",
        action="store_true",
        help="keep other parts' figures that the JSON has, of the same commit and settings",
    )
    add("--timeout", type=float, default=1800.0, help="seconds after which a part is ended")
    add("--json", default=None, help="where the figures go")
    add("--part", choices=PARTS, default=None, help=argparse.SUPPRESS)  # what this program starts itself with
    add("--settings", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for name, value in _DEFAULTS[args.platform].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give a positive number")
    if args.json is None:
        args.json = str(report.RESULTS / "gpu_check.json" if args.platform == "cuda" else _REHEARSED)
    if args.part is None:
        try:
            _settings(args).config()
        except ValueError as error:
            parser.error(str(error))
    return args


def _settings(args: argparse.Namespace) -> Settings:
    subgroup = args.subgroup_elements
    if subgroup is None and args.platform == "cpu":
        subgroup = max(4096, int(args.params) // _REHEARSED_SUBGROUPS)
    return Settings(args.platform, int(args.params), args.steps, args.batch, args.seq, subgroup, args.tier)


def _shown(settings: Settings) -> dict[str, Any]:
    """Settings, without a path of the machine."""
    return {name: value for name, value in dataclasses.asdict(settings).items() if name != "tier"}


def _earlier(path: str, settings: Settings) -> dict[str, dict[str, Any]]:
    """Outcomes of parts that an earlier run left.

    Raises:
      OSError: if there is none.
      ValueError: if that had another commit, other settings or another machine.
    """
    content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    for name, now in (
        ("settings", _shown(settings)),
        ("commit", report.git_commit()),
        ("machine", report.machine()),
        ("versions", report.versions()),
    ):
        if content[name] != now:
            raise ValueError(f"{path} has {name} {content[name]}, this run {now}; leave --add out, or give --json")
    outcomes: dict[str, dict[str, Any]] = content["figures"]["parts"]
    return outcomes


def _told(outcome: dict[str, Any]) -> str:
    reason = f": {str(outcome['reason']).strip().splitlines()[-1]}" if "reason" in outcome else ""
    return f"{outcome['state']} ({outcome['seconds']:.1f} s){reason}"


def _passed(outcomes: dict[str, dict[str, Any]], rows: Sequence[targets.Row]) -> bool:
    failed = any(outcome["state"] == FAILED for outcome in outcomes.values())
    return not failed and all(row.passed is not False for row in rows)


def _write(path: str, settings: Settings, outcomes: dict[str, dict[str, Any]]) -> None:
    rows = targets.rows(outcomes, settings)
    config = settings.config()
    figures = {
        "rehearsal": not settings.on_gpu,
        "gpus": build.gpus(),
        "cuda": build.software(),
        "model": {name: getattr(config, name) for name in ("dim", "layers", "heads", "hidden", "vocab")}
        | {"params": transformer.count_params(config)},
        "parts": outcomes,
        "targets": [dataclasses.asdict(row) for row in rows],
        "whole": outcomes.keys() == PARTS.keys(),
        "passed": _passed(outcomes, rows),
    }
    report.write_json(path, "gpu_check", _shown(settings), figures)


def _print(settings: Settings, rows: Sequence[targets.Row]) -> None:
    verdicts = {True: "passed", False: "MISSED", None: ""}
    what = "on the GPU" if settings.on_gpu else "rehearsed on the CPU: times mean nothing"
    report.print_table(
        f"{settings.params / 1e6:g}M params, {what}",
        ["", "measured", "target", ""],
        [[row.name, row.measured, row.target, verdicts[row.passed]] for row in rows],
    )


if __name__ == "__main__":
    raise SystemExit(main())
