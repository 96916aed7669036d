"""What the benchmarks share: facts of the machine and the software, one JSON a run, tables, and this process's memory.

No host names and no paths of the machine go into a JSON. Linux only, as the package. Thread contract: any thread.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "torch", "deepspeed", "jax_mlp_offload")
_WIDTH = 130


# -- where and with what


def machine() -> dict[str, Any]:
    """CPU model, usable cores, memory in bytes, kernel."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "kernel": platform.release(),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None for those that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit() -> str | None:
    """The commit of this checkout, with ``+changes`` where tracked files differ; None outside of one."""
    if shutil.which("git") is None:
        return None
    root = pathlib.Path(__file__).parents[1]
    head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        return None
    changed = subprocess.run(["git", "-C", root, "diff", "--quiet", "HEAD", "--", ":!benchmarks/results"], check=False)
    return head.stdout.strip() + ("+changes" if changed.returncode else "")


def write_json(path: str | os.PathLike[str], benchmark: str, settings: Mapping[str, Any], figures: Any) -> None:
    """Writes one run: settings, versions, machine, commit, time and figures."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": benchmark,
        "settings": dict(settings),
        "versions": versions(),
        "machine": machine(),
        "commit": git_commit(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "figures": figures,
    }
    target.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# -- tables


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; the first column is text, the others are figures."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


# -- memory of this process


def resident_bytes() -> tuple[int, int]:
    """Resident memory now, and the most since the start or the last ``reset_peak``."""
    status = pathlib.Path("/proc/self/status").read_text()
    sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB$", status, re.MULTILINE))
    return int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024


def reset_peak() -> None:
    """Lets the peak of ``resident_bytes`` begin anew."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def thread_cpu_s(thread_id: int) -> float:
    """CPU seconds that a thread of this process (by native id) has used."""
    text = pathlib.Path(f"/proc/self/task/{thread_id}/schedstat").read_text()
    return int(text.split()[0]) / 1e9
