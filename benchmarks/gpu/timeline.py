"""What a GPU did and when, from a trace of JAX's profiler (``plugins/profile/*/*.trace.json.gz``, Chrome's trace events).

A GPU is a process named ``/device:GPU:n``, each of its streams a thread named ``Stream #k(Compute,MemcpyD2H,…)``; other
threads of that process repeat the same time by module or op, and are left out. A copy is named ``MemcpyD2H`` or has
``memcpy_details``; what else has a duration is a kernel. XLA's own kernels carry ``hlo_module`` or ``hlo_op``: a stream
with one of those is XLA's, and kernels on any other are the fused update's. Times in seconds. Pure, but for ``traced`` and
``read``, which are for the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks.gpu.settings import NotMeasured

TO_HOST, TO_DEVICE, ON_DEVICE, KERNEL, OTHER = "to_host", "to_device", "on_device", "kernel", "other"
_COPIES = {"MemcpyD2H": TO_HOST, "MemcpyH2D": TO_DEVICE, "MemcpyD2D": ON_DEVICE, "MemcpyP2P": ON_DEVICE}
_ON_HOST = ("pinned", "pageable")
Spans = list[tuple[float, float]]  # begin and end in seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something on a stream."""

    kind: str
    stream: int
    begin_s: float
    end_s: float
    size_bytes: int  # of a copy, where it is told
    of_xla: bool


@contextlib.contextmanager
def traced() -> Iterator[dict[str, Any]]:
    """Traces what runs in it; the dict is empty until its end, and then the trace. Whoever uses it waits for the devices."""
    found: dict[str, Any] = {}
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # what Python does would fill the trace
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield found
        found.update(read(pathlib.Path(folder)))


def read(folder: pathlib.Path) -> dict[str, Any]:
    """The newest trace below the folder that was given to ``jax.profiler.trace``.

    Raises:
      FileNotFoundError: if there is none.
    """
    files = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    files = [file for file in files if not file.name.startswith("perfetto")]
    if not files:
        raise FileNotFoundError(f"the profiler left no *.trace.json.gz below {folder}")
    with gzip.open(files[-1], "rt", encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def events(trace: Mapping[str, Any], device: int = 0) -> list[Event]:
    """All that one GPU's streams did, in order of time.

    Raises:
      NotMeasured: if the trace has no stream of that GPU.
    """
    raw = [event for event in trace["traceEvents"] if "ph" in event]  # the last one is empty
    names = {
        (event["name"], event["pid"], event.get("tid")): str(event["args"]["name"])
        for event in raw
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name")
    }
    gpus = {pid for (kind, pid, _), name in names.items() if kind == "process_name" and _is_gpu(name, device)}
    streams = {
        (pid, tid)
        for (kind, pid, tid), name in names.items()
        if kind == "thread_name" and pid in gpus and name.startswith("Stream #")
    }
    found = [event for event in raw if event["ph"] == "X" and (event["pid"], event.get("tid")) in streams]
    if not found:
        raise NotMeasured(f"the trace has no stream of GPU {device}")
    of_xla = {event["tid"] for event in found if {"hlo_module", "hlo_op"} & event.get("args", {}).keys()}
    return sorted((_event(event, event["tid"] in of_xla) for event in found), key=lambda event: event.begin_s)


def overlap(found: Sequence[Event]) -> dict[str, Any]:
    """How much of the copies, and of the fused update's kernels, ran while XLA computed.

    Returns:
      For each of ``to_host``, ``to_device`` and ``update`` the seconds, bytes (of copies) and overlapped part, None where
      there was nothing; ``compute_s``; ``window_s`` from the first event to the last; ``idle_share`` of it in which nothing
      at all ran.
    """
    compute = union((event.begin_s, event.end_s) for event in found if event.kind == KERNEL and event.of_xla)
    everything = union((event.begin_s, event.end_s) for event in found)
    window_s = everything[-1][1] - everything[0][0]
    figures: dict[str, Any] = {
        "compute_s": length(compute),
        "window_s": window_s,
        "idle_share": 1 - length(everything) / window_s if window_s > 0 else None,
    }
    for name, chosen in (
        (TO_HOST, [event for event in found if event.kind == TO_HOST]),
        (TO_DEVICE, [event for event in found if event.kind == TO_DEVICE]),
        ("update", [event for event in found if event.kind == KERNEL and not event.of_xla]),
    ):
        spans = union((event.begin_s, event.end_s) for event in chosen)
        whole_s = length(spans)
        figures[name] = {
            "events": len(chosen),
            "bytes": sum(event.size_bytes for event in chosen),
            "seconds": whole_s,
            "overlapped": length(intersection(spans, compute)) / whole_s if whole_s > 0 else None,
        }
    return figures


def graph_launches(trace: Mapping[str, Any]) -> int:
    """How many times the host launched a CUDA graph, which is what XLA makes of a command buffer."""
    return sum(event.get("ph") == "X" and event["name"].startswith("cuGraphLaunch") for event in trace["traceEvents"])


def _is_gpu(name: str, device: int) -> bool:
    return re.fullmatch(rf"/device:GPU:{device}\b.*", name) is not None


def _event(event: Mapping[str, Any], of_xla: bool) -> Event:
    args = event.get("args", {})
    details = str(args.get("memcpy_details", ""))
    size = re.search(r"\bsize:(\d+)", details)
    begin_s = float(event["ts"]) / 1e6
    return Event(
        _kind(str(event["name"]), details),
        event["tid"],
        begin_s,
        begin_s + float(event.get("dur", 0.0)) / 1e6,
        int(size[1]) if size else 0,
        of_xla,
    )


def _kind(name: str, details: str) -> str:
    for prefix, kind in _COPIES.items():
        if name.startswith(prefix):
            return kind
    if details:  # a copy by another name, such as a graph's
        memory = dict(re.findall(r"\b(kind_src|kind_dst):(\w+)", details))
        if memory.get("kind_dst") in _ON_HOST:
            return TO_HOST
        return TO_DEVICE if memory.get("kind_src") in _ON_HOST else ON_DEVICE
    return OTHER if name.lower().startswith(("memset", "memcpy")) else KERNEL


# -- spans of time


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same time, without overlaps and in order; empty spans are left out."""
    joined: Spans = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def intersection(first: Spans, second: Spans) -> Spans:
    """The time that is in both; each is a ``union``."""
    common: Spans = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(spans: Spans) -> float:
    """Seconds of a ``union``."""
    return sum(end - begin for begin, end in spans)
