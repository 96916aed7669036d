"""Cases from the field (``D``, ``X``: public bug reports of systems that do this job), against plain optax: storage."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from tests.support import (
    BF16,
    SMALL_SHAPES,
    assert_bits_equal,
    assert_close,
    check_against_optax,
    make_params,
    make_step,
    record_gradients,
    run,
    run_and_flush,
    run_reference,
)

ROOT = pathlib.Path(__file__).parents[1]
MEMORY = "110KB"  # two or three records of 4096 elements


def start_python(code, *args, unshare=False):
    """A process that runs ``code`` with this package and one CPU device."""
    prelude = "import jax, jax.numpy as jnp, optax, numpy as np, os, sys, signal, warnings, json\n" + (
        "import jax_mlp_offload as jmo\nfrom tests.support import *\n"
    )
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, args)]
    if unshare:
        command = ["unshare", "-Urm", "--propagation", "private", *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)


def finish(process, timeout_s=120):
    """Its output, once it has ended well."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the process hangs; {out}\n{err}")
    assert process.returncode == 0, f"{out}\n{err}"
    return out


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


def test_d6_a_forked_child_does_not_keep_what_a_killed_parent_left(tmp_path):
    process = start_python(
        """
        import time
        store = jmo.Store(sys.argv[1], exclusive=True)
        warnings.simplefilter("ignore")  # of JAX, that it does not survive a fork
        child = os.fork()
        if child:
            print(child, flush=True)
        else:
            os.closerange(0, 3)  # the pipes, which end with the parent
        time.sleep(600)
        """,
        tmp_path,
    )
    child = int(process.stdout.readline())
    try:
        process.kill()
        process.communicate(timeout=30)
        assert len(list(tmp_path.iterdir())) == 1
        with jmo.Store(tmp_path) as store:
            assert len(list(tmp_path.iterdir())) == 1
            assert "alone" in store.stats()["tiers"][0]["exclusive"]["why"]
    finally:
        os.kill(child, signal.SIGKILL)


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


# -- D9: a tier that fails in the background


FAILURES = (jmo.TierError, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize("ask", ["update", "flush", "close"])
def test_d9_a_failed_write_is_told_of(ask, two_tiers):
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 4)
    native.inject_fault(path_prefix=two_tiers[0], is_write=True, after_count=2, error_number=errno.EIO)
    store = jmo.Store(two_tiers[0], host_memory=MEMORY, subgroup_elements=4096)
    tx = jmo.adam(1e-2, store=store)
    step, state = make_step(tx), tx.init(params)

    def go():
        new, after = step(params, state, grads[0])
        for grad in grads[1:] if ask == "update" else ():
            new, after = step(new, after, grad)
        jax.block_until_ready(new)
        if ask != "update":
            getattr(store, ask)()

    try:
        with pytest.raises(FAILURES, match=r"leaves .*(embed|wide|bias|scalar)") as caught:
            go()
        text = str(caught.value)
        assert two_tiers[0] in text
        assert "Input/output error" in text
        if ask == "flush":
            with pytest.raises(jmo.TierError):  # and again, until the state is made anew
                store.flush()
    finally:
        store._close_quietly()
    assert not os.listdir(two_tiers[0])


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_d9_another_tier_takes_over(dtype, two_tiers):
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 5)
    with jmo.Store() as store:
        expected, state = run(jmo.adamw(1e-2, store=store), params, grads)
        moments = jmo.read_state(state)
    native.inject_fault(path_prefix=two_tiers[0], is_write=True, after_count=2, error_number=errno.EIO)
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        with pytest.warns(jmo.TierWarning, match="Input/output error") as told:
            new, state = run_and_flush(store, jmo.adamw(1e-2, store=store), params, grads)
        assert two_tiers[0] in str(told[0].message)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), moments)
        assert [tier["retired"] for tier in store.stats()["tiers"]] == [True, False]


