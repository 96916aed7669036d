"""Real object stores on loopback for the tests, and a proxy in front of them that fails as networks and servers do."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from jax_mlp_offload.backends import Place, make_backend

BUCKET = "jmo-bucket"
S3_SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAZZTESTTESTTEST01", "AWS_SECRET_ACCESS_KEY": "sEcReT/of+the.tests=0123456789"}
START_S = 30.0
PAGE = 4096
RECORD = 8 * PAGE
SLOTS = 4
CHUNKS = "/c/"  # in the path of every object of a record, and of nothing else


def send(port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


@contextlib.contextmanager
def serve(port: int, *command: str) -> Iterator[None]:
    """A server process, once it takes connections."""
    wrapper = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []  # it dies with these tests
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until_s = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, f"{command} ended"
                assert time.monotonic() < until_s, f"{command} does not start"
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket of a server that runs."""

    port: int
    spec: dict[str, Any]  # of TensorStore's kvstore, without a path

    def tier(self, path: str = "run7", port: int | None = None, **options: Any) -> jmo.Remote:
        """A tier in the bucket; ``port``: of a proxy before it."""
        spec = {**self.spec, "path": path}
        if port is not None:
            spec["endpoint"] = f"http://127.0.0.1:{port}"
        return jmo.Remote(spec, **options)

    @property
    def kv(self) -> Any:
        """The whole bucket."""
        import tensorstore as ts

        return ts.KvStore.open(self.spec).result(timeout=START_S)

    def keys(self, under: str = "") -> list[str]:
        """Keys of all objects below a path."""
        keys = [key.decode() for key in self.kv.list().result(timeout=START_S)]
        return sorted(key for key in keys if key.startswith(under))


# -- a backend by itself


class Bench:
    """A backend without a store: transfers, and the events that end them."""

    def __init__(self, tier):
        self.engine = native.Engine(1)
        self.engine.add_slots(SLOTS, RECORD)
        self.backend = make_backend(tier, self.engine)
        self.backend.add_array("a/b0.d0", 16, RECORD)
        self.slots = [self.engine.slot_view(slot, RECORD) for slot in range(SLOTS)]
        self.token = 0

    def place(self, index):
        return Place("a/b0.d0", index, RECORD)

    def fill(self, slot, seed):
        self.slots[slot][:] = np.random.default_rng(seed).integers(0, 256, RECORD, np.uint8)
        return native.crc32c(self.slots[slot])

    def write(self, index, slot):
        self.token += 1
        self.backend.write(self.place(index), slot, self.token)
        return self.token

    def read(self, index, slot, crc):
        self.token += 1
        self.backend.read(self.place(index), slot, crc, self.token)
        return self.token

    def events(self, timeout_s=30.0, count=1):
        """Ends of transfers by token: (text, errno, crc); fewer than ``count`` where they do not come in time."""
        found = {}
        until_s = time.monotonic() + timeout_s
        while len(found) < count and (left_s := until_s - time.monotonic()) > 0:
            for event in self.engine.wait(left_s, 64):
                if native.KINDS[event[0]] in ("read", "written"):
                    assert event[1] not in found, "a transfer ended twice"
                    found[event[1]] = event[2:5]
        return found

    def end(self, token, timeout_s=30.0):
        found = self.events(timeout_s)
        assert set(found) == {token}
        return found[token]

    def close(self):
        self.backend.stop()
        self.engine.close()
        self.backend.close()


# -- faults


@dataclasses.dataclass
class Fault:
    """What happens to the next ``times`` requests with this method and this text in their path."""

    method: str = ""
    contains: str = ""
    times: float = float("inf")
    status: int = 0  # answer with this
    code: str = ""  # and this word of S3's
    silent: bool = False  # accept, then say nothing until the proxy lets go
    trickle: bool = False  # answer, a byte now and then
    cut: bool = False  # break the connection in the middle of a body
    delay_s: float = 0.0  # at most, at random
    late: bool = False  # hand on only when the proxy lets go
    met: int = 0

    def fits(self, method: str, path: str) -> bool:
        return self.met < self.times and self.method in ("", method) and self.contains in path


