"""Cases from the field (``D``, ``X``), against plain optax: folders, paths and file systems."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import signal
import subprocess
import time

import jax
import optax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import driver, exclusive
from jax_mlp_offload.backends import folder
from jax_mlp_offload.backends.folder import Folder
from tests.processes import finish, start_python
from tests.support import (
    advance,
    assert_bits_equal,
    assert_close,
    check_against_optax,
    make_params,
    make_step,
    record_gradients,
    run,
    run_reference,
)

MEMORY = "110KB"  # two or three records of 4096 elements


# -- D6: folders


def test_d6_leftovers_and_two_processes_in_one_folder(tmp_path):
    """A process lives beside us in the same folder, unharmed; once it was killed, what it left is removed."""
    other = start_python(
        """
        params = make_params({"w": (40000,)}, seed=7)
        grads = record_gradients(params, 6, seed=8)
        store = jmo.Store(sys.argv[1], host_memory="200KB", subgroup_elements=4096)
        tx = jmo.adam(1e-2, store=store)
        step, state, p = make_step(tx), tx.init(params), params
        for grad in grads[:3]:
            p, state = step(p, state, grad)
        jax.block_until_ready(p)
        print("ready", flush=True)
        sys.stdin.readline()
        for grad in grads[3:]:
            p, state = step(p, state, grad)
        expected, _ = run_reference(optax.adam(1e-2), params, grads)
        assert_close(p, expected)
        assert store.stats()["misses"] > 0
        print("equal", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    try:
        assert other.stdout.readline() == "ready\n", other.communicate()[1]
        theirs = set(tmp_path.iterdir())
        assert len(theirs) == 1
        params = make_params({"w": (40000,)})
        grads = record_gradients(params, 4)
        with jmo.Store() as store:
            expected, _ = run(jmo.adam(1e-2, store=store), params, grads)

        def run_here():
            with jmo.Store(tmp_path, host_memory="200KB", subgroup_elements=4096) as store:
                new, _ = run(jmo.adam(1e-2, store=store), params, grads)
                assert store.stats()["misses"] > 0
                assert_bits_equal(new, expected)
                return set(tmp_path.iterdir())

        assert theirs < run_here()
        assert set(tmp_path.iterdir()) == theirs
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "equal\n", other.communicate()[1]
        other.wait(60)
    finally:
        other.kill()
        other.communicate()
    assert list(next(iter(theirs)).glob("*/*/c/*/0")), "the killed process left nothing: this test shows nothing"
    assert not theirs & run_here()
    assert not list(tmp_path.iterdir())


def test_d6_a_forked_child_does_not_keep_what_a_killed_parent_left(tmp_path, monkeypatch):
    """Lock files of turns in a directory of their own, so that tests in other processes are not met."""
    tier, turns = tmp_path / "tier", tmp_path / "turns"
    turns.mkdir()
    monkeypatch.setattr(exclusive, "_directory", lambda: turns)
    process = start_python(
        """
        import pathlib, time
        from jax_mlp_offload import exclusive
        exclusive._directory = lambda: pathlib.Path(sys.argv[2])
        store = jmo.Store(sys.argv[1], exclusive=True)
        warnings.simplefilter("ignore")  # of JAX, that it does not survive a fork
        child = os.fork()
        if child:
            print(child, flush=True)
        else:
            os.closerange(0, 3)  # the pipes, which end with the parent
        time.sleep(600)
        """,
        tier,
        turns,
    )
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.communicate(timeout=30)
        assert len(list(tier.iterdir())) == 1
        with jmo.Store(tier) as store:
            assert len(list(tier.iterdir())) == 1
            assert "alone" in store.stats()["tiers"][0]["exclusive"]["why"]
    finally:
        os.kill(child, signal.SIGKILL)


def test_d6_folders_of_other_machines(tmp_path, monkeypatch):
    """On file systems where a lock is seen on its own machine only, a free one says nothing about another's folder."""

    def leave(name, age_s):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name / "lock", (time.time() - age_s,) * 2)

    mine = f"jmo-{folder.boot_id()[:8]}-dead"
    leave("jmo-other", 23 * 3600)
    leave("jmo-other-dead", 25 * 3600)
    leave(mine, 0)
    with jmo.Store(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} >= {"jmo-other"}
        assert not (tmp_path / "jmo-other-dead").exists()
        assert not (tmp_path / mine).exists()

    # the living renew theirs
    monkeypatch.setattr(driver, "_RENEWAL_S", 0.1)
    with jmo.Store(tmp_path) as store:
        (own,) = set(tmp_path.iterdir()) - {tmp_path / "jmo-other"}
        os.utime(own / "lock", (0, 0))
        until_s = time.monotonic() + 60
        while (own / "lock").stat().st_mtime == 0:  # though nothing is asked of the store
            assert time.monotonic() < until_s
            time.sleep(0.05)
        store.stats()


def test_d6_five_runs_in_a_row(tmp_path):
    params = make_params({"w": (20000,)})
    grads = record_gradients(params, 3)
    sizes = []
    for _ in range(5):
        with jmo.Store(tmp_path, host_memory=MEMORY, subgroup_elements=4096) as store:
            run(jmo.adam(1e-2, store=store), params, grads)
            store.flush()
            sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*")))
            assert store.stats()["tiers"][0]["bytes_read"] > 0
        assert not list(tmp_path.iterdir())
    assert max(sizes) <= min(sizes) * 1.1


# -- D7, X2: file systems that are full or read-only


def test_d6_many_start_in_one_folder_at_once(tmp_path):
    def start(_):
        for _ in range(200):
            Folder(jmo.File(tmp_path)).close()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(start, range(4)))
    assert not list(tmp_path.iterdir())


