"""Object stores that fail as they do in the field (case D13): a real server behind a proxy that misbehaves."""

from __future__ import annotations

import asyncio
import errno
import re
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from jax_mlp_offload.backends.requests import Begun, Held, Requests, StillHeldError
from jax_mlp_offload.backends.zarr import metadata
from tests.servers import CHUNKS, PAGE, RECORD, SLOTS, Bench, FaultProxy, quick, threads
from tests.support import (
    BF16,
    SMALL_SHAPES,
    advance,
    assert_bits_equal,
    make_params,
    make_step,
    record_gradients,
    run,
    run_and_flush,
    tiered,
)

pytest_plugins = ("tests.server_fixtures",)
pytestmark = pytest.mark.timeout(90)

FAILURES = (jmo.OffloadError, jax.errors.JaxRuntimeError)


# -- passing faults


@pytest.mark.parametrize("method", ["PUT", "GET"])
@pytest.mark.parametrize("fault", [{"status": 429}, {"status": 503, "code": "SlowDown"}, {"cut": True}], ids=str)
def test_d13_twice_then_fine(method, fault, s3, proxy, bench):
    on = bench(quick(s3, proxy))
    struck = proxy.fail(method=method, contains=CHUNKS, times=2, **fault)
    crc = on.fill(0, 1)
    assert on.end(on.write(3, 0)) == ("", 0, crc)
    assert on.end(on.read(3, 1, crc)) == ("", 0, crc)
    np.testing.assert_array_equal(on.slots[0], on.slots[1])
    assert struck.met == 2
    facts = on.backend.facts()
    # curl itself tries again where a connection that it kept has gone
    assert 0 <= facts["retries"] <= 2 if "cut" in fault else facts["retries"] == 2
    assert proxy.count("PUT", CHUNKS) == 2 + 2 * (method == "PUT")  # two objects a record
    assert proxy.count("GET", CHUNKS) == 2 + 2 * (method == "GET")


def test_d13_busy_for_too_long(s3, proxy, bench):
    on = bench(quick(s3, proxy, retries=2))
    proxy.fail(method="PUT", contains=CHUNKS, status=503, code="SlowDown")
    text, number, _ = on.end(on.write(0, 0))
    assert number == errno.EIO
    assert re.search(
        r"write of .*/faults/jmo-\w+/a/b0.d0/c/0/\d: SlowDown: by design \(HTTP 503\); tried 3 times", text
    )
    assert proxy.count("PUT", CHUNKS) == 2 * 3


@pytest.mark.parametrize("status", [403, 400])
def test_d13_expired_credentials(status, s3, proxy, tmp_path):
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 4)
    with jmo.Store(quick(s3, proxy, retries=8), host_memory="110KB", subgroup_elements=4096) as store:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        params, state = jax.block_until_ready(step(params, state, grads[0]))
        store.flush()
        struck = proxy.fail(status=status, code="ExpiredToken", contains=CHUNKS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jmo.TierWarning)
            with pytest.raises(FAILURES, match="credentials were refused") as caught:
                advance(step, params, state, grads[1:], store)
        assert "ExpiredToken" in str(caught.value) and "s3://" in str(caught.value) and "leaves" in str(caught.value)
        assert store.stats()["tiers"][0].get("retries", 0) == 0
        assert struck.met
        store._close_quietly()
    assert not threads()


# -- silence


