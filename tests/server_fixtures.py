"""Servers that start once a session. A plugin, so that several test modules share them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from models.launch import free_port
from tests.servers import BUCKET, S3_SECRETS, Bench, Bucket, FaultProxy, send, serve, threads


@pytest.fixture(scope="session")
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    nothing = tmp_path_factory.mktemp("aws") / "nothing"
    nothing.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in S3_SECRETS.items():
            patch.setenv(name, value)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, str(nothing))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        yield patch


@pytest.fixture(scope="session")
def s3(_environment: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket of an S3 server."""
    port = free_port()
    with serve(port, "moto.server", "-H", "127.0.0.1", "-p", str(port)):
        assert send(port, "PUT", f"/{BUCKET}") == 200
        endpoint = f"http://127.0.0.1:{port}"
        yield Bucket(port, {"driver": "s3", "bucket": BUCKET, "endpoint": endpoint, "aws_region": "us-east-1"})


@pytest.fixture(scope="session")
def gcs(_environment: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket of a Google Cloud Storage server. TensorStore reads its address once a process."""
    port = free_port()
    _environment.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{port}")
    _environment.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "a-token-for-the-tests")
    command = ("gcp_storage_emulator", "start", "-q", "-M", "-H", "127.0.0.1", "--port", str(port))
    with serve(port, *command, "--default-bucket", BUCKET):
        yield Bucket(port, {"driver": "gcs", "bucket": BUCKET})


@pytest.fixture
def proxy(s3: Bucket) -> Iterator[FaultProxy]:
    """A proxy before the S3 server."""
    made = FaultProxy(s3.port)
    yield made
    made.close()


@pytest.fixture
def bench():
    """Makes benches, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(tier):
            made = Bench(tier)
            stack.callback(made.close)
            return made

        yield make
    assert not threads()
