"""Cases D6, D7, D9, D13 and X2 on every kind of tier, alone and mixed, on one and on eight devices.

What other files test of one kind (``test_cases_storage``: native directories, ``test_remote_faults``: S3) is tested of
the others here. No fault is made up: file systems and servers refuse, and files change.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import textwrap
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_mlp_offload as jmo
from jax_mlp_offload import probe
from tests import support
from tests.processes import finish, start_python
from tests.servers import CHUNKS, FaultProxy, quick, threads
from tests.support import BF16, advance, assert_bits_equal, assert_used_tiers

pytest_plugins = ("tests.server_fixtures",)
pytestmark = pytest.mark.timeout(90)

FAILURES = (jmo.OffloadError, jax.errors.JaxRuntimeError)
HOST_MEMORY = {1: "400KB", 8: "800KB"}  # of 32 records, 4 on each of 8 devices: 24 of float32 params or fewer
SHAPES = {"a": (128, 512), "b": (512, 128)}
SPECS = {"a": PartitionSpec("fsdp", None), "b": PartitionSpec(None, "fsdp")}
F32, POISON = jnp.float32, 2**32 - 1


@functools.cache
class World:
    """A model on so many devices, and what host memory alone makes of it."""

    def __init__(self, devices=1, dtype=F32):
        self.mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
        shardings = {name: NamedSharding(self.mesh, spec) for name, spec in SPECS.items()}
        params = support.make_params(SHAPES, dtype)
        self.params, *self.grads = jax.device_put([params, *support.record_gradients(params, 3)], [shardings] * 4)
        with jmo.Store() as store:
            self.expected = self.result(*support.run(self.optimizer(store), self.params, self.grads))

    def optimizer(self, store, name=None):
        return jmo.adamw(1e-2, weight_decay=0.1, store=store, mesh=self.mesh, param_specs=SPECS, name=name)

    def result(self, params, state):
        return jax.device_get((params, jmo.read_state(state)))

    def begin(self, store, steps):
        """A jitted step, and params and state after so many."""
        tx = self.optimizer(store)
        step = support.make_step(tx)
        return step, *advance(step, self.params, tx.init(self.params), self.grads[:steps], store)

    def check(self, store, name=None):
        """A run with this store has the bits of host memory."""
        result = self.result(*support.run(self.optimizer(store, name), self.params, self.grads))
        store.flush()
        assert_bits_equal(result, self.expected)


def open_store(*tiers, devices=1):
    return jmo.Store(*tiers, host_memory=HOST_MEMORY[devices], subgroup_elements=4096)


@pytest.fixture
def make(request, tmp_path):
    """Makes a place of a kind (``"native"``, ``"tensorstore"``, ``"s3"``): a tier, what lies there, and how it fails."""

    def make_prefix():
        s3, proxy, path = request.getfixturevalue("s3"), request.getfixturevalue("proxy"), f"tiers/{tmp_path.name}"
        refusal = {"method": "PUT", "contains": CHUNKS, "status": 400, "code": "InvalidArgument"}
        tier, left = quick(s3, proxy, path, object_bytes="64KiB"), lambda: s3.keys(f"{path}/")
        return types.SimpleNamespace(tier=tier, kv=s3.kv, left=left, refuse_writes=lambda: proxy.fail(**refusal))

    def make_directory(io):
        root = tmp_path / io

        def refuse_writes():
            """TensorStore writes a file beside the old one and renames it: a directory is there from now on."""
            for folder in root.glob("jmo-*/*-adam*"):
                for bucket, device, row in itertools.product(range(2), range(8), range(16)):
                    (folder / f"b{bucket}.d{device}/c/{row}/0.__lock").mkdir(parents=True, exist_ok=True)

        kv, left = ts.KvStore.open("file:///").result(10), lambda: [str(path)[1:] for path in root.rglob("*")]
        return types.SimpleNamespace(tier=jmo.File(root, io=io), kv=kv, left=left, refuse_writes=refuse_writes)

    yield lambda kind: make_prefix() if kind == "s3" else make_directory(kind)
    assert not threads()


def records(place):
    found = {key: place.kv.read(key).result(10).value for key in place.left() if re.search(r"/c/\d+/\d+$", key)}
    return {key: data for key, data in found.items() if data}  # but for what was just deleted


CHILD = """
params = make_params({"w": (65536,)}, seed=7)  # 16 records
grads = record_gradients(params, 5, seed=8)
with jmo.Store() as alone:
    expected, _ = run(jmo.adam(1e-2, store=alone), params, grads)