@pytest.mark.parametrize("fault", ["silent", "trickle"])
def test_d13_another_tier_takes_over(fault, s3, proxy, tmp_path):
    """Writes that never end: their tier is retired, the step is whole, and close returns."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 5)
    with jmo.Store() as store:
        expected, state = run(jmo.adamw(1e-2, store=store), params, grads)
        moments = jmo.read_state(state)
    tier = quick(s3, proxy, request_timeout_s=0.5, retries=1)
    with tiered([tier, tmp_path], deadline_s=20.0) as store:
        proxy.fail(method="PUT", contains=CHUNKS, **{fault: True})
        with pytest.warns(
            jmo.TierWarning, match=r"s3://.*write of .*no answer within 0.5 s; tried 2 times.*writes go to"
        ):
            new, state = run_and_flush(store, jmo.adamw(1e-2, store=store), params, grads)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), moments)
        assert [tier["retired"] for tier in store.stats()["tiers"]] == [True, False]
    assert not threads()
    assert not list(tmp_path.iterdir())
    tidy(s3, proxy)


def tidy(s3, proxy):
    """Removes what a store has to leave behind while a write of it may yet be carried out."""
    assert [key for key in s3.keys("faults/") if "/jmo-leases/" in key], "nobody would find the rest"
    proxy.close()
    for key in s3.keys("faults/"):
        s3.kv.write(key, None).result(timeout=10)


@pytest.mark.parametrize("fault", ["silent", "trickle"])
def test_d13_reads_without_an_answer(fault, s3, proxy):
    """A named error by the deadline, and close returns."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 4)
    tier = quick(s3, proxy, request_timeout_s=0.4, retries=1)
    store = jmo.Store(tier, host_memory="110KB", subgroup_elements=4096, deadline_s=10.0)
    tx = jmo.adam(1e-2, store=store)
    step, state = make_step(tx), tx.init(params)
    params, state = jax.block_until_ready(step(params, state, grads[0]))
    store.flush()
    proxy.fail(method="GET", contains=CHUNKS, **{fault: True})
    with pytest.raises(FAILURES, match=r"s3://.*read of .*no answer within 0.4 s; tried 2 times"):
        advance(step, params, state, grads[1:], store)
    store._close_quietly()
    assert not threads()


def test_a_write_is_tried_again_beside_one_that_hangs(s3, proxy, bench):
    """And a later one to the same place waits until that is over."""
    on = bench(quick(s3, proxy, request_timeout_s=1.5, object_bytes=RECORD))
    crc = on.fill(0, 1)
    struck = proxy.fail(method="PUT", contains=CHUNKS, silent=True, times=1)
    assert on.end(on.write(0, 0)) == ("", 0, crc)
    assert (struck.met, on.backend.facts()["timeouts"], proxy.count("PUT", CHUNKS)) == (1, 1, 2)
    crc = on.fill(1, 2)
    token = on.write(0, 1)
    assert on.events(0.3) == {}
    assert proxy.count("PUT", CHUNKS) == 2
    proxy.heal()  # breaks the connection
    assert on.end(token) == ("", 0, crc)
    assert on.end(on.read(0, 2, crc)) == ("", 0, crc)


def test_no_connection_has_an_answer(s3, proxy, bench):
    on = bench(quick(s3, proxy, request_timeout_s=0.3, connections=2, retries=8))
    proxy.fail(method="PUT", contains=CHUNKS, silent=True)
    text, number, _ = on.end(on.write(0, 0))
    assert number == errno.ETIMEDOUT
    assert "none of 2 connections has an answer" in text
    assert proxy.most_open == 2
    proxy.heal()


def test_a_request_ends_only_when_its_memory_is_free(s3, proxy):
    """Where TensorStore writes straight from memory, cancelling does not make it let go."""

    async def requests():
        patient = Requests(1, 0.3, 0, scrub=str)
        memory = np.ones(RECORD, np.uint8)
        store = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {**quick(s3, proxy).kvstore, "path": "memory/"},
                "metadata": metadata(4, RECORD, RECORD),
                "assume_metadata": True,
                "store_data_equal_to_fill_value": True,
            }
        ).result(timeout=10)

        def begin():
            part = memory[:]
            return Begun(store[0, :].write(part, can_reference_source_data_indefinitely=True).commit, Held(part))

        for abandon in (False, True):
            struck = proxy.fail(method="PUT", contains=CHUNKS, silent=True)
            task = asyncio.ensure_future(patient.run("write", begin))
            await asyncio.sleep(1.0)
            assert struck.met == 1 and not task.done()
            patient.abandoning = abandon
            task.cancel()
            await asyncio.sleep(0.2)
            assert task.done() is abandon
            if abandon:
                with pytest.raises(StillHeldError):
                    await task
            proxy.heal()
            if not abandon:
                with pytest.raises(asyncio.CancelledError):
                    await task
                proxy.released.clear()

    asyncio.run(requests())


