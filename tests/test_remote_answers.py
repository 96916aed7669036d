"""What a server's answers are taken for, and that no credential is ever told."""

from __future__ import annotations

import dataclasses
import errno
import logging
import warnings

import jax
import pytest
import tensorstore as ts

import jax_mlp_offload as jmo
from jax_mlp_offload.backends.answers import Verdict, classify, scrubber
from tests.servers import CHUNKS, RECORD, S3_SECRETS, quick
from tests.support import SMALL_SHAPES, make_params, record_gradients, run_and_flush

pytest_plugins = ("tests.server_fixtures",)
pytestmark = pytest.mark.timeout(90)

FAILURES = (jmo.OffloadError, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize(
    ("fault", "verdict", "error_number"),
    [
        ({"status": 429, "code": "SlowDown"}, Verdict.AGAIN, errno.EIO),
        ({"status": 500, "code": "InternalError"}, Verdict.AGAIN, errno.EIO),
        ({"status": 502}, Verdict.AGAIN, errno.EIO),
        ({"status": 503, "code": "SlowDown"}, Verdict.AGAIN, errno.EIO),
        ({"status": 504}, Verdict.AGAIN, errno.EIO),
        ({"status": 400, "code": "RequestTimeout"}, Verdict.AGAIN, errno.EIO),
        ({"status": 400, "code": "ExpiredToken"}, Verdict.REFUSED, errno.EACCES),
        ({"status": 401}, Verdict.REFUSED, errno.EACCES),
        ({"status": 403, "code": "ExpiredToken"}, Verdict.REFUSED, errno.EACCES),
        ({"status": 403, "code": "AccessDenied"}, Verdict.REFUSED, errno.EACCES),
        ({"status": 404, "code": "NoSuchBucket"}, Verdict.ABSENT, errno.ENOENT),
        ({"status": 400, "code": "InvalidArgument"}, Verdict.FAILED, errno.EIO),
        ({"status": 409, "code": "OperationAborted"}, Verdict.FAILED, errno.EIO),
        ({"cut": True}, Verdict.AGAIN, errno.EIO),
    ],
)
def test_what_an_answer_means(fault, verdict, error_number, s3, proxy):
    tier = quick(s3, proxy)
    context = ts.Context({"s3_request_retries": {"max_retries": 0}})
    kv = ts.KvStore.open(dict(tier.kvstore), context=context).result(timeout=10)
    kv.write("there", b"x" * 1000).result(timeout=10)
    struck = proxy.fail(**fault)
    for request in (lambda: kv.write("there", b"x" * 1000), lambda: kv.read("there")):
        if verdict is Verdict.ABSENT and struck.met:
            continue  # a read finds nothing, which is no error here
        with pytest.raises(Exception, match=r"\w") as caught:
            request().result(timeout=20)
        answer = classify(caught.value, scrubber(tier))
        assert (answer.verdict, answer.error_number) == (verdict, error_number), answer
        assert "\n" not in answer.text and "[" not in answer.text and "tensorstore" not in answer.text
        assert not fault.get("status") or f"HTTP {fault['status']}" in answer.text
    assert struck.met
    proxy.heal()
    kv.write("there", None).result(timeout=10)


@pytest.mark.parametrize("secret", [*S3_SECRETS, "AWS_SESSION_TOKEN", "GOOGLE_AUTH_TOKEN_FOR_TESTING"])
def test_secrets_are_scrubbed(secret, monkeypatch):
    monkeypatch.setenv(secret, "hUsh/h+ush=0123")
    scrub = scrubber(jmo.Remote("s3://user:p%40ss-word@bucket/x?token=tell-no-one"))
    texts = [
        "hUsh/h+ush=0123 is no key",
        "see ?key=hUsh%2Fh%2Bush%3D0123",
        "http://who:ever@host/x",
        "?X-Amz-Signature=abcdef0123&X-Amz-Credential=AKIA%2Fus&x=1",
        "Authorization: Bearer abc.def-123",
        "p@ss-word and p%40ss-word and tell-no-one",
        "AKIAIOSFODNN7EXAMPLE",
    ]
    told = " ".join(map(scrub, texts))
    for part in ("hUsh", "0123", "ever", "abcdef", "abc.def", "ss-word", "tell-no-one", "IOSFODNN7"):
        assert part not in told, told
    assert "http://host/x" in told and "x=1" in told


def test_secrets_are_scrubbed_before_the_text_is_cut(monkeypatch):
    """Half of a secret is not known for one."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hUsh/" * 60)
    told = classify(ValueError("UNKNOWN: " + "well " * 50 + "hUsh/" * 60), scrubber(jmo.Remote("s3://bucket/x"))).text
    assert "hUsh" not in told
    assert told.endswith("***")


def test_secrets_of_a_spec_are_scrubbed_wherever_they_are():
    nested = {"key": "hunter2-hunter2", "more": [{"id": "tell-no-one"}], "type": "environment"}
    scrub = scrubber(jmo.Remote({"driver": "s3", "bucket": "the-bucket", "credentials": nested}))
    assert scrub("hunter2-hunter2 tell-no-one the-bucket environment") == "*** *** the-bucket environment"


@pytest.mark.parametrize("records", [None, -1], ids=["an array that was not declared", "an array that cannot be"])
def test_no_secret_in_what_goes_wrong_here(records, bench, monkeypatch, caplog):
    """What is no answer of the store's, in the event and in the log."""
    secret = "hUsh-hUsh-0123"
    on = bench(jmo.Remote("memory://x"))
    if records is not None:
        on.backend.add_array(f"a/{secret}", records, RECORD)
    monkeypatch.setenv("AWS_SESSION_TOKEN", secret)
    on.backend.write(dataclasses.replace(on.place(0), array=f"a/{secret}"), 0, 7)
    text, number, _ = on.end(7)
    assert number == errno.EIO
    assert "internal error KeyError: 'a/***'" in text if records is None else "zarr.json: Error parsing" in text
    assert secret not in text.removeprefix(f"write of {on.backend._home.url}a/{secret}/")
    assert secret not in caplog.text


def test_no_secret_in_what_is_told(s3, proxy, monkeypatch, caplog):
    """Also where the server repeats the credentials in its answer."""
    caplog.set_level(logging.DEBUG)
    key, secret = S3_SECRETS["AWS_ACCESS_KEY_ID"], S3_SECRETS["AWS_SECRET_ACCESS_KEY"]
    told = []
    store = jmo.Store(quick(s3, proxy), host_memory="110KB", subgroup_elements=4096)
    proxy.fail(status=403, code=f"InvalidAccessKeyId {key} {secret}", contains=CHUNKS)
    params = make_params(SMALL_SHAPES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(FAILURES) as error:
            run_and_flush(store, jmo.adam(1e-2, store=store), params, record_gradients(params, 3))
    told += [str(error.value), *(str(w.message) for w in caught), repr(store), str(store.stats())]
    store._close_quietly()
    proxy.fail(status=403, code=f"SignatureDoesNotMatch {secret}")
    with pytest.raises(OSError, match="cannot be used") as refused:
        jmo.Store(quick(s3, proxy))
    told += [str(refused.value), *(record.getMessage() for record in caplog.records)]
    assert any("refused" in text for text in told)
    for text in told:
        assert key not in text and secret not in text, text