def begin(*tiers, steps=0, memory="110KB"):
    store = jmo.Store(*tiers, host_memory=memory, subgroup_elements=4096)
    tx = jmo.adam(1e-2, store=store)
    step = make_step(tx)
    return store, step, *advance(step, params, tx.init(params), grads[:steps], store)

def tell():
    print("ok", flush=True)
    sys.stdin.readline()
"""


def start(code, *args, unshare=False):
    return start_python(CHILD + textwrap.dedent(code), *args, unshare=unshare)


def await_ok(process, go_on=False):
    """Waits until the process tells; ``go_on``: once it has heard that it may."""
    process.stdin.write("\n" * go_on)
    process.stdin.flush()
    assert process.stdout.readline() == "ok\n", process.communicate()[1]


def test_d6_neighbours_leftovers_and_growth(make):
    """Two stores here beside one of another process, in the same places; that is killed; then five runs in a row."""
    places = [make(kind) for kind in ("tensorstore", "s3")]
    tiers = [place.tier for place in places]
    other = start(
        """
        tiers = jmo.File(sys.argv[1], io="tensorstore"), jmo.Remote(json.loads(sys.argv[2]))
        store, step, params, state = begin(*tiers, steps=2)
        tell()
        assert_bits_equal(advance(step, params, state, grads[2:], store)[0], expected)
        tell()
        """,
        *(tiers[0].path, json.dumps(tiers[1].kvstore)),
    )
    try:
        await_ok(other)
        theirs = [records(place) for place in places]
        assert all(theirs)
        with open_store(*tiers) as one, open_store(*tiers) as two:
            World().check(one)
            one.close()
            World(dtype=BF16).check(two)
            assert_used_tiers(two)
        assert [records(place) for place in places] == theirs
        await_ok(other, go_on=True)
    finally:
        other.kill()
        other.communicate()
    theirs = {key for place in places for key in records(place)}
    assert len({key.partition("jmo-")[0] for key in theirs}) == 2  # in either place
    for _ in range(5):
        with open_store(*tiers) as store:
            World().check(store)
            assert_used_tiers(store)
            while theirs & (found := records(places[0]) | records(places[1])).keys():
                time.sleep(0.05)  # what is left in a bucket goes in the background
            # once where a record is, and once as what is about to be deleted
            assert 0 < sum(map(len, found.values())) <= 2 * store.stats()["record_bytes_total"]
        assert not any(place.left() for place in places)


@pytest.mark.parametrize(("kind", "devices", "dtype", "limits"), [
    ("native", 8, F32, (170_000, 200_000, 1000)),
    ("tensorstore", 1, BF16, (500_000, 700_000, 1000)),
    ("memory", 8, F32, (170_000, 200_000, 1000)),
])  # fmt: skip
def test_d7_capacities(kind, devices, dtype, limits, tmp_path):
    """Two that suffice together only, beside one too small for any record; then the first without the second."""
    names = [f"memory://{n}" if kind == "memory" else tmp_path / f"{n}" for n in range(3)]
    tier_of = jmo.Remote if kind == "memory" else functools.partial(jmo.File, io=kind)
    tiers = [tier_of(name, capacity=limit) for name, limit in zip(names, limits, strict=True)]
    where = World(devices, dtype)
    with open_store(*tiers, devices=devices) as store:
        step, params, state = where.begin(store, 0)
        for grad in where.grads:
            params, state = advance(step, params, state, [grad], store)
            stored = [tier["stored_bytes"] for tier in store.stats()["tiers"]]
            assert all(0 < size <= limit for size, limit in zip(stored[:2], limits[:2], strict=True)) and not stored[2]
        assert_bits_equal(where.result(params, state), where.expected)
    with open_store(tiers[0], tiers[2], devices=devices) as store:
        with pytest.raises(FAILURES, match=r"no tier has room for \d+ bytes of .*leaves \['[ab]'\].*more capacity"):
            where.begin(store, 2)
        store._close_quietly()
    with jmo.Store() as store:  # all devices are alive
        where.check(store)


@pytest.mark.skipif(subprocess.call(["unshare", "-Urm", "true"]) != 0, reason="unshare -Urm is not permitted here")
@pytest.mark.parametrize("io", ["native", "tensorstore"])
def test_d7_small_file_systems(io, tmp_path):
    """Room for half of the state, beside another tier and alone; a full one where space comes back."""
    process = start(
        """
        import errno, pytest, subprocess
        small, large, io = sys.argv[1:]
        filler, tier = f"{small}/filler", jmo.File(small, io=io)
        os.mkdir(small)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], check=True)

        def attempt(*tiers):
            store, step, new, state = begin(*tiers)
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    for index, grad in enumerate(grads):
                        if index == 2 and os.path.exists(filler):
                            os.remove(filler)
                        new, state = advance(step, new, state, [grad], store)
                assert_bits_equal(new, expected)
                texts = [str(warning.message) for warning in seen]
                assert texts and all(small in text and "No space left" in text for text in texts), texts
                # TensorStore writes a record beside the old one, so a little room does not do, and the tier is retired
                assert io == "tensorstore" or (len(texts) == 1 and not store.stats()["tiers"][0]["retired"]), texts
                assert all(tier["bytes_written"] for tier in store.stats()["tiers"])
            finally:
                store._close_quietly()

        attempt(tier, large)
        with pytest.raises((RuntimeError, jmo.OffloadError), match=f"leaves.*{small}.*No space|{small}.*No space.*leaves"):
            attempt(tier)
        with open(filler, "wb") as file:
            file.write(bytes(os.statvfs(small).f_bavail * os.statvfs(small).f_bsize))
        try:
            attempt(tier, large)
        except OSError as error:  # a page is tried at construction
            assert io == "tensorstore" and error.errno == errno.ENOSPC and small in str(error), error
        assert not [name for name in os.listdir(small) if name.startswith("jmo-")]
        """,
        *(tmp_path / "small", tmp_path / "large", io),
        unshare=True,
    )
    finish(process)


@pytest.mark.parametrize("kind", ["tensorstore", "s3"])
@pytest.mark.parametrize(("ask", "devices", "dtype"), [("update", 8, BF16), ("flush", 1, F32), ("close", 1, BF16)])
def test_d9_a_write_that_fails(ask, devices, dtype, kind, make, proxy, tmp_path):
    """Another tier takes over, with one warning; where there is none, the next update, flush or close raises."""
    place, where = make(kind), World(devices, dtype)
    with open_store(place.tier, tmp_path / "other", devices=devices) as store:
        step, params, state = where.begin(store, 1)
        place.refuse_writes()
        with pytest.warns(jmo.TierWarning, match="the tier is retired, writes go to .*other") as told:
            params, state = advance(step, params, state, where.grads[1:], store)
        assert len(told) == 1 and place.tier.name in str(told[0].message)
        assert_bits_equal(where.result(params, state), where.expected)
        assert [tier["retired"] for tier in store.stats()["tiers"]] == [True, False]
    assert not place.left() and not os.listdir(tmp_path / "other")

    proxy.heal()
    store = open_store(place.tier, devices=devices)
    step, params, state = where.begin(store, 1)
    place.refuse_writes()
    with pytest.warns(jmo.TierWarning, match="no other is left") as told:
        params, state = jax.block_until_ready(step(params, state, where.grads[1]))
    with pytest.raises(FAILURES, match=r"write of .*leaves \['[ab]'\]") as caught:
        jax.block_until_ready(step(params, state, where.grads[2])) if ask == "update" else getattr(store, ask)()
    assert place.tier.name in str(caught.value) and len(told) == 1
    assert ("Is a directory" if kind == "tensorstore" else "HTTP 400") in str(caught.value)
    store._close_quietly()
    assert not place.left()


@pytest.mark.parametrize(("kind", "harm"), [("tensorstore", "short"), ("s3", "altered")])
def test_d9_records_that_come_back_wrong_on_eight_devices(harm, kind, make):
    """All devices hear of it in the next update, and the same store goes on with a new state."""
    place, where = make(kind), World(8, BF16)
    with open_store(place.tier, devices=8) as store:
        step, params, state = where.begin(store, 2)
        for key, data in records(place).items():
            place.kv.write(key, data[:999] if harm == "short" else data[:-1] + bytes([data[-1] ^ 1])).result(10)
        params, state = jax.block_until_ready(step(params, state, where.grads[2]))
        assert [int(shard.data[0]) for shard in state.ticket.addressable_shards] == [POISON] * 8
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"leaves \['[ab]'\]") as caught:
            jax.block_until_ready(step(params, state, where.grads[2]))
        assert place.tier.name in str(caught.value)
        with pytest.raises(jmo.CorruptRecordError, match=re.escape(place.tier.name)):
            store.flush()
        where.check(store)
    assert not place.left()


def test_d13_a_bucket_and_a_directory_on_eight_devices(make, proxy, tmp_path):
    """First it is busy now and then, which nobody hears of; then it says nothing, and the directory takes over."""
    place, where = make("s3"), World(8, BF16)
    requests = itertools.product(("PUT", "GET"), (429, 503))
    busy = [proxy.fail(method=method, contains=CHUNKS, times=2, status=status) for method, status in requests]
    with open_store(place.tier, tmp_path / "other", devices=8) as store:
        where.check(store, "busy")
        bucket = store.stats()["tiers"][0]
        assert [fault.met for fault in busy] == [2] * 4 and bucket["retries"] == 8 and not bucket["retired"]
        proxy.fail(method="PUT", contains=CHUNKS, silent=True)
        with pytest.warns(jmo.TierWarning, match="no answer within 1 s.*writes go to") as told:
            where.check(store, "silent")
        assert len(told) == 1
    assert not os.listdir(tmp_path / "other")
    proxy.close()
    for key in place.left():  # of writes that may have been carried out after all
        place.kv.write(key, None).result(10)


def test_d13_google_cloud_storage(gcs, monkeypatch):
    """Busy now and then, with the bits of host memory; then the credentials are refused."""
    proxy = FaultProxy(gcs.port)
    of_records = {"contains": "%2Fc%2F"}
    for method, status in itertools.product(("POST", "GET"), (429, 503)):
        proxy.fail(method=method, times=2, status=status, **of_records)
    proxy.fail(times=250, **of_records)  # these go well: five steps and more
    proxy.fail(status=401, **of_records)
    code = """
        import pytest
        store, step, params, state = begin(jmo.Remote(sys.argv[1], retries=4), steps=5)
        assert_bits_equal(params, expected)
        assert store.stats()["tiers"][0]["retries"] == 8
        warnings.simplefilter("ignore", jmo.TierWarning)
        with pytest.raises((RuntimeError, jmo.OffloadError), match="gs://.*credentials were refused.*leaves"):
            advance(step, params, state, 10 * grads, store)
        os._exit(0)  # what is stored can neither be read nor deleted
        """
    with monkeypatch.context() as patch:  # TensorStore looks once a process, so this one must not see it
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{proxy.port}")
        process = start(code, f"gs://{gcs.spec['bucket']}/faults")
    try:
        finish(process)
    finally:
        process.kill()
        proxy.close()
        for key in gcs.keys("faults/"):
            gcs.kv.write(key, None).result(10)


@pytest.mark.parametrize("io", ["native", "tensorstore"])
def test_x2_places_that_work(io, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("real", "relative", "elsewhere", "by url %41"):
        os.mkdir(name)
    os.symlink("real", "link")
    odd = [tmp_path / "new ", tmp_path / "100% ü'\"#?&*[x]\n", f"{tmp_path}/real/../slash//"]
    tiers = [jmo.File(name, io=io) for name in ("link", "relative", *odd)]
    with open_store(*tiers, f"file://{tmp_path}/by%20url%20%2541") as store:
        os.chdir("elsewhere")
        os.remove(tmp_path / "link")  # where it led when the store was made is what counts
        World().check(store)
        assert_used_tiers(store)
    assert min(probe.measure_briefly(tiers[3], 4096, 0.05)) > 0
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="permissions do not bind root")
@pytest.mark.parametrize("io", ["native", "tensorstore"])
def test_x2_a_tier_that_is_taken_away(io, tmp_path):
    """Removed, or shut, while it holds nothing (equal) and while it holds records (named); the store goes on."""
    process = start(
        """
        import shutil
        if os.geteuid() == 0 and "JMO_BOUND" not in os.environ:  # so that permissions bind
            caps = "-dac_override,-dac_read_search"
            os.environ["JMO_BOUND"] = ""
            os.execvp("setpriv", ["setpriv", f"--bounding-set={caps}", f"--inh-caps={caps}", *sys.orig_argv])
        root, io = sys.argv[1:]
        gone, other = f"{root}/gone", f"{root}/other"
        warnings.simplefilter("ignore", jmo.TierWarning)
        remove, shut = shutil.rmtree, lambda path: os.chmod(path, 0)
        for harm, at, memory in ((remove, 2, "1MB"), (remove, 2, "110KB"), (shut, 0, "110KB"), (shut, 2, "110KB")):
            store, step, new, state = begin(jmo.File(gone, io=io), other, steps=at, memory=memory)
            assert (store.stats()["misses"] > 0) == (at == 2 and memory == "110KB")
            step.lower(new, state, grads[0])  # folders are made
            harm(gone)
            try:
                assert_bits_equal(advance(step, new, state, grads[at:], store)[0], expected)
            except (RuntimeError, jmo.OffloadError) as error:
                assert at and memory == "110KB" and gone in str(error) and "leaves" in str(error), error
            assert store.stats()["steps"] >= at  # the driver is alive
            store._close_quietly()
            if os.path.exists(gone):
                os.chmod(gone, 0o700)
        jmo.Store(gone).close()
        assert not os.listdir(gone) and not os.listdir(other)
        """,
        *(tmp_path, io),
    )
    finish(process)