def test_a_read_is_tried_again_after_silence(s3, proxy, bench):
    on = bench(quick(s3, proxy, request_timeout_s=0.5))
    crc = on.fill(0, 1)
    assert on.end(on.write(0, 0)) == ("", 0, crc)
    proxy.fail(method="GET", contains=CHUNKS, silent=True, times=1)
    assert on.end(on.read(0, 1, crc)) == ("", 0, crc)
    np.testing.assert_array_equal(on.slots[0], on.slots[1])
    assert on.backend.facts()["timeouts"] == 1


def test_what_comes_late_touches_no_slot(s3, proxy, bench):
    """A read that was given up is answered when its slot holds something else, and a write that was given up is sent."""
    on = bench(quick(s3, proxy, request_timeout_s=0.4, retries=0, object_bytes=RECORD))
    crc = on.fill(0, 1)
    assert on.end(on.write(0, 0)) == ("", 0, crc)
    for method in ("GET", "PUT"):
        proxy.fail(method=method, contains=CHUNKS, late=True)
    assert on.end(on.read(0, 1, crc))[1] == errno.ETIMEDOUT
    written = on.fill(2, 2)
    assert on.end(on.write(1, 2))[1] == errno.ETIMEDOUT
    others = [on.fill(1, 3), on.fill(2, 4)]
    proxy.heal()
    token = on.write(1, 3)  # waits for the late one, so all has come when it ends
    assert on.end(token)[0] == ""
    assert [native.crc32c(on.slots[slot]) for slot in (1, 2)] == others
    puts = [path for method, path in proxy.requests if method == "PUT" and "/c/1/" in path]
    assert len(puts) == 2
    assert written not in others


def test_close_with_a_write_that_hangs(s3, proxy):
    """It returns; the lease stays, so that the next start removes what is written after all."""
    on = Bench(quick(s3, proxy, request_timeout_s=0.5))
    on.fill(0, 1)
    struck = proxy.fail(method="PUT", contains=CHUNKS, silent=True)
    on.write(0, 0)
    while struck.met < 4:  # two objects, twice
        time.sleep(0.01)
    on.close()
    assert not threads()
    tidy(s3, proxy)


def hang_delete(on, proxy):
    """A record is written and moves on, and its deletes get no answer."""
    on.fill(0, 1)
    on.end(on.write(0, 0))
    struck = proxy.fail(method="DELETE", contains=CHUNKS, silent=True)
    on.backend.moved_on(on.place(0))
    while struck.met < 2:
        time.sleep(0.01)


def test_a_write_waits_for_the_delete_before_it(s3, proxy, bench):
    on = bench(quick(s3, proxy, request_timeout_s=20.0))
    hang_delete(on, proxy)
    puts = proxy.count("PUT", CHUNKS)
    crc = on.fill(1, 2)
    token = on.write(0, 1)
    assert on.events(0.5) == {}
    assert proxy.count("PUT", CHUNKS) == puts
    proxy.heal()
    assert on.end(token) == ("", 0, crc)
    assert on.end(on.read(0, 2, crc)) == ("", 0, crc)


def test_a_write_does_not_wait_for_ever_for_a_delete(s3, proxy, bench):
    on = bench(quick(s3, proxy, request_timeout_s=0.5))
    hang_delete(on, proxy)
    text, number, _ = on.end(on.write(0, 1))
    assert number == errno.ETIMEDOUT
    assert "an earlier request for the same place has had no answer within 0.5 s" in text
    proxy.heal()


# -- what is not there, or not what it was


