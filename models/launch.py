"""Starts the processes of a run on this machine and watches over them: `--processes N`.

    1. Each child is this program with `--coordinator`, on a port of the loopback interface that was free, and a
       number. Only the first one's standard output is shown; what the others have to say goes to the standard error.
    2. Ctrl-C and SIGTERM are passed on, and end all children after the same step, which they may save: they have all the
       time they want. Twice: they are killed.
    3. Once a child has failed, the others have `grace_s` to end by themselves, since they may say the cause; who does
       not, waiting in a collective perhaps, is killed. No child outlives this function.
    4. Every failure is one line, the first one first.

Threads: runs on the main thread, and reads each child's standard error on a thread of its own.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from models.settings import EXIT_FAILED, EXIT_INTERRUPTED

PROGRAM = (sys.executable, "-m", "models.pretrain")
GRACE_S = 15.0
LAST_LINES = 50
_OWN_LINE = re.compile(r"pretrain: (\w+): ")
_NATIVE_LOG = re.compile(
    r"[IWE]\d{4} |WARNING: All log messages before absl|\*\*\* |    @ |Additional GRPC error|:UNKNOWN:"
)


class Child:
    """One process of the run.

    Args:
      index: Its number.
      command: What it runs.
      environment: Its environment.
    """

    def __init__(self, index: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.index = index
        self.killed = False
        self.told_to_stop = False
        self.lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if index == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def watch(self, ended: queue.SimpleQueue[Child]) -> None:
        """Shows its standard error until it ends, but for what is no news or comes in the report anyway."""
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.lines.append(line.rstrip())
                if not (self.told_to_stop or _OWN_LINE.match(line) or _NATIVE_LOG.match(line)):
                    print(f"process {self.index}: {line}", end="", file=sys.stderr)
        self.process.wait()
        ended.put(self)

    def stop(self) -> None:
        """Tells it, once, to end after the step."""
        if not self.told_to_stop:
            self.told_to_stop = True
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it where it stands, if it has not ended."""
        if self.process.poll() is None:
            self.killed = True
            self.process.kill()

    def cause(self) -> tuple[str, str]:
        """What kind of error ended it, in the program's words, and the error: its last line, else how it ended."""
        for line in reversed(self.lines):
            if own := _OWN_LINE.match(line):
                return own[1], line[own.end() :]
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        others = [line for line in self.lines if line and not _NATIVE_LOG.match(line)]
        return "failed", how + (f": {others[-1]}" if others else "")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(arguments: Sequence[str], processes: int, *, program: Sequence[str] = PROGRAM, grace_s: float = GRACE_S) -> int:
    """Runs the program in several processes.

    Args:
      arguments: The command line without the program's name.
      processes: How many.
      program: What the arguments are for.
      grace_s: How long the others may run on after one has failed.

    Returns:
      The exit code: 0, that of the child that failed first (1 if a signal ended it), or 130 after a signal.
    """
    ended: queue.SimpleQueue[Child] = queue.SimpleQueue()
    children: list[Child] = []
    with _signals_passed_on(children) as interrupted, contextlib.ExitStack() as cleanup:
        coordinator = f"127.0.0.1:{free_port()}"
        for index in range(processes):
            if interrupted:
                break
            member = ["--coordinator", coordinator, "--num-processes", str(processes), "--process-id", str(index)]
            command = [*program, *arguments, "--processes", "1", *member]
            children.append(Child(index, command, _environment(coordinator)))
            cleanup.callback(children[-1].kill)
        for child in children:
            if interrupted:
                child.stop()  # it may have come while this one started
            threading.Thread(target=child.watch, args=(ended,), daemon=True).start()
        order = _wait(children, ended, grace_s)
    well = {0, EXIT_INTERRUPTED} | ({-signal.SIGTERM, -signal.SIGKILL} if interrupted else set())
    failed = [child for child in order if child.process.returncode not in well]
    if not failed:
        whole = len(order) == processes and not any(child.process.returncode for child in order)
        return 0 if whole else EXIT_INTERRUPTED
    _report(failed, grace_s)
    code = failed[0].process.returncode
    return code if code > 0 else EXIT_FAILED


def _wait(children: Sequence[Child], ended: queue.SimpleQueue[Child], grace_s: float) -> list[Child]:
    """Waits for all children; returns them in the order in which they ended."""
    order: list[Child] = []
    deadline: float | None = None
    while len(order) < len(children):
        try:
            order.append(ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            deadline = None
            for child in children:
                child.kill()
            continue
        bad = order[-1].process.returncode not in (0, EXIT_INTERRUPTED)
        if deadline is None and bad and not any(child.killed for child in children):
            deadline = time.monotonic() + grace_s
    return order


def _report(failed: Sequence[Child], grace_s: float) -> None:
    """One line for each, or one for all where they say the same."""
    told = not any(child.killed for child in failed)  # those that were killed say nothing of the cause
    if told and len(failed) > 1 and len({child.cause() for child in failed}) == 1:
        kind, cause = failed[0].cause()
        if failed[0].lines:  # without: the losses differ, as the table has said
            print(f"pretrain: {kind}: {cause}", file=sys.stderr)
        return
    for child in failed:
        kind, cause = child.cause()
        if child.killed:
            cause = f"killed, {grace_s:g} s after the first failure"
        print(f"pretrain: {kind}: process {child.index}: {cause}", file=sys.stderr)


@contextlib.contextmanager
def _signals_passed_on(children: Sequence[Child]) -> Iterator[list[int]]:
    """Passes SIGINT and SIGTERM on to the children; yields a list of those that came."""
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for child in children:
            if len(came) > 1:
                child.kill()
            else:
                child.stop()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _environment(coordinator: str) -> dict[str, str]:
    """Ours, with a coordinator that listens on the loopback interface only."""
    return {**os.environ, "JAX_COORDINATOR_BIND_ADDRESS": coordinator}