def test_d9_a_failed_read_is_told_of(two_tiers):
    """What was on the tier is lost: no other can stand in."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 4)
    store = jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096)
    try:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        new, state = step(params, state, grads[0])
        store.flush()
        native.inject_fault(path_prefix=two_tiers[1], is_write=False, error_number=errno.EIO)
        with pytest.raises(FAILURES, match="Input/output error") as caught:
            run(tx, new, grads[1:], state)
        assert two_tiers[1] in str(caught.value)
        native.clear_faults()
        new, _ = run(tx, params, grads)  # init makes the optimizer whole again
        expected, _ = run_reference(optax.adam(1e-2), params, grads)
        assert_close(new, expected)
    finally:
        store._close_quietly()


# -- D12, D15, X6: long runs and odd timing


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_d12_open_files_and_memory_stay_flat(two_tiers):
    params = make_params({"w": (256, 256), "v": (300,)})
    grads = record_gradients(params, 2)
    with jmo.Store(*two_tiers, host_memory="150KB", subgroup_elements=8192) as store:
        tx = jmo.adamw(1e-3, store=store)
        step, state = make_step(tx, donate=True), tx.init(params)
        files, memory, sizes = [], [], []
        for index in range(200):
            params, state = step(params, state, grads[index % 2])
            jax.block_until_ready(params)
            if index % 5 == 4:
                store.flush()
                files.append(len(os.listdir("/proc/self/fd")))
                memory.append(resident_bytes())
                sizes.append(sum(p.stat().st_size for t in two_tiers for p in pathlib.Path(t).rglob("0")))
        stats = store.stats()
        assert stats["misses"] > 200
        assert max(files) == files[0]
        assert max(memory[20:]) - memory[8] < 16 * 2**20
        # no more than every record twice: once where it is and once as a file that is taken over
        assert max(sizes) <= 2 * stats["record_bytes_total"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_d15_delays_change_no_bit(dtype, seed, two_tiers):
    """Tiers complete out of order, two or three slots, donation on."""
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, 4)
    with jmo.Store() as store:
        expected, state = run(jmo.adamw(1e-2, store=store), params, grads, donate=True)
        moments = jmo.read_state(state)
    for index, tier in enumerate(two_tiers):
        for is_write in (False, True):
            native.inject_fault(
                path_prefix=tier, is_write=is_write, min_delay_s=0.0, max_delay_s=0.02, seed=10 * seed + index
            )
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        new, state = run(jmo.adamw(1e-2, store=store), params, grads, donate=True)
        assert_bits_equal(new, expected)
        assert_bits_equal(jmo.read_state(state), moments)
        assert store.stats()["misses"] > 0


@pytest.mark.timeout(60)
def test_x6_steps_dispatched_ahead(two_tiers):
    """100 updates that nobody waits for, and then two steps of two optimizers on their way at once."""
    params = make_params(SMALL_SHAPES)
    grads = record_gradients(params, 100)
    with jmo.Store(*two_tiers, host_memory=MEMORY, subgroup_elements=4096) as store:
        one, two = (jmo.adam(1e-2, store=store, name=name) for name in ("one", "two"))
        step, other = make_step(one, donate=True), make_step(two)
        a, b = jax.tree.map(jnp.copy, params), params
        state_a, state_b = one.init(a), two.init(b)
        for index, grad in enumerate(grads):
            a, state_a = step(a, state_a, grad)
            if index % 20 == 0:
                b, state_b = other(b, state_b, grad)
        jax.block_until_ready((a, b))
        assert int(state_a.count) == 100
        expected, _ = run_reference(optax.adam(1e-2), params, grads[::20])
        assert_close(b, expected)
        expected, _ = run_reference(optax.adam(1e-2), params, grads)
        assert_close(a, expected, 1e-5)  # a hundred steps
        assert store.stats()["misses"] > 100


def test_x1_a_leaf_of_three_times_the_memory(two_tiers):
    params = make_params({"w": (3 * 16384,)})
    grads = record_gradients(params, 4)
    with jmo.Store(*two_tiers, host_memory=16384 * 8, subgroup_elements=4096) as store:
        check_against_optax(jmo.adam(1e-2, store=store), optax.adam(1e-2), params, grads)
        stats = store.stats()
        assert stats["host_bytes"] <= 16384 * 8
        assert stats["record_bytes_total"] >= 3 * stats["host_bytes"]


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
