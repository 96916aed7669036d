"""Several processes of one job: JAX's distributed runtime on this machine, with CPU devices."""

from __future__ import annotations

import textwrap
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import pytest

from models.launch import free_port
from tests.processes import start_python

TIMEOUT_S = 200
GRACE_S = 10

PRELUDE = """
process, processes, devices, port, args = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
jax.config.update("jax_num_cpu_devices", devices)
os.environ["no_grpc_proxy"] = "127.0.0.1"  # gRPC would ask a proxy even here
jax.config.update("jax_check_proxy_envs", False)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + port, processes, process, heartbeat_timeout_seconds=20)

def end_at_once(*error):  # an orderly exit would wait for the others, minutes if they wait for this one
    sys.__excepthook__(*error)
    sys.stdout.flush()
    os._exit(1)

sys.excepthook = end_at_once
from tests.meshes import *
"""


def start_peers(code, *args, processes=2, devices=2):
    """Starts ``code`` in each process; it finds ``process``, ``processes``, ``devices``, ``args`` and tests.meshes."""
    port = free_port()
    code = PRELUDE + textwrap.dedent(code)
    return [start_python(code, i, processes, devices, port, *args) for i in range(processes)]


def run_peers(code, *args, **options):
    """Their outputs, once all have ended well; fails with what each of them said.

    One that fails may leave others waiting in a collective: they have ``GRACE_S`` to say why they end, too.
    """
    started = start_peers(code, *args, **options)
    with ThreadPoolExecutor(len(started)) as readers:
        reads = [readers.submit(_read, process) for process in started]
        try:
            if wait(reads, TIMEOUT_S, FIRST_EXCEPTION).not_done:
                wait(reads, GRACE_S)
            hung = [not read.done() for read in reads]
        finally:
            for process in started:
                process.kill()
    if all(read.exception() is None for read in reads):
        return [read.result() for read in reads]
    pytest.fail("\n".join(_said(*each) for each in zip(range(len(started)), started, hung, reads, strict=True)))


def end(started):
    """Kills what still runs, and closes its pipes."""
    for process in started:
        process.kill()
        process.communicate()


class PeerError(Exception):
    """A process ended badly; its arguments are all that it wrote."""


def _read(process):
    """Its output, once it has ended well; raises at its end where not, which ends the wait for the others."""
    out, err = process.communicate()
    if process.returncode != 0:
        raise PeerError(out, err)
    return out


def _said(number, process, hung, read):
    error = read.exception()
    how = "hangs" if hung else f"ended with {process.returncode}"
    return "\n".join([f"process {number} {how}:", *(error.args if error else [read.result()])])
