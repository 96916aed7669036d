"""Records through TensorStore, against real servers: the bits of the host-only run, and nothing left in the bucket."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import re
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from jax_mlp_offload.backends.home import Lease
from jax_mlp_offload.backends.zarr import metadata
from tests.processes import finish, start_python
from tests.servers import CHUNKS, PAGE, RECORD, SLOTS, quick, threads, until
from tests.support import (
    BF16,
    SMALL_SHAPES,
    assert_bits_equal,
    assert_close,
    assert_used_tiers,
    check_against_optax,
    make_params,
    make_step,
    record_gradients,
    run,
    run_reference,
    tiered,
)

pytest_plugins = ("tests.server_fixtures",)
pytestmark = pytest.mark.timeout(90)


@functools.cache
def host_only(dtype):
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        expected, state = run(jmo.adamw(1e-2, weight_decay=0.1, store=store), params, grads)
        masters = None if dtype == jnp.float32 else jmo.read_masters(state, expected)
        return params, grads, expected, jmo.read_state(state), masters


def check(store, dtype):
    """The store's run has the bits of the one in host memory."""
    params, grads, expected, moments, masters = host_only(dtype)
    new, state = run(jmo.adamw(1e-2, weight_decay=0.1, store=store), params, grads)
    assert_bits_equal(new, expected)
    assert_bits_equal(jmo.read_state(state), moments)
    if masters is not None:
        assert_bits_equal(jmo.read_masters(state, new), masters)
    assert_used_tiers(store)
    store.flush()


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
@pytest.mark.parametrize("kind", ["memory", "s3", "gcs", "directory and s3", "tensorstore directory"])
def test_the_bits_of_the_host_only_run(kind, dtype, request, tmp_path):
    bucket = request.getfixturevalue("gcs" if kind == "gcs" else "s3") if "s3" in kind or kind == "gcs" else None
    tiers = {
        "memory": lambda: ["memory://run7/"],
        "s3": lambda: [bucket.tier("bits", object_bytes="8KiB")],
        "gcs": lambda: [f"gs://{bucket.spec['bucket']}/bits"],
        "directory and s3": lambda: [tmp_path, bucket.tier("bits")],
        "tensorstore directory": lambda: [jmo.File(tmp_path, io="tensorstore")],
    }[kind]()
    if bucket:
        bucket.kv["bystander"] = b"not ours"
    with tiered(tiers) as store:
        check(store, dtype)
    assert not threads()
    assert not list(tmp_path.iterdir())
    if bucket:
        assert bucket.keys() == ["bystander"]


