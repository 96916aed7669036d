"""``Store``: the memory and the tiers that optimizers keep their state in."""

from __future__ import annotations

import atexit
import contextlib
import os
from types import TracebackType
from typing import Any

import jax

from jax_mlp_offload import errors
from jax_mlp_offload.engine import Engine
from jax_mlp_offload.exclusive import Access
from jax_mlp_offload.profile import ProfileLike
from jax_mlp_offload.registry import Registry
from jax_mlp_offload.sizes import parse_bytes
from jax_mlp_offload.snapshots.auto import AutoSnapshots
from jax_mlp_offload.snapshots.restoring import restore
from jax_mlp_offload.snapshots.taking import Snapshots, local_path
from jax_mlp_offload.stats import collect
from jax_mlp_offload.tiers import TierLike, as_tiers
from jax_mlp_offload.types import Order
from jax_mlp_offload.update_on import UpdateOn

_MOST_THREADS = 1024
_engines: set[Engine] = set()  # that are open, also where the store was dropped without close


class Store(Registry):
    """Host memory and tiers for optimizer states, and the engine that moves them.

    Args:
      *tiers: directories (paths or :class:`File`) and key-value stores (URLs or :class:`Remote`); none: everything stays
        in host memory.
      host_memory: bytes for state kept in memory, over all devices of this process: a number, or text such as
        ``"16GiB"``. None: as much as the state needs without tiers; the least that runs well with tiers.
      subgroup_elements: elements of one subgroup, the unit of transfer; None: chosen from the sizes.
      order: ``"resident-first"`` (each step reads and writes only what did not fit), or for comparison
        ``"sequential"`` and ``"alternating"``.
      exclusive: whether processes of this node that share a storage device take turns on it, each way apart: True,
        False, or ``"auto"``: where it was measured to pay. ``stats`` says what was chosen and why.
      versions: 1; how many versions of the state are kept.
      profile: what ``python -m jax_mlp_offload probe`` measured: the path of its JSON, or its content. None: each tier's
        own ``tiers.json``, if there is one; else a short probe runs in the background of the first step.
      kernel_threads: threads of the fused update; None: one a core.
      deadline_s: how long storage may take for one record before its updates fail, in seconds.
      update_on: where updates run whose params are on a GPU: ``"host"`` (the host's kernels; gradients and params come to
        them), ``"device"`` (a kernel of the GPU's, which reads and writes the state in pinned host memory), or ``"auto"``:
        what measured bandwidths of link and kernel make faster. The bits are the same.
      snapshot_every: updates between two snapshots that the store takes by itself, beside training; the newest two are
        kept. They hold no params: they are for going on after a failed update with the params that are alive. With n the
        moments are then up to n steps old; remainders of bfloat16 params that no longer match are dropped, with the usual
        warning. 1 is exact. One that is due while the last is still being written is skipped, and ``stats`` counts it. (A
        new process needs params of the same step.)
      snapshot_dir: the folder of these snapshots, ``step-<updates>`` each, of this store alone.

    Raises:
      ValueError: if an argument makes no sense; the message names it and the remedy.
      OSError: if a tier cannot be used; names its path.

    A context manager. Programs that were traced with a store raise an error by name after it was closed.
    """

    def __init__(
        self,
        *tiers: TierLike,
        host_memory: int | str | None = None,
        subgroup_elements: int | None = None,
        order: str = "resident-first",
        exclusive: str | bool = "auto",
        versions: int = 1,
        profile: ProfileLike | None = None,
        kernel_threads: int | None = None,
        deadline_s: float = 600.0,
        update_on: str = "auto",
        snapshot_every: int | None = None,
        snapshot_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        files = as_tiers(tiers)
        host_bytes = None if host_memory is None else parse_bytes(host_memory, "host_memory")
        if host_bytes == 0:
            raise ValueError(
                f"host_memory={host_memory!r}: at least two records a device have to fit; give more, or None"
            )
        if (snapshot_every is None) != (snapshot_dir is None):
            raise ValueError(
                f"snapshot_every={snapshot_every!r} and snapshot_dir={snapshot_dir!r}: give both, or neither"
            )
        snapshots_to = None if snapshot_dir is None else local_path(snapshot_dir)
        for name, value in (
            ("subgroup_elements", subgroup_elements),
            ("kernel_threads", kernel_threads),
            ("snapshot_every", snapshot_every),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if kernel_threads is not None and kernel_threads > _MOST_THREADS:
            raise ValueError(f"kernel_threads={kernel_threads} is more than {_MOST_THREADS}; one a core is enough")
        orders = [kind.value for kind in Order]
        if order not in orders:
            raise ValueError(f"order={order!r} is unknown; use one of {', '.join(orders)}")
        if versions != 1:
            raise ValueError(f"versions={versions!r}: this version keeps one version of the state; use versions=1")
        places = [place.value for place in UpdateOn]
        if update_on not in places:
            raise ValueError(f"update_on={update_on!r} is unknown; use one of {', '.join(places)}")
        access = Access.of(exclusive)
        if not isinstance(deadline_s, (int, float)) or not 0 < deadline_s <= 1e8:
            raise ValueError(f"deadline_s={deadline_s!r} must be a positive number of seconds, 1e8 at most")
        super().__init__(
            Engine(
                files,
                host_bytes,
                subgroup_elements,
                Order(order),
                kernel_threads,
                deadline_s,
                access,
                profile,
                UpdateOn(update_on),
            )
        )
        self._snapshots = Snapshots(self)
        if snapshot_every is not None and snapshots_to is not None:
            AutoSnapshots(self._engine, self._snapshots, snapshot_every, snapshots_to).start()
        _engines.add(self._engine)
        # hooks run last in, first out: ours has to come before those of what the tiers have imported
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    # -- for users

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until every update that XLA has begun and all transfers have ended.

        Steps that this thread has dispatched are waited for; those of another thread only once XLA has begun them.

        Raises:
          OffloadError: the first cause, if an optimizer's update failed.
          DeadlineError: if it takes longer than ``timeout_s`` (None: the store's deadline).
        """
        self._check_open()
        _await_dispatched()
        self._engine.flush(self._engine.deadline_s if timeout_s is None else timeout_s)

    def stats(self) -> dict[str, Any]:
        """Counts so far, as a plain dict.

        Returns:
          ``steps`` (updates of all optimizers), ``hits`` and ``misses`` (records found in memory, or read from a tier) and
          ``hit_rate``, ``bytes_read`` and ``bytes_written`` (of all tiers), ``skipped_steps``, ``adopted_steps``,
          ``records``, ``record_bytes_total``, ``slots``, ``slot_bytes`` and ``host_bytes`` (bytes), ``optimizers`` by name
          (``steps``, ``skipped_steps``, ``adopted_steps``, and ``failed``: the first cause, or None), ``snapshots``,
          ``devices`` (GPUs) and ``tiers``, a dict each.

          Of a GPU: ``ordinal``, ``update_on`` (what was chosen), ``bytes_to_host`` and ``bytes_to_device`` (gradients,
          params and results), ``to_host_busy_s``, ``to_device_busy_s`` and ``on_device_busy_s`` (seconds with any such
          copy, or update of its own, under way).

          ``snapshots`` has ``taken``, ``skipped`` (the one before was still being written), ``failed``, ``last`` (path) and
          ``seconds`` (of the last). Of a tier:

          * ``name``, ``device`` (tiers of one device share its bandwidth), ``retired``, ``retries`` (and of a key-value
            store ``requests``, ``timeouts``, ``retry_wait_s``, ``deletes_failed``);
          * ``bytes_read``, ``bytes_written``, ``reads``, ``writes``, ``read_share`` and ``share`` (of the bytes written),
            ``bytes_read_per_step`` and ``bytes_written_per_step`` (in the last whole step; ``mean_...`` over all);
          * ``read_bps`` and ``write_bps`` (bytes/s while busy, for ``read_busy_s`` and ``write_busy_s``),
            ``estimated_read_bps`` and ``estimated_write_bps`` (what shares are made from), ``read_queue_s`` and
            ``write_queue_s`` (mean seconds a request waited to begin);
          * ``stored_bytes``, ``held_bytes`` (files, those to be written over included), ``capacity_bytes``, ``free_bytes``;
          * ``endurance`` where the tier has a rating: ``rated_bytes``, ``written_bytes``, ``used`` (part of the rating),
            ``left_at_this_rate_s``; ``exclusive`` of a directory: ``on`` and ``why``, turns taken and waited for.

        Raises:
          OffloadError: if the engine has failed, or the store is closed.
        """
        self._check_open()
        found: dict[str, Any] = self._engine.driver.call(lambda: collect(self._engine), self._engine.deadline_s)
        return found | {"snapshots": self._snapshots.counts.plain()}

    def snapshot(self, path: str | os.PathLike[str], tree: Any = None) -> None:
        """Takes a snapshot: every optimizer's state as it is after the last step that this thread has dispatched.

        Records in files on the snapshot's file system are linked, so that they take neither time nor space until their next
        update goes to a new file; what is in memory or elsewhere is copied. The snapshot is there whole or not at all.
        Where a mesh spans processes, all of them have to call this, with a path that all can reach.

        Args:
          path: of a new folder.
          tree: the pytree of the training loop (params, step and offloaded states, as the last update returned them),
            saved with it so that it is all that a restart needs; None: the states alone.

        Raises:
          FileExistsError: if there is something at ``path``.
          OSError: if it cannot be written; nothing is left of it, and training can go on.
          ValueError: if ``path`` is a URL, or how a state is divided cannot be told.
          StaleTicketError: if a state in ``tree`` is not its optimizer's last one.
          OffloadError: if an optimizer's last update failed, or a record cannot be read.
        """
        self._check_open()
        _await_dispatched()
        self._snapshots.take(path, tree)

    def restore_snapshot(self, path: str | os.PathLike[str], tree: Any = None) -> Any:
        """Puts a snapshot's states in the place of the optimizers' own, which are lost.

        The snapshot may have been taken in another process, with other tiers, memory and subgroups, or on another mesh.
        ``init`` of each of its optimizers has to be called before with this store, on arrays or under ``jax.eval_shape``.
        Where a mesh spans processes, all of them have to call this.

        Args:
          path: of a snapshot, or of a ``snapshot_dir``, of which the newest one is taken.
          tree: arrays or ShapeDtypeStructs with shardings, in the place of what was saved. Of a snapshot without a tree:
            one in which the new states are put, whose other leaves stay as they are.

        Returns:
          The tree, its offloaded states those that were restored; without one a dict of an ``OffloadState`` for each
          optimizer of the snapshot, by its name in ``stats()["optimizers"]``.

        Raises:
          CheckpointError: if the snapshot is incomplete, damaged or of something else; nothing is changed then.
          CorruptRecordError: if a record of it is damaged; its optimizer can then start afresh, or be restored again.
          OffloadError: if the state cannot be stored.
        """
        self._check_open()
        _await_dispatched()
        return restore(self, self._snapshots, path, tree)

    def close(self) -> None:
        """Waits for what is dispatched and in flight, frees memory and removes what is stored in the tiers. Idempotent.

        Raises:
          OffloadError: the first cause, if an optimizer's update failed; the store is closed all the same.
        """
        _close(self._engine)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_quietly()  # the error under way says more than ours would

    def __repr__(self) -> str:
        tiers = ", ".join(repr(backend.name) for backend in self._engine.backends)
        return f"Store({tiers}{'; closed' if self._engine.closed else ''})"

    def _close_quietly(self) -> None:
        with contextlib.suppress(errors.OffloadError):  # whoever calls this has an error of his own to raise
            self.close()


def _await_dispatched() -> None:
    """Waits for the steps that this thread has dispatched: they need the store until they are done."""
    # a step that failed says so in its own results, and the engine knows the cause
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()


def _close(engine: Engine) -> None:
    if engine.closed:
        return
    try:
        _await_dispatched()
        engine.flush(engine.deadline_s)
    finally:
        _engines.discard(engine)
        engine.close()


def _close_all() -> None:
    for engine in list(_engines):
        with contextlib.suppress(errors.OffloadError):  # the process ends; steps have raised it
            _close(engine)


def _after_fork_in_child() -> None:
    """A child has no threads of its parent's engines and must not touch their tiers."""
    for engine in _engines:
        engine.forked()
    _engines.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
