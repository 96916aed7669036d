"""What a remote tier leaves behind and who may remove it, and that nobody waits for ever for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import errno
import subprocess
import sys
import threading

import numpy as np
import pytest

from jax_mlp_offload.backends import home, kvstore
from jax_mlp_offload.backends.home import Lease
from jax_mlp_offload.backends.loop import Loop
from tests.servers import CHUNKS, PAGE, RECORD, Bench, quick, threads, until

pytest_plugins = ("tests.server_fixtures",)
pytestmark = pytest.mark.timeout(90)


def sweep(s3, under):
    """What the next start would remove."""
    for key in s3.keys(under):
        s3.kv.write(key, None).result(timeout=10)


# -- writes under way at the end


@pytest.mark.parametrize("what", [CHUNKS, "/zarr.json"])
def test_a_write_that_is_carried_out_after_the_end_can_be_found(what, s3, proxy):
    on = Bench(quick(s3, proxy, "late", request_timeout_s=20.0))
    on.fill(0, 1)
    struck = proxy.fail(method="PUT", contains=what, late=True)
    on.write(0, 0)
    until(lambda: struck.met == (2 if what == CHUNKS else 1))
    on.close()
    assert not threads()
    (lease,) = s3.keys("late/")
    assert lease.startswith("late/jmo-leases/")
    proxy.heal()
    until(lambda: len(s3.keys("late/")) == 1 + struck.met)
    own = lease.rpartition("/")[2]
    assert all(key.startswith(f"late/jmo-{own}/") for key in s3.keys("late/") if key != lease)
    sweep(s3, "late/")


def test_an_ordinary_end_waits_for_its_writes(s3, proxy, monkeypatch):
    """Of a write that is under way nothing stays, and no lease."""
    monkeypatch.setattr(kvstore, "_LET_GO_S", 30.0)
    on = Bench(quick(s3, proxy, "ordinary", request_timeout_s=20.0))
    on.fill(0, 1)
    struck = proxy.fail(method="PUT", contains=CHUNKS, late=True)
    token = on.write(0, 0)
    until(lambda: struck.met == 2)
    closing = threading.Thread(target=on.close)
    closing.start()
    assert on.end(token)[1] == errno.ECANCELED
    proxy.heal()
    closing.join()
    assert not s3.keys("ordinary/")


# -- deletes


def test_a_delete_waits_for_earlier_writes(s3, proxy, bench):
    """A write that had no answer, was sent again with success, and is carried out when the record has moved on."""
    on = bench(quick(s3, proxy, "before", request_timeout_s=0.5, object_bytes=RECORD))
    crc = on.fill(0, 1)
    proxy.fail(method="PUT", contains=CHUNKS, late=True, times=1)
    assert on.end(on.write(0, 0)) == ("", 0, crc)
    on.backend.moved_on(on.place(0))
    deletes = proxy.count("DELETE", CHUNKS)
    assert on.end(on.read(0, 1, crc)) == ("", 0, crc)  # so much later nothing has been deleted
    assert proxy.count("DELETE", CHUNKS) == deletes == 0
    proxy.heal()
    until(lambda: proxy.count("DELETE", CHUNKS) == 1)
    until(lambda: not [key for key in s3.keys("before/") if CHUNKS in key])
    assert proxy.count("PUT", CHUNKS) == 2


def test_deletes_without_an_answer_do_not_hold_up_reads_for_ever(s3, proxy, bench):
    on = bench(quick(s3, proxy, request_timeout_s=0.5, object_bytes=RECORD, connections=2))
    crc = on.fill(0, 1)
    for index in range(3):
        assert on.end(on.write(index, 0)) == ("", 0, crc)
    struck = proxy.fail(method="DELETE", contains=CHUNKS, silent=True)
    for index in range(2):
        on.backend.moved_on(on.place(index))
    until(lambda: struck.met == 2)
    text, _, _ = on.end(on.read(2, 1, crc))
    assert "none of 2 connections has an answer" in text
    assert proxy.count("DELETE", CHUNKS) == 2  # each takes one connection, and no more
    proxy.heal()
    until(lambda: on.end(on.read(2, 1, crc)) == ("", 0, crc))


# -- the end is bounded


def test_closing_stops_at_the_first_silence(s3, proxy, caplog):
    on = Bench(quick(s3, proxy, "silence", object_bytes=PAGE, connections=2))
    on.fill(0, 1)
    for index in range(2):
        on.end(on.write(index, 0))
    assert len(s3.keys("silence/")) == 2 * RECORD // PAGE + 2
    proxy.fail(method="DELETE", silent=True)
    before = on.backend.facts()["requests"]
    on.close()
    assert on.backend.facts()["requests"] == before + 1 + 2  # a list, and not all deletes one after the other
    assert "no answer within 1 s; the next start removes what is left there" in caplog.text
    assert len(s3.keys("silence/")) == 2 * RECORD // PAGE + 2
    proxy.heal()
    sweep(s3, "silence/")


def test_closing_has_a_limit(s3, proxy, caplog, monkeypatch):
    """Also where every request is answered in time, but there are many."""
    monkeypatch.setattr(kvstore, "_LONGEST_REMOVAL_S", 0.5)
    on = Bench(quick(s3, proxy, "limit", request_timeout_s=60.0))
    on.fill(0, 1)
    on.end(on.write(0, 0))
    struck = proxy.fail(method="DELETE", late=True)
    on.close()
    assert struck.met
    assert "tier 's3://jmo-bucket/limit': what was stored was not removed within 0.5 s; the next start" in caplog.text
    assert not threads()
    proxy.heal()
    sweep(s3, "limit/")


# -- reads outside of a step


@pytest.mark.parametrize("ends", ["the store is closed", "a limit"])
def test_a_read_outside_of_a_step_ends(ends, s3, proxy, monkeypatch):
    if ends == "a limit":
        monkeypatch.setattr(kvstore, "_LONGEST_READ_NOW_S", 0.5)
    on = Bench(quick(s3, proxy, "now", request_timeout_s=60.0))
    crc = on.fill(0, 1)
    on.end(on.write(0, 0))
    struck = proxy.fail(method="GET", contains=CHUNKS, silent=True)
    future = concurrent.futures.Future()

    def read():
        try:
            future.set_result(on.backend.read_now(on.place(0), np.empty(RECORD, np.uint8), crc))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=read, daemon=True).start()
    until(lambda: struck.met)
    if ends == "the store is closed":
        on.close()
    message = "not done within 0.5 s" if ends == "a limit" else "the store was closed"
    with pytest.raises(RuntimeError, match=rf"read of s3://\S+/now/jmo-\w+/a/b0.d0/c/0: {message}"):
        future.result(timeout=30)
    on.close()
    on.backend.close()
    proxy.heal()
    with pytest.raises(RuntimeError, match="the store was closed"):
        on.backend.read_now(on.place(0), np.empty(RECORD, np.uint8), crc)
    assert not s3.keys("now/")


def test_nobody_waits_for_a_loop_that_is_closed():
    loop = Loop("jmo-test")
    begun = threading.Event()

    async def stubborn():
        begun.set()
        while begun.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    waiting = concurrent.futures.Future()

    def wait():
        try:
            waiting.set_result(loop.run(stubborn()))
        except BaseException as error:
            waiting.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    assert begun.wait(30)
    loop.close()
    assert isinstance(waiting.exception(timeout=30), concurrent.futures.CancelledError)
    with pytest.raises(concurrent.futures.CancelledError):
        loop.run(asyncio.sleep(0))
    begun.clear()
    assert not threads()


# -- leases


def test_a_process_that_is_hidden_is_not_dead():
    """Where /proc shows a user none of the processes of others."""
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no /proc can be mounted here that hides processes")
    code = """