def test_many_devices(s3):
    devices = 8
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    specs = {"a": PartitionSpec("fsdp", None), "b": PartitionSpec(None, "fsdp")}
    params = make_params({"a": (128, 512), "b": (512, 128)})
    grads = record_gradients(params, 3)
    expected, moments = run_reference(optax.adam(1e-2), params, grads)

    def place(tree):
        return {name: jax.device_put(tree[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}

    with jmo.Store(s3.tier("many", object_bytes="8KiB"), host_memory="600KB", subgroup_elements=2048) as store:
        tx = jmo.adam(1e-2, store=store, mesh=mesh, param_specs=specs)
        new, state = run(tx, place(params), [place(grad) for grad in grads])
        assert_close(new, expected)
        assert_close(jmo.read_state(state), moments)
        assert_used_tiers(store)
    assert not s3.keys("many")


def test_a_remote_spec_of_another_driver(tmp_path):
    """Whatever TensorStore opens: here its own file driver, under a prefix with a lease."""
    params = make_params({"w": (40000,)})
    (tmp_path / "other.txt").write_text("not ours")
    tier = jmo.Remote({"driver": "file", "path": f"{tmp_path}/tier/"}, object_bytes="16KiB")
    with jmo.Store(tier, host_memory="200KB", subgroup_elements=4096) as store:
        check_against_optax(jmo.adam(1e-2, store=store), optax.adam(1e-2), params, record_gradients(params, 3))
        assert_used_tiers(store)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["other.txt"]


# -- what is stored


def test_objects_and_requests(s3, proxy, bench):
    """A record of eight pages is three objects, each one request; nothing is read before it is written."""
    on = bench(quick(s3, proxy, object_bytes=11_000))
    crc = on.fill(0, 1)
    assert on.end(on.write(5, 0)) == ("", 0, crc)
    prefix = next(key for key in s3.keys("faults/jmo-") if key.endswith("zarr.json")).removesuffix("zarr.json")
    objects = {key.removeprefix(prefix): len(s3.kv[key]) for key in s3.keys(prefix) if CHUNKS in key}
    assert objects == {f"c/5/{number}": 3 * PAGE for number in range(3)}  # the last one is filled up
    assert on.end(on.read(5, 1, crc)) == ("", 0, crc)
    assert [proxy.count(method, CHUNKS) for method in ("PUT", "GET", "HEAD")] == [3, 3, 0]
    array = ts.open({"driver": "zarr3", "kvstore": {**s3.spec, "path": prefix}}).result(timeout=10)
    assert array.shape == (16, RECORD + PAGE)
    row = array[5].read().result(timeout=10)
    np.testing.assert_array_equal(row[:RECORD], on.slots[0])
    assert not row[RECORD:].any()
    on.backend.moved_on(on.place(5))
    until(lambda: not [key for key in s3.keys(prefix) if CHUNKS in key])
    target = np.empty(RECORD, np.uint8)
    with pytest.raises(RuntimeError, match=r"read of s3://\S+/c/5/\d: .*missing"):
        on.backend.read_now(on.place(5), target, crc)


def test_reading_outside_of_a_step(s3, proxy, bench):
    on = bench(quick(s3, proxy))
    crc = on.fill(0, 1)
    assert on.end(on.write(2, 0)) == ("", 0, crc)
    proxy.fail(method="GET", contains=CHUNKS, status=503, times=2)
    target = np.empty(RECORD, np.uint8)
    on.backend.read_now(on.place(2), target, crc)
    np.testing.assert_array_equal(target, on.slots[0])
    with pytest.raises(
        RuntimeError, match=rf"read of s3://\S+ \({RECORD} bytes\): .*CRC32C is 0x{crc:08x}, expected 0x0*7"
    ):
        on.backend.read_now(on.place(2), target, 7)


def test_large_records_on_memory(bench):
    """Objects of several MiB, as they are by default: TensorStore keeps none of the slot."""
    on = bench(jmo.Remote("memory://x"))
    size = 24 * 2**20
    on.engine.add_slots(2, size)
    on.backend.add_array("a/large", 2, size)
    views = [on.engine.slot_view(SLOTS + index, size) for index in range(2)]
    views[0][:] = np.arange(size // 4, dtype=np.uint32).view(np.uint8)
    place = dataclasses.replace(on.place(1), array="a/large", size_bytes=size)
    on.backend.write(place, SLOTS, 1)
    crc = native.crc32c(views[0])
    assert on.end(1) == ("", 0, crc)
    views[0][:] = 0
    on.backend.read(place, SLOTS + 1, crc, 2)
    assert on.end(2) == ("", 0, crc)


@pytest.mark.parametrize("io", ["native", "tensorstore"])
def test_both_ways_to_a_directory_leave_the_same_array(io, tmp_path, bench):
    """What one wrote the other reads."""
    on = bench(jmo.File(tmp_path, io=io))
    crcs = [on.fill(slot, slot) for slot in range(SLOTS)]
    for slot in range(SLOTS):
        assert on.end(on.write(3 * slot, slot)) == ("", 0, crcs[slot])
    path = next(tmp_path.glob("jmo-*/a/b0.d0"))
    described = json.loads((path / "zarr.json").read_text())
    assert described == metadata(16, RECORD, RECORD)
    assert sorted(str(file.relative_to(path)) for file in path.glob("c/*/*")) == ["c/0/0", "c/3/0", "c/6/0", "c/9/0"]
    array = ts.open({"driver": "zarr3", "kvstore": f"file://{path}/"}).result(timeout=10)
    target = np.empty(RECORD, np.uint8)
    for slot, crc in enumerate(crcs):
        np.testing.assert_array_equal(array[3 * slot].read().result(timeout=10), on.slots[slot])
        native.read_file(str(path / f"c/{3 * slot}/0"), target, crc, True)
        np.testing.assert_array_equal(target, on.slots[slot])


# -- capacity and limits


def stored_bytes(bucket, under):
    """Bytes of all records' objects; one that was deleted since has none."""
    keys = [key for key in bucket.keys(under) if CHUNKS in key]
    return sum(len(bucket.kv.read(key).result(timeout=10).value) for key in keys)


def test_capacity(s3, tmp_path):
    params = make_params({"w": (60000,)})
    capacity = 120_000
    tier = s3.tier("capacity", capacity=capacity)
    with jmo.Store(tier, tmp_path, host_memory="150KB", subgroup_elements=4096) as store:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        for grad in record_gradients(params, 4):
            params, state = jax.block_until_ready(step(params, state, grad))
            store.flush()
            until(lambda: stored_bytes(s3, "capacity") <= capacity)
        assert_used_tiers(store)
    assert not s3.keys("capacity")


@pytest.mark.parametrize("direction", ["read", "write"])
def test_limits(direction, bench):
    """Never faster than a device of that bandwidth; how much slower is not judged."""
    limit_bps = 20 * RECORD
    on = bench(jmo.Remote("memory://x", **{f"{direction}_limit": limit_bps}, object_bytes=PAGE))
    crcs = [on.fill(slot, slot) for slot in range(SLOTS)]
    for is_write in (True, False):
        start_s = time.monotonic()
        for slot in range(SLOTS):
            on.write(slot, slot) if is_write else on.read(slot, slot, crcs[slot])
        assert [end[:2] for end in on.events(count=SLOTS).values()] == [("", 0)] * SLOTS
        if is_write == (direction == "write"):
            assert time.monotonic() - start_s >= SLOTS * RECORD / limit_bps - 0.002


def test_attempts_that_failed_are_paid_for(s3, proxy, bench):
    limit_bps = 10 * RECORD
    on = bench(quick(s3, proxy, write_limit=limit_bps, object_bytes=RECORD))
    struck = proxy.fail(method="PUT", contains=CHUNKS, status=503, times=2)
    start_s = time.monotonic()
    assert on.end(on.write(0, 0))[:2] == ("", 0)
    assert struck.met == 2
    assert time.monotonic() - start_s >= 3 * RECORD / limit_bps - 0.002


def test_time_in_the_queue_is_not_storage_time(s3, proxy, bench):
    on = bench(quick(s3, proxy, request_timeout_s=30.0, connections=1, object_bytes=RECORD))
    struck = proxy.fail(method="PUT", contains=CHUNKS, late=True)
    first = on.write(0, 0)
    until(lambda: struck.met)
    on.write(1, 1)
    on.backend._loop.run(asyncio.sleep(0))  # the loop has heard of it
    free_s = native.now_s()  # so long the one connection is taken
    proxy.heal()
    begun_s = {}
    while len(begun_s) < 2:
        begun_s |= {event[1]: event[6] for event in on.engine.wait(30.0, 64)}
    assert begun_s.pop(first) < free_s <= begun_s.popitem()[1]


# -- directories through TensorStore


def test_what_placement_hears_of_a_directory(tmp_path, bench):
    on = bench(jmo.File(tmp_path, io="tensorstore"))
    assert on.backend.facts()["exclusive"] == {"on": False, "why": "io='tensorstore' takes no turns"}
    assert on.backend.free_bytes() > 0
    on.backend.add_array("a/huge", 1, 2**60)  # TensorStore needs room for it beside what it takes the place of
    assert on.backend.free_bytes() == 0


@pytest.mark.skipif(
    subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0,
    reason="unshare -Urm is not permitted here, so no small file system can be mounted",
)
def test_a_directory_that_is_full(tmp_path):
    """It takes as many records as fit, and no write of it fails."""
    process = start_python(
        """
        import subprocess
        small, large = (f"{sys.argv[1]}/{name}" for name in ("small", "large"))
        os.mkdir(small)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3600k", "none", small], check=True)
        tiers = [jmo.File(small, io="tensorstore"), jmo.File(large, io="tensorstore", write_limit="1GB")]
        params = {"w": jnp.ones(1_000_000)}
        told = []
        with jmo.Store(*tiers, host_memory="2MB", subgroup_elements=40000) as store:
            tx = jmo.adam(1e-2, store=store)
            step, state = make_step(tx), tx.init(params)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for _ in range(20):
                    params, state = jax.block_until_ready(step(params, state, params))
                store.flush()
            stats = store.stats()["tiers"]
        assert not [str(w.message) for w in seen if "write of" in str(w.message)]
        assert [tier["retired"] for tier in stats] == [False, False]
        assert 0 < stats[0]["held_bytes"] <= 3600 * 1024
        assert stats[1]["stored_bytes"] > 0
        """,
        tmp_path,
        unshare=True,
    )
    finish(process)


# -- leases


def test_leftovers_and_the_living(s3):
    """What a killed process left is removed, and what belongs to a living one is not."""
    other = start_python(
        """
        spec = json.loads(sys.argv[1])
        params = make_params({"w": (40000,)}, seed=7)
        store = jmo.Store(jmo.Remote(spec), host_memory="200KB", subgroup_elements=4096)
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        for grad in record_gradients(params, 3):
            params, state = step(params, state, grad)
        jax.block_until_ready(params)
        store.flush()
        print("ready", flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        json.dumps({**s3.spec, "path": "left"}),
    )
    try:
        assert other.stdout.readline() == "ready\n", other.communicate()[1]
        theirs = [key for key in s3.keys("left/") if not re.search("/c/", key)]
        assert len(s3.keys("left/")) > len(theirs) > 1
        bystanders = {"left/else": b"1", "left/jmo-0123/x": b"2", "left/jmo-leases/0123": b"no lease"}
        mine = Lease.mine()
        expired = dataclasses.replace(mine, boot="another", renewed_s=time.time() - 25 * 3600)
        for own, lease in {
            "e1": expired,
            "e2": dataclasses.replace(mine, began_ticks=mine.began_ticks + 1),  # its pid was given out again
            "f1": dataclasses.replace(mine, boot="another"),
            "f2": dataclasses.replace(mine, pid_namespace="pid:[1]", pid=2**22 - 1),
            "f3": mine,
        }.items():
            bystanders |= {f"left/jmo-leases/{own}": lease.text(), f"left/jmo-{own}/data": b"3"}
        for key, value in bystanders.items():
            s3.kv.write(key, value).result(timeout=10)
        gone = {key for key in bystanders if re.search("/e[12]", key.replace("jmo-e", "/e"))}
        assert len(gone) == 4

        def there():
            return set(s3.keys("left/"))

        with jmo.Store(s3.tier("left")), jmo.Store(s3.tier("left")):
            until(lambda: not gone & there())
            assert set(theirs) <= there()
        assert set(bystanders) - gone <= there()
        other.stdin.write("\n")
        other.stdin.flush()
        other.wait(60)
        assert set(theirs) <= there()
        with jmo.Store(s3.tier("left")):
            until(lambda: there() >= set(bystanders) - gone and len(there()) == len(set(bystanders) - gone) + 1)
        assert there() == set(bystanders) - gone
    finally:
        other.kill()
        other.communicate()
        for key in s3.keys("left/"):
            s3.kv.write(key, None).result(timeout=10)


def test_two_stores_in_one_bucket(s3):
    with tiered([s3.tier("two")]) as one, tiered([s3.tier("two")]) as two:
        check(one, jnp.float32)
        one.close()
        assert s3.keys("two")
        check(two, BF16)
    assert not s3.keys("two")


def test_a_store_that_nobody_knows(tmp_path):
    with pytest.raises(ValueError, match=r"tier 'nosuch://x/y': TensorStore opens no such store"):
        jmo.Store(tmp_path, "nosuch://x/y")
    with pytest.raises(OSError, match=r"tier 's3://no-such-bucket/x' cannot be used: .*Could not connect"):
        jmo.Store(
            tmp_path,
            jmo.Remote(
                {
                    "driver": "s3",
                    "bucket": "no-such-bucket",
                    "path": "x",
                    "endpoint": "http://127.0.0.1:1",
                    "aws_region": "x",
                },
                request_timeout_s=5.0,
            ),
        )
    assert not list(tmp_path.iterdir())
    assert not threads()
