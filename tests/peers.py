"""Several processes of one job: JAX's distributed runtime on this machine, with CPU devices."""

from __future__ import annotations

import socket
import textwrap

from tests.processes import finish, start_python

PRELUDE = """
process, processes, devices, port, args = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
jax.config.update("jax_num_cpu_devices", devices)
os.environ["no_grpc_proxy"] = "127.0.0.1"  # gRPC would ask a proxy even here
jax.config.update("jax_check_proxy_envs", False)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + port, processes, process, heartbeat_timeout_seconds=20)
from tests.meshes import *
"""


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start_peers(code, *args, processes=2, devices=2):
    """Starts ``code`` in each process; it finds ``process``, ``processes``, ``devices``, ``args`` and tests.meshes."""
    port = free_port()
    code = PRELUDE + textwrap.dedent(code)
    return [start_python(code, i, processes, devices, port, *args) for i in range(processes)]


def run_peers(code, *args, **options):
    """Their outputs, once all have ended well."""
    started = start_peers(code, *args, **options)
    try:
        return [finish(process) for process in started]
    finally:
        end(started)


def end(started):
    """Kills what still runs, and closes its pipes."""
    for process in started:
        process.kill()
        process.communicate()