@pytest.mark.parametrize("harm", ["deleted", "altered", "short", "long"])
def test_records_harmed_behind_our_back(harm, s3, proxy):
    params = {"w": jnp.ones(40000)}
    with jmo.Store(quick(s3, proxy, "harm"), host_memory="200KB", subgroup_elements=8192) as store:
        tx = jmo.adamw(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        for _ in range(2):
            params, state = jax.block_until_ready(step(params, state, params))
        store.flush()
        keys = [key for key in s3.keys("harm/") if "/c/" in key]
        assert keys
        for key in keys:
            data = bytearray(s3.kv.read(key).result(timeout=10).value)
            if not data:
                continue  # of a record that has moved on: just deleted
            data[100] ^= 1
            new = {"deleted": None, "altered": bytes(data), "short": bytes(data[:999]), "long": bytes(data) + b"more"}
            s3.kv.write(key, new[harm]).result(timeout=10)
        params, state = jax.block_until_ready(step(params, state, params))
        with pytest.raises(jmo.CorruptRecordError, match=r"s3://\S+/harm.*read of .*/c/\d.*\['w'\]") as caught:
            store.flush()
        assert ("CRC32C is 0x" if harm == "altered" else "not what was written") in str(caught.value)
        store._close_quietly()
    assert not s3.keys("harm/")


def test_a_delete_that_is_called_off_deletes_nothing(s3, proxy, bench):
    """Records move on and are written again at once, over and over."""
    on = bench(quick(s3, proxy, object_bytes=2 * PAGE, connections=4, request_timeout_s=30.0))
    proxy.fail(delay_s=0.01, contains=CHUNKS)
    crcs, tokens = [0] * SLOTS, [0] * SLOTS
    pauses = np.random.default_rng(0)
    for turn in range(12):
        for slot in range(SLOTS):
            crcs[slot] = on.fill(slot, 10 * turn + slot)
            on.backend.moved_on(on.place(slot))
            time.sleep(pauses.choice([0.0, 0.0001, 0.0003, 0.001]))  # the delete gets this far or that
            tokens[slot] = on.write(slot, slot)
        found = on.events(count=SLOTS)
        assert [found[token] for token in tokens] == [("", 0, crc) for crc in crcs]
        time.sleep(0.02)  # for a delete that is still on its way
        for slot, crc in enumerate(crcs):
            assert on.end(on.read(slot, slot, crc)) == ("", 0, crc)


# -- bounds


def test_d13_connections_are_bounded(s3, proxy, bench):
    on = bench(quick(s3, proxy, connections=3, object_bytes=PAGE, request_timeout_s=30.0))
    proxy.fail(delay_s=0.05, contains=CHUNKS)
    crcs = [on.fill(slot, slot) for slot in range(SLOTS)]
    tokens = [on.write(slot, slot) for slot in range(SLOTS)]
    found = on.events(count=SLOTS)
    assert [found[token] for token in tokens] == [("", 0, crc) for crc in crcs]
    tokens = [on.read(slot, slot, crc) for slot, crc in enumerate(crcs)]
    found = on.events(count=SLOTS)
    assert [found[token] for token in tokens] == [("", 0, crc) for crc in crcs]
    assert proxy.most_open == 3
    assert proxy.count("PUT", CHUNKS) == proxy.count("GET", CHUNKS) == SLOTS * 8


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_d15_delays_change_no_bit(dtype, seed, s3, tmp_path):
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        expected, state = run(jmo.adamw(1e-2, store=store), params, grads, donate=True)
        moments = jmo.read_state(state)
    proxy = FaultProxy(s3.port, seed)
    try:
        proxy.fail(delay_s=0.02)
        with tiered([quick(s3, proxy, "delays", request_timeout_s=30.0)]) as store:
            new, state = run(jmo.adamw(1e-2, store=store), params, grads, donate=True)
            assert_bits_equal(new, expected)
            assert_bits_equal(jmo.read_state(state), moments)
            assert store.stats()["misses"] > 0
    finally:
        proxy.close()
    assert not s3.keys("delays/")


# -- stores that cannot be used


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 403, "code": "AccessDenied"}, r"credentials were refused: AccessDenied.*allowed to list"),
        ({"status": 404, "code": "NoSuchBucket"}, r"NoSuchBucket.*make the bucket"),
        ({"status": 503, "code": "SlowDown"}, r"SlowDown.*endpoint"),
        ({"silent": True}, r"no answer within 1 s.*endpoint"),
        ({"trickle": True}, r"no answer within 1 s.*endpoint"),
        ({"method": "GET", "status": 403, "code": "AccessDenied"}, r"read of .*refused"),
    ],
    ids=str,
)
def test_a_store_that_cannot_be_used(fault, message, s3, proxy, tmp_path):
    proxy.fail(**fault)
    start_s = time.monotonic()
    with pytest.raises(OSError, match=rf"tier 's3://\S+/start' cannot be used: .*{message}") as caught:
        jmo.Store(tmp_path, quick(s3, proxy, "start"))
    assert time.monotonic() - start_s < 15.0
    assert caught.value.errno in (errno.EACCES, errno.ENOENT, errno.EIO, errno.ETIMEDOUT)
    assert not list(tmp_path.iterdir())
    assert not threads()
    assert not s3.keys("start/")
