"""One training run in several processes: how one of them joins, agrees with the others, stops and leaves.

    1. `join` meets the others at the coordinator, before JAX looks for devices.
    2. `agree` makes sure that they run the same program on the same data.
    3. `Interrupt` ends all of them after the same step: a signal that one process gets is passed on by JAX's
       preemption service (SIGTERM, which a cluster sends before it takes a node away; SIGINT is turned into it).
    4. `leave` ends a process. One that failed waits only seconds for the others: where all failed alike they leave
       together, and each has said why; else they may be waiting for it in a collective, for minutes.

In a run of one process, which never joined, all of this is as if it were not there.

Threads: everything here belongs to the main thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import zlib
from types import FrameType
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.settings import Membership

TOGETHER_S = 5.0


def join(membership: Membership, cpu_devices: int | None) -> None:
    """Meets the other processes; waits up to five minutes for them.

    From here on the standard output is `sys.stdout` alone: what Gloo prints there of its connections is dropped.

    Args:
      membership: Which process this is.
      cpu_devices: How many CPU devices to make up here; None leaves it to JAX.

    Raises:
      ValueError: The cluster does not say which process this is.
      RuntimeError: The others did not come.
    """
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if membership.coordinator is not None:
        _reach_directly(membership.coordinator.rpartition(":")[0])
        jax.distributed.initialize(membership.coordinator, membership.num_processes, membership.process_id)
        return
    try:
        jax.distributed.initialize()
    except ValueError as error:
        raise ValueError(
            f"--distributed found no cluster job ({error}); start it with srun or mpirun, or give --coordinator, "
            "--num-processes and --process-id"
        ) from error


def _reach_directly(host: str) -> None:
    """Keeps gRPC from asking a proxy of the environment for the coordinator: `initialize` would hang (JAX warns of it)."""
    exceptions = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")  # noqa: SIM112 (gRPC reads these)
    os.environ["no_grpc_proxy"] = f"{exceptions},{host}" if exceptions else host  # noqa: SIM112
    jax.config.update("jax_check_proxy_envs", False)


def is_first() -> bool:
    """Whether this is the process that prints and records."""
    return jax.process_index() == 0


def agree(value: str, data: bytes, what: str) -> None:
    """Returns if all processes call it with the same value and data.

    Raises:
      ValueError: They do not; raised in every process.
    """
    if jax.process_count() == 1:
        return
    checksums = _gather(zlib.crc32(data, zlib.crc32(value.encode())))
    if len(set(checksums)) > 1:
        odd = [index for index, checksum in enumerate(checksums) if checksum != checksums[0]]
        raise ValueError(f"processes {odd} have other {what} than process 0: start all with the same")


def total(value: int) -> int:
    """The sum of a number over all processes; each must call it."""
    return value if jax.process_count() == 1 else sum(_gather(value))


def _gather(value: int) -> list[int]:
    """Every process' number, as bytes, since JAX would make 32 bits of it."""
    words = np.frombuffer(value.to_bytes(8, "little"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(words))
    return [int.from_bytes(row.tobytes(), "little") for row in rows]


class Interrupt:
    """Tells when to end the run: after the first SIGINT or SIGTERM. A context manager.

    A SIGINT after that raises `KeyboardInterrupt`; another SIGTERM changes nothing, so a save at the end is not cut
    short by it. Among several processes each is told to end before the same step.
    """

    def __init__(self) -> None:
        self._requested = False
        self._step = 0

    def __enter__(self) -> Interrupt:
        # once processes have met, SIGTERM is JAX's: it tells the others
        numbers = [signal.SIGINT] if jax.distributed.is_initialized() else [signal.SIGINT, signal.SIGTERM]
        self._previous = {number: signal.signal(number, self._request) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether to end now; every process calls it once before each step."""
        if not jax.distributed.is_initialized():
            return self._requested
        self._step += 1  # rises over all runs of the program, as JAX wants it
        return bool(multihost_utils.reached_preemption_sync_point(self._step))

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if jax.distributed.is_initialized():
            signal.raise_signal(signal.SIGTERM)


def leave(code: int, *, failed: bool) -> NoReturn:
    """Ends the process; one that failed waits for the others for `TOGETHER_S` at most.

    The coordinator lives in process 0, and when that goes JAX aborts whoever is left.
    """
    if failed and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        farewell.start()
        farewell.join(TOGETHER_S)
        os._exit(code)
    sys.exit(code)
