"""Writing a snapshot, in one process or in several.

1. Records in slots, and those on tiers without files, are copied first, each let go as soon as it is read, so that updates
   wait no longer than that. Records in files are linked, or copied where the snapshot is on another file system.
2. Each process says what it has written (``manifest``), and makes all of it durable.
3. Process 0 says that the snapshot is whole, and puts it in its place (``folder``).

What always holds: each part begins once all processes have done the one before; one that fails leaves nothing behind.
Thread contract: an object is one thread's, which has records copied by threads of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jax_mlp_offload import errors, native
from jax_mlp_offload.binding import Binding
from jax_mlp_offload.capture import Capture, Key
from jax_mlp_offload.division import Division
from jax_mlp_offload.peers import Peers
from jax_mlp_offload.positions import find
from jax_mlp_offload.registry import identity_of
from jax_mlp_offload.snapshots.folder import NewFolder, make_durable
from jax_mlp_offload.snapshots.manifest import (
    TREE,
    Bucket,
    Optimizer,
    State,
    optimizer_folder,
    process_folder,
    record_name,
    write_process,
    write_snapshot,
)
from jax_mlp_offload.snapshots.moment import Moment

_THREADS = 2  # that copy records: one alone does not keep a disk busy
_Rows = dict[tuple[int, int], list[int | None]]
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)


class Writing:
    """One snapshot on its way into its place.

    Args:
      peers: the conversation about it.
      bindings: gives the optimizers of the store.
      place: where it will be.
      tree: a pytree to be saved with it; None: there is none.
      replaces: whether what is at ``place`` is replaced.
    """

    def __init__(
        self, peers: Peers, bindings: Callable[[], list[Binding]], place: pathlib.Path, tree: Any, replaces: bool
    ) -> None:
        self._peers, self._bindings, self._place, self._tree, self._replaces = peers, bindings, place, tree, replaces
        self._new: NewFolder | None = None
        self._moment: Moment | None = None
        self._numbers: dict[str, int] = {}  # of the optimizers, by identity
        self._divisions: dict[int, Division] = {}
        self._states: list[State] | None = None
        self._linked = False  # whether records have links that stay

    def run(self, capture: Callable[[], Moment]) -> None:
        """Does it all; each part begins once all processes have done the one before."""
        try:
            told = self._together(lambda: self._prepare(capture))
            if any(each["tickets"] != told[0]["tickets"] for each in told):
                raise errors.OffloadError(
                    "the processes are not at the same step; call snapshot in all of them after the same step"
                )
            self._path = self._place.parent / next(each["folder"] for each in told if each["folder"] is not None)
            crcs = self._together(self._write_records)
            if self._tree is not None:
                self._together(self._write_tree)
            self._together(lambda: make_durable(self._path))
            self._together(lambda: self._commit(dict(zip(self._peers.indices, crcs, strict=True))))
        finally:
            if self._new is not None:
                self._new.close()
            if self._moment is not None:
                self._moment.close()

    def _together(self, do: Callable[[], Any]) -> list[Any]:
        try:
            value = do()
        except BaseException as error:
            return self._peers.tell(None, error)
        return self._peers.tell(value)

    # -- what it is of

    def _prepare(self, capture: Callable[[], Moment]) -> dict[str, Any]:
        if self._place.exists() and not self._replaces:
            raise FileExistsError(errno.EEXIST, "there is something; give a path that is not there", str(self._place))
        self._moment = capture()
        bindings = {binding.number: binding for binding in self._bindings()}
        wanted = self._wanted(bindings)
        for number in sorted(self._moment.captures, key=lambda n: (n in wanted, self._moment_order(n))):
            self._numbers[identity_of(bindings[number].key)] = number  # of several on other meshes, the last one used
        for number in self._numbers.values():
            self._divisions[number] = bindings[number].division()
        if self._peers.first:
            self._new = NewFolder(self._place)
        spanning = {
            identity: self._moment.tickets[number]
            for identity, number in self._numbers.items()
            if bindings[number].layout.spans
        }
        return {"tickets": spanning, "folder": self._new and self._new.path.name}

    def _moment_order(self, number: int) -> int:
        assert self._moment is not None
        return self._moment.orders[number]

    def _wanted(self, bindings: Mapping[int, Binding]) -> set[int]:
        """The optimizers that the tree's states are of; notes the states."""
        if self._tree is None:
            return set()
        assert self._moment is not None
        by_ticket = {ticket: number for number, ticket in self._moment.tickets.items()}
        self._states = []
        for position in find(self._tree):
            ticket = int(np.asarray(position.state.ticket)[0])
            if ticket and ticket not in by_ticket:
                known = ", ".join(f"{bindings[n].name!r}: {ticket}" for n, ticket in self._moment.tickets.items())
                raise errors.StaleTicketError(
                    f"the state at {'/'.join(position.keys) or 'the root'} of the tree has ticket {ticket}, which is not "
                    f"the last one of an optimizer of this store ({known}); give the tree that the last update returned"
                )
            identity = identity_of(bindings[by_ticket[ticket]].key) if ticket else None
            self._states.append(State(position.keys, identity, ticket))
        return {by_ticket[state.ticket] for state in self._states if state.ticket}

    # -- what is written

    def _write_records(self) -> int:
        moment, process = self._moment, self._peers.index
        assert moment is not None
        bindings = {binding.number: binding for binding in self._bindings()}
        process_folder(self._path, process).mkdir(mode=0o700)
        rows: list[_Rows] = []
        for index, number in enumerate(self._numbers.values()):
            optimizer_folder(self._path, process, index).mkdir(mode=0o700)
            plan, devices = bindings[number].plan, bindings[number].layout.devices
            rows.append(
                {(b, d): [None] * len(bucket.subgroups) for d in devices for b, bucket in enumerate(plan.buckets)}
            )
        numbers = list(enumerate(self._numbers.values()))
        held = {
            number: [key for key in moment.held[number] if key in moment.captures[number].held] for _, number in numbers
        }
        jobs = [(index, number, key) for index, number in numbers for key in held[number]]
        jobs += [(index, number, key) for index, number in numbers for key in sorted(moment.captures[number].linked)]
        failed = threading.Event()

        def work(part: Sequence[tuple[int, int, Key]]) -> None:
            buffer = np.empty(0, np.uint8)
            for index, number, key in part:
                if failed.is_set():
                    return
                size = bindings[number].plan.buckets[key.bucket].record_bytes
                buffer = buffer if buffer.size == size else native.aligned(size)
                path = optimizer_folder(self._path, process, index) / record_name(*key)
                try:
                    crc = self._write_record(moment.captures[number], key, path, buffer)
                except BaseException:
                    failed.set()
                    raise
                rows[index][key.bucket, key.device][key.subgroup] = crc

        with ThreadPoolExecutor(_THREADS, "jmo-snapshot-records") as threads:
            list(threads.map(work, [jobs[i::_THREADS] for i in range(_THREADS)]))
        moment.close(self._linked)
        optimizers = [
            self._describe(bindings[number], number, row)
            for number, row in zip(self._numbers.values(), rows, strict=True)
        ]
        return write_process(self._path, process, optimizers)

    def _write_record(self, capture: Capture, key: Key, path: pathlib.Path, buffer: np.ndarray[Any, Any]) -> int:
        """Links a record, or copies it by way of a buffer of its size; returns its CRC32C."""
        linked = capture.linked.get(key)
        if linked is not None:
            try:
                os.link(linked.path, path)
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
            else:
                self._linked = True
                return linked.crc
        capture.read(key, buffer)
        capture.let_go([key])
        return int(native.write_file(str(path), buffer, True))

    def _describe(
        self, binding: Binding, number: int, records: Mapping[tuple[int, int], Sequence[int | None]]
    ) -> Optimizer:
        assert self._moment is not None
        division = self._divisions[number]
        says = self._peers.first or not binding.layout.spans
        return Optimizer(
            identity_of(binding.key),
            binding.name,
            binding.rule.kind,
            self._moment.counts[number],
            self._moment.tickets[number],
            binding.layout.spans,
            tuple((leaf.path, shape, leaf.dtype) for leaf, shape in zip(binding.leaves, binding.shapes, strict=True)),
            division.parts,
            division.holders if says else None,
            tuple(Bucket.of(binding, bucket) for bucket in range(len(binding.plan.buckets))),
            records,
        )

    def _write_tree(self) -> None:
        import orbax.checkpoint as ocp  # takes a second, and only trees need it

        with contextlib.closing(ocp.Checkpointer(ocp.StandardCheckpointHandler())) as checkpointer:
            checkpointer.save(self._path / TREE, args=ocp.args.StandardSave(self._tree))

    def _commit(self, crcs: Mapping[int, int]) -> None:
        if self._new is None:
            return
        assert self._moment is not None
        step = max((self._moment.counts[number] for number in self._numbers.values()), default=0)
        write_snapshot(self._path, step, self._states, crcs)
        self._new.commit(self._replaces)