import os, sys
from jax_mlp_offload.backends.home import Lease
leases = [Lease.parse(text.encode()) for text in sys.argv[1:]]
print([(os.path.exists(f"/proc/{lease.pid}"), lease.is_dead()) for lease in leases])
"""
    mine = Lease.mine()
    texts = [lease.text().decode() for lease in (mine, dataclasses.replace(mine, pid=2**22 + 1))]
    found = subprocess.run([*command, sys.executable, "-c", code, *texts], capture_output=True, check=False, text=True)
    assert found.stdout == "[(False, False), (False, True)]\n", found.stderr


@pytest.mark.parametrize("bad", ["a lease that hangs", "a lease that is none", "lists refused"])
def test_the_lease_is_renewed_whatever_becomes_of_others(bad, s3, proxy, monkeypatch, bench):
    monkeypatch.setattr(home, "_RENEW_S", 0.2)
    key = f"renew/jmo-leases/{16 * '0'}"  # which is in the path of no other's
    s3.kv.write(key, b"[" * 100_000).result(timeout=10)
    if bad == "a lease that hangs":
        proxy.fail(method="GET", contains=key, silent=True)
    on = bench(quick(s3, proxy, "renew", request_timeout_s=60.0))
    if bad == "lists refused":
        proxy.fail(method="GET", status=403, code="AccessDenied")
    (own,) = set(s3.keys("renew/jmo-leases/")) - {key}
    puts = proxy.count("PUT", own)
    until(lambda: proxy.count("PUT", own) >= puts + 2)
    proxy.heal()
    on.close()
    assert s3.keys("renew/") == [key]
    s3.kv.write(key, None).result(timeout=10)