class FaultProxy:
    """A TCP server on loopback that hands requests on to another, but for the faults it was given.

    ``requests`` are (method, path) of all that came, ``most_open`` the most that were under way at once.
    """

    def __init__(self, upstream_port: int, seed: int = 0) -> None:
        self.upstream_port = upstream_port
        self.requests: list[tuple[str, str]] = []
        self.open = self.most_open = 0
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.connections: set[socket.socket] = set()
        self.random = random.Random(seed)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def fail(self, **fault: Any) -> Fault:
        """From now on; the fault counts in ``met`` how often it struck."""
        with self.lock:
            self.faults.append(Fault(**fault))
            return self.faults[-1]

    def heal(self) -> None:
        """Lets silent requests go on, as does everything from now on."""
        with self.lock:
            self.faults.clear()
        self.released.set()

    def count(self, method: str, contains: str = "") -> int:
        """Requests so far."""
        with self.lock:
            return sum(m == method and contains in path for m, path in self.requests)

    def close(self) -> None:
        """Idempotent."""
        self.heal()
        self._server.shutdown()
        with self.lock:
            for connection in self.connections:  # that clients keep for their next requests
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for them
    request_queue_size = 128
    proxy: FaultProxy

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(OSError):
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error here."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: _Server

    def setup(self) -> None:
        super().setup()
        with self.server.proxy.lock:
            self.server.proxy.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.proxy.lock:
            self.server.proxy.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_expect_100(self) -> bool:
        fault = self._fault(peek=True)
        return True if fault and (fault.silent or fault.status) else super().handle_expect_100()

    def _fault(self, peek: bool = False) -> Fault | None:
        proxy = self.server.proxy
        with proxy.lock:
            fault = next((f for f in proxy.faults if f.fits(self.command, self.path)), None)
            if fault is not None and not peek:
                fault.met += 1
            return fault

    def _serve(self) -> None:
        proxy = self.server.proxy
        with proxy.lock:
            proxy.requests.append((self.command, self.path))
            proxy.open += 1
            proxy.most_open = max(proxy.most_open, proxy.open)
        try:
            self._answer(self._fault())
        finally:
            with proxy.lock:
                proxy.open -= 1

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _answer(self, fault: Fault | None) -> None:
        proxy = self.server.proxy
        if fault and fault.silent:
            proxy.released.wait()
            self._hang_up()
            return
        size = int(self.headers.get("Content-Length") or 0)
        if fault and fault.cut and self.command == "PUT":
            self.rfile.read(size // 2)
            self._hang_up()
            return
        body = self.rfile.read(size)
        if fault and fault.late:
            proxy.released.wait()
        if fault and fault.delay_s:
            with proxy.lock:
                delay_s = proxy.random.uniform(0, fault.delay_s)
            time.sleep(delay_s)
        if fault and fault.status:
            word = fault.code or "Busy"
            text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{word}</Code><Message>by design</Message></Error>'
            self._reply(fault.status, [], text.encode(), None)
        else:
            self._reply(*self._upstream(body), fault)

    def _upstream(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream_port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            skipped = ("connection", "transfer-encoding", "content-length")
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in skipped]
            return response.status, headers, response.read()
        finally:
            connection.close()

    def _reply(self, status: int, headers: list[tuple[str, str]], body: bytes, fault: Fault | None) -> None:
        head = f"HTTP/1.1 {status} {http.client.responses.get(status, 'Unknown')}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers)
        if status != 204:
            head += f"Content-Length: {len(body)}\r\n"
        whole = head.encode("latin-1") + b"\r\n" + body
        if fault and fault.trickle:
            for byte in whole:
                self.wfile.write(bytes((byte,)))
                if self.server.proxy.released.wait(0.1):
                    break
            self._hang_up()
        elif fault and fault.cut:
            self.wfile.write(whole[: len(whole) - len(body) + len(body) // 2])
            self._hang_up()
        else:
            self.wfile.write(whole)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def quick(s3, proxy, path="faults", **options):
    """A tier behind the proxy that loses patience soon."""
    return s3.tier(path, proxy.port, **({"request_timeout_s": 1.0, "retries": 4, "object_bytes": PAGE * 4} | options))


def threads() -> set[str]:
    """Names of the threads of ours that a store must not leave behind."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("jmo-")}


def descriptors() -> int:
    """Open files of this process."""
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def until(condition, timeout_s=30.0):
    """Waits for what happens in the background."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)
