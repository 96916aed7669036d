"""Snapshots of a store: the state of its optimizers at one moment, in a folder of its own.

All optimizers that have a state are captured in one call of the driver's, between two steps (``moment``), and
written (``writing``) while training goes on; ``restoring`` is the way back, ``auto`` takes one
every few steps.

Thread contract: ``take`` on the user's thread, ``write`` on any one.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jax_mlp_offload import errors
from jax_mlp_offload.binding import Binding
from jax_mlp_offload.engine import Engine
from jax_mlp_offload.peers import Peers
from jax_mlp_offload.registry import Registry
from jax_mlp_offload.snapshots.moment import Moment, begin
from jax_mlp_offload.snapshots.writing import Writing

_RETRY_S = 0.005


@dataclasses.dataclass
class Counts:
    """What a store counts of its snapshots; changed under ``lock``."""

    taken: int = 0
    skipped: int = 0
    failed: int = 0
    last: str | None = None
    seconds: float = 0.0  # of the last
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def plain(self) -> dict[str, Any]:
        """For ``Store.stats``."""
        with self.lock:
            return {name: getattr(self, name) for name in ("taken", "skipped", "failed", "last", "seconds")}


class Snapshots:
    """Takes snapshots of one store.

    Args:
      store: whose state they are of.
    """

    def __init__(self, store: Registry) -> None:
        self.counts = Counts()
        self._engine: Engine = store.engine
        self._bindings: Callable[[], list[Binding]] = store.bindings
        self._declarations = store.declarations
        self._numbers = itertools.count()

    def spans(self) -> bool:
        """Whether other processes have a part in an optimizer of the store."""
        if jax.process_count() == 1:
            return False
        meshes = [declared.given[0] for declared in self._declarations().values() if declared.given is not None]
        mine = jax.process_index()
        return any(binding.layout.spans for binding in self._bindings()) or any(
            device.process_index != mine for mesh in meshes for device in mesh.devices.flat
        )

    def peers(self, kind: str, number: int, together: bool) -> Peers:
        """A conversation about one snapshot."""
        return Peers(f"{self._engine.number}/{kind}-{number}", together)

    def next_peers(self, together: bool) -> Peers:
        """The same for calls of the user's, which come in the same order in all processes."""
        return self.peers("call", next(self._numbers), together)

    # -- the user's thread

    def take(self, path: str | os.PathLike[str], tree: Any = None) -> None:
        """See ``Store.snapshot``."""
        place = local_path(path)
        together = self.spans() or (tree is not None and jax.process_count() > 1)
        self.write(self._begin_when_possible, place, self.next_peers(together), tree)

    def _begin_when_possible(self) -> Moment:
        deadline_s = time.monotonic() + self._engine.deadline_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            moment: Moment | None = self._engine.driver.call(lambda: begin(self._engine), left_s, when_quiescent=True)
            if moment is not None:
                return moment
            if time.monotonic() > deadline_s:
                raise errors.DeadlineError(
                    f"a snapshot waited {self._engine.deadline_s:g} s for a step that has begun and never ended"
                )
            time.sleep(_RETRY_S)

    # -- any thread

    def write(
        self,
        capture: Callable[[], Moment],
        place: pathlib.Path,
        peers: Peers,
        tree: Any = None,
        replaces: bool = False,
    ) -> None:
        """Writes a snapshot.

        Args:
          capture: gives what is captured; it is closed here.
          place: where it will be.
          peers: the conversation about it.
          tree: a pytree to be saved with it; None: there is none.
          replaces: whether what is at ``place`` is replaced.

        Raises:
          FileExistsError: if there is something.
          OSError: if it cannot be written; nothing is left of it.
          errors.OffloadError: if a state or record cannot be read, or another process could not do its part.
        """
        begun_s = time.monotonic()
        try:
            writing = Writing(peers, self._bindings, place, tree, replaces)
            writing.run(capture)
        except OSError as error:
            with self.counts.lock:
                self.counts.failed += 1
            raise _explained(error, place) from error
        except BaseException:
            with self.counts.lock:
                self.counts.failed += 1
            raise
        with self.counts.lock:
            self.counts.taken += 1
            self.counts.last = str(place)
            self.counts.seconds = time.monotonic() - begun_s


def local_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """A path as it is meant, absolute.

    Raises:
      TypeError: if it is none.
      ValueError: if it is empty, or a URL.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"snapshot path {path!r} must be text or a pathlib.Path")
    if not text:
        raise ValueError("snapshot path '' is empty; give that of a folder")
    if "://" in text:
        raise ValueError(
            f"snapshot path {text!r} is a URL: a snapshot is a folder of links, on a local or parallel file system. For "
            "object stores save a checkpoint with jmo.orbax.OffloadSave"
        )
    return pathlib.Path(os.path.abspath(text))


def _explained(error: OSError, place: pathlib.Path) -> OSError:
    if isinstance(error, FileExistsError) and error.filename == str(place):
        return error
    reason = error.strerror or str(error)
    return type(error)(
        error.errno or errno.EIO,
        f"the snapshot could not be written: {reason}; nothing is left of it, and training can go on",
        str(place),
    )