def test_d9_a_folder_that_vanishes_before_the_first_step(two_tiers):
    params = make_params({"w": (20000,)})
    grads = record_gradients(params, 3)
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        step.lower(params, state, grads[0])  # the arrays are made
        shutil.rmtree(next(pathlib.Path(two_tiers[0]).iterdir()))
        with pytest.warns(jmo.TierWarning, match="No such file"):
            new, _ = advance(step, params, state, grads, store)
        expected, _ = run_reference(optax.adam(1e-2), params, grads)
        assert_close(new, expected)
        assert [tier["retired"] for tier in store.stats()["tiers"]] == [True, False]


@pytest.mark.skipif(
    subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0,
    reason="unshare -Urm is not permitted here, so no small file system can be mounted",
)
def test_d7_a_full_file_system(tmp_path):
    for name in ("small", "large", "readonly", "source"):
        (tmp_path / name).mkdir()
    process = start_python(
        """
        import subprocess
        root = sys.argv[1]
        small, large = f"{root}/small", f"{root}/large"
        mount = lambda *args: subprocess.run(["mount", *args], check=True)
        mount("-t", "tmpfs", "-o", "size=4m", "none", small)
        params = make_params({"left": (800000,), "right": (1200000,)})  # 16 MB of moments
        grads = record_gradients(params, 4)
        expected, moments = run_reference(optax.adam(1e-2), params, grads)
        options = {"host_memory": "1MiB", "subgroup_elements": 32768}

        def is_full(error):
            text = str(error)
            return "No space left" in text and small in text and ("left" in text or "right" in text)

        # full from the start: the other tier takes over
        with jmo.Store(small, large, **options) as store:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                new, state = run(jmo.adam(1e-2, store=store), params, grads)
                store.flush()
            assert_close(new, expected)
            assert_close(jmo.read_state(state), moments)
            told = [w for w in seen if w.category is jmo.TierWarning]
            assert len(told) == 1 and is_full(told[0].message), [str(w.message) for w in seen]
            assert not any(tier["retired"] for tier in store.stats()["tiers"])  # full is not broken
            assert 0 < store.stats()["tiers"][0]["bytes_written"]

        # space that vanishes in mid-run: likewise, and what is stored there is read on
        mount("-o", "remount,size=16m", small)
        with jmo.Store(small, large, **options) as store:
            tx = jmo.adam(1e-2, store=store, name="first")
            step, state, new = make_step(tx), tx.init(params), params
            for grad in grads[:2]:
                new, state = step(new, state, grad)
            jax.block_until_ready(new)
            store.flush()
            assert not any(tier["retired"] for tier in store.stats()["tiers"])
            free = os.statvfs(small)
            with open(f"{small}/filler", "wb") as file:
                file.write(b"x" * (free.f_bavail * free.f_bsize))
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                later, _ = run(jmo.adam(1e-2, store=store, name="second"), params, grads)
                store.flush()
            assert [w.category for w in seen] == [jmo.TierWarning], [str(w.message) for w in seen]
            assert_close(later, expected)
            read = store.stats()["tiers"][0]["bytes_read"]
            for grad in grads[2:]:
                new, state = step(new, state, grad)
            assert_close(new, expected)
            assert_close(jmo.read_state(state), moments)
            assert store.stats()["tiers"][0]["bytes_read"] > read
        os.remove(f"{small}/filler")
        mount("-o", "remount,size=4m", small)

        # none left: an error by name, and the process lives on
        store = jmo.Store(small, **options)
        tx = jmo.adam(1e-2, store=store)
        try:
            run(tx, params, grads)
            store.flush()
        except (RuntimeError, jmo.OffloadError) as error:
            assert is_full(error), error
        else:
            raise AssertionError("no error")
        try:
            store.close()
        except jmo.TierError as error:
            assert is_full(error), error
        else:
            raise AssertionError("no error at close")
        assert not [name for name in os.listdir(small) if name.startswith("jmo-")]
        with jmo.Store(large, **options) as store:
            new, _ = run(jmo.adam(1e-2, store=store), params, grads)
            assert_close(new, expected)

        # X2: read-only
        mount("--bind", f"{root}/source", f"{root}/readonly")
        mount("-o", "remount,ro,bind", f"{root}/readonly")
        try:
            jmo.Store(large, f"{root}/readonly")
        except OSError as error:
            assert "Read-only" in str(error) and f"{root}/readonly" in str(error), error
        else:
            raise AssertionError("a read-only tier was taken")
        assert not os.listdir(large)
        print("all well")
        """,
        tmp_path,
        unshare=True,
    )
    assert finish(process).endswith("all well\n")


# -- X2: paths


def use(*paths):
    params = make_params({"w": (20000,)})
    grads = record_gradients(params, 3)
    with jmo.Store(*paths, host_memory=MEMORY, subgroup_elements=4096) as store:
        check_against_optax(jmo.adam(1e-2, store=store), optax.adam(1e-2), params, grads)
        assert store.stats()["tiers"][0]["bytes_read"] > 0


def test_x2_paths_that_work(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    use(str(tmp_path / "link"))
    assert not list((tmp_path / "real").iterdir())
    use(tmp_path / "new")  # its parent is there
    assert (tmp_path / "new").is_dir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    params = make_params({"w": (20000,)})
    with jmo.Store("real", host_memory=MEMORY, subgroup_elements=4096) as store:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        params, state = step(params, state, params)
        os.chdir(tmp_path / "elsewhere")  # where the program goes later does not matter
        params, state = step(params, state, params)
        jax.block_until_ready(params)
        assert store.stats()["tiers"][0]["bytes_read"] > 0
    assert not list((tmp_path / "real").iterdir())
