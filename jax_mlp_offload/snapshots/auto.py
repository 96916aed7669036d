"""Snapshots that a store takes by itself every few steps, and of which it keeps the newest two.

1. One is due after every n-th update: once all optimizers that take part in training have had it, or one is n updates ahead
   of the others. It is taken at the next moment with no step on its way, on the driver's thread.
2. A thread of its own writes it. If the last one is still being written, it is skipped.
3. Once it is whole, all but the newest two are removed, and what dead processes left.

What always holds: whatever goes wrong here is counted and warned of, and fails no step.
Thread contract: ``check`` on the driver's thread; the rest on any other.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import threading
import warnings

from jax_mlp_offload import errors
from jax_mlp_offload.engine import Engine
from jax_mlp_offload.instances import Instance
from jax_mlp_offload.snapshots.folder import lock, remove, remove_leftovers, unlock, whole
from jax_mlp_offload.snapshots.moment import Moment, begin, in_step
from jax_mlp_offload.snapshots.taking import Snapshots

_log = logging.getLogger("jax_mlp_offload")
KEPT = 2


class AutoSnapshots:
    """See the module's text.

    Args:
      engine: of the store.
      snapshots: of the store.
      every: updates between two of them.
      folder: where they go.
    """

    def __init__(self, engine: Engine, snapshots: Snapshots, every: int, folder: pathlib.Path) -> None:
        self._engine, self._snapshots, self._every, self._folder = engine, snapshots, every, folder
        self._updates: dict[int, int] = {}  # of each optimizer at the last one, as a multiple of ``every``
        self._loads: dict[int, int] = {}  # of each optimizer
        self._resting: set[int] = set()  # optimizers that had no update between the last two
        self._number = 0
        self._writing: threading.Thread | None = None
        self._stopping = False
        self._lock = -1  # a descriptor; the writing thread's

    def start(self) -> None:
        """Has the driver look after it."""
        self._engine.driver.call(lambda: self._engine.driver.captures.add(self), self._engine.deadline_s)

    # -- the driver's thread

    def check(self, now_s: float) -> None:
        """Takes one if it is due and no step is on its way."""
        if self._stopping or self._engine.closed or not self._due() or not self._engine.scheduler.quiescent:
            return
        try:
            self._take()
        except Exception as error:
            with self._snapshots.counts.lock:
                self._snapshots.counts.failed += 1
            self._warn(error)

    def suspended(self, duration_s: float) -> None:
        """Nothing here depends on time."""

    def _due(self) -> bool:
        instances = [i for i in self._engine.scheduler.instances.values() if i.records]
        if any(instance.error is not None or in_step(instance) for instance in instances):
            return False
        since = {instance.number: self._since(instance) for instance in instances}
        training = [updates for number, updates in since.items() if updates or number not in self._resting]
        return bool(training) and (min(training) >= self._every or max(training) >= 2 * self._every)

    def _since(self, instance: Instance) -> int:
        """Updates since the last one, a fresh start or a load."""
        known = self._updates.get(instance.number, 0)
        if instance.updates < known or instance.loads != self._loads.get(instance.number, 0):
            self._loads[instance.number] = instance.loads
            known = self._updates[instance.number] = instance.updates // self._every * self._every
        return instance.updates - known

    def _take(self) -> None:
        instances = [i for i in self._engine.scheduler.instances.values() if i.records]
        self._resting = {instance.number for instance in instances if not self._since(instance)}
        self._updates = {instance.number: instance.updates // self._every * self._every for instance in instances}
        self._number += 1
        busy = self._writing is not None and self._writing.is_alive()
        moment = None if busy else begin(self._engine)
        if moment is None:
            with self._snapshots.counts.lock:
                self._snapshots.counts.skipped += 1
        step = max(instance.updates for instance in instances)
        write = threading.Thread(
            target=self._write, args=(moment, step, self._number), name="jmo-snapshot", daemon=True
        )
        try:
            write.start()
        except RuntimeError:  # no more threads: nobody would let go
            if moment is not None:
                for capture in moment.captures.values():
                    capture.end()
            raise
        if not busy:
            self._writing = write

    # -- its own thread

    def _write(self, moment: Moment | None, step: int, number: int) -> None:
        try:
            self._write_moment(moment, step, number)
        except Exception as error:
            self._warn(error)

    def _write_moment(self, moment: Moment | None, step: int, number: int) -> None:
        together = self._snapshots.spans()
        if moment is None and not together:
            return
        peers = self._snapshots.peers("auto", number, together)

        def captured() -> Moment:
            if moment is None:
                raise errors.OffloadError("the last snapshot is still being written in this process")
            if peers.first:
                self._own()
            return moment

        if together and moment is not None:
            for capture in moment.captures.values():  # else an update may wait for a process that waits for the update
                capture.set_down()
        try:
            self._snapshots.write(captured, self._folder / f"step-{step}", peers, replaces=True)
        finally:
            if moment is not None:
                moment.close()
        if peers.first:
            for old in whole(self._folder)[KEPT:]:
                remove(old)

    def _own(self) -> None:
        """Makes sure that nobody else has his snapshots there; removes what dead processes left."""
        if self._lock >= 0:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._lock = lock(self._folder)
        except BlockingIOError as error:
            raise errors.OffloadError(
                f"snapshot_dir {str(self._folder)!r} is in use by another store; give each its own"
            ) from error
        remove_leftovers(self._folder, "step-*")

    def _warn(self, error: Exception) -> None:
        message = f"no snapshot was taken in {self._folder}: {error}"
        _log.warning(message)
        # where the user turned warnings into errors these threads have nobody to raise to, and the log has it
        with contextlib.suppress(Warning):
            warnings.warn(message, errors.SnapshotWarning, stacklevel=2)

    # -- the user's

    def wait(self, timeout_s: float) -> None:
        """Takes none any more, and waits until the last one is written, so long at most."""
        self._stopping = True
        if self._writing is not None:
            self._writing.join(timeout_s)
        if self._lock >= 0 and (self._writing is None or not self._writing.is_alive()):
            unlock(self._lock)
            self._lock = -1
