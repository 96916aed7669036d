"""Snapshots that are refused, by name: places, trees and optimizers that do not fit, storage that fails, and damage."""

from __future__ import annotations

import errno
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from jax_mlp_offload.snapshots import folder as snapshot_folder
from tests.meshes import P, mesh_of
from tests.processes import start_python
from tests.snapshots import SMALL, digest, flip, records, seen, train, train_on
from tests.support import BF16, SMALL_SHAPES, assert_bits_equal, make_params, make_step, record_gradients


@pytest.fixture
def taken(tmp_path):
    """A store after three steps, its optimizer and tree, and a snapshot of that."""
    params = make_params(SMALL_SHAPES, BF16)
    with jmo.Store(tmp_path / "tier", **SMALL) as store:
        tx = jmo.adamw(1e-2, store=store)
        tree = train(tx, params, record_gradients(params, 3))
        store.snapshot(tmp_path / "snapshot", tree)
        yield store, tx, tree, tmp_path / "snapshot"


def test_places_that_are_refused(taken, tmp_path):
    store, _, _, snapshot = taken
    old = digest(snapshot)
    with pytest.raises(FileExistsError, match="give a path that is not there"):
        store.snapshot(snapshot)
    assert digest(snapshot) == old
    with pytest.raises(ValueError, match=r"s3://b/x.* is a URL.*OffloadSave"):
        store.snapshot("s3://b/x")
    with pytest.raises(ValueError, match="is empty"):
        store.snapshot("")
    with pytest.raises(TypeError):
        store.snapshot(3)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="snapshot could not be written"):
        store.snapshot(tmp_path / "file" / "snapshot")
    assert store.stats()["snapshots"]["taken"] == 1


def test_a_tree_that_is_not_the_last(taken, tmp_path):
    store, tx, (params, state), _ = taken
    train_on(tx, (params, state), record_gradients(params, 1))
    with pytest.raises(jmo.StaleTicketError, match=rf"ticket {int(state.ticket[0])}, which is not the last one"):
        store.snapshot(tmp_path / "other", (params, state))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshot", "tier"]


def test_storage_that_fails(taken, tmp_path):
    """Nothing is left of it, and training goes on."""
    store, tx, (params, state), _ = taken
    kept = seen(state, params)
    native.inject_fault(str(tmp_path / ".new-"), is_write=True, error_number=errno.ENOSPC)
    with pytest.raises(OSError, match=r"could not be written.*No space left.*training can go on") as caught:
        store.snapshot(tmp_path / "other")
    assert caught.value.errno == errno.ENOSPC
    native.clear_faults()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshot", "tier"]
    assert store.stats()["snapshots"]["failed"] == 1
    assert_bits_equal(seen(state, params), kept)
    train_on(tx, (params, state), record_gradients(params, 2))
    store.snapshot(tmp_path / "other")


def test_what_a_dead_process_left(taken, tmp_path):
    store, *_ = taken
    for name in (".new-other-0123", ".new-other-4567", ".new-another-0123"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    living = snapshot_folder.lock(tmp_path / ".new-other-4567")
    store.snapshot(tmp_path / "other")
    left = sorted(path.name for path in tmp_path.glob(".new-*"))
    snapshot_folder.unlock(living)
    assert left == [".new-another-0123", ".new-other-4567"]


def test_locks_die_with_the_parent(tmp_path):
    """Not with its forks, such as a data loader's workers."""
    code = """
    from jax_mlp_offload.snapshots import folder as snapshot_folder
    lock = snapshot_folder.lock(snapshot_folder.pathlib.Path(sys.argv[1]))
    warnings.simplefilter("ignore")
    if os.fork() == 0:
        sys.stdin.readline()
        os._exit(0)
    print("forked", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    process = start_python(code, tmp_path)
    try:
        assert process.stdout.readline() == "forked\n"
        process.wait(timeout=60)
        snapshot_folder.unlock(snapshot_folder.lock(tmp_path))
    finally:
        process.communicate("\n")


def test_after_a_failed_update(taken, tmp_path):
    """The failed optimizer cannot be snapshotted; the message names the way on, and it goes on."""
    store, tx, (params, state), snapshot = taken
    step, grads = make_step(tx), record_gradients(params, 2, seed=7)
    expected = jax.device_get(train_on(tx, (params, state), grads))
    params, state = store.restore_snapshot(snapshot, (params, state))
    native.inject_fault(str(tmp_path / "tier"), is_write=False, error_number=errno.EIO)
    broken, poisoned = jax.block_until_ready(step(params, state, grads[0]))
    with pytest.raises(jmo.TierError, match="restore_snapshot"):
        store.snapshot(tmp_path / "other")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"go on with store\.restore_snapshot"):
        jax.block_until_ready(step(broken, poisoned, grads[0]))
    with pytest.raises(jmo.TierError, match="restore_snapshot"):
        store.flush()
    native.clear_faults()
    params, state = store.restore_snapshot(snapshot, (params, poisoned))
    assert_bits_equal(jax.device_get(train_on(tx, (params, state), grads)), expected)


def test_another_optimizer(taken, tmp_path):
    _, _, (params, _), snapshot = taken
    other = make_params({**SMALL_SHAPES, "wide": (64, 100)}, BF16)
    with jmo.Store() as store:
        with pytest.raises(
            jmo.CheckpointError, match=r"which this store does not know \(it knows none\); call its init"
        ):
            store.restore_snapshot(snapshot)
        tx = jmo.adamw(1e-2, store=store)
        tx.init(other)
        with pytest.raises(jmo.CheckpointError, match=r"is of other params there .*\(64, 200\).*\(64, 100\)"):
            store.restore_snapshot(snapshot)
    with jmo.Store() as store:
        jmo.adamw(1e-2, store=store).init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
        with pytest.raises(jmo.CheckpointError, match=r"bfloat16.*float32"):
            store.restore_snapshot(snapshot)
    for first, second in (("sgd", "adam"), ("adam", "sgd")):
        rules = {"sgd": lambda store: jmo.sgd(1e-2, momentum=0.9, store=store, name="one")}
        rules["adam"] = lambda store: jmo.adam(1e-2, store=store, name="one")
        with jmo.Store() as store:
            train(rules[first](store), params, record_gradients(params, 1))
            store.snapshot(tmp_path / first)
        with jmo.Store() as store:
            rules[second](store).init(params)
            with pytest.raises(jmo.CheckpointError, match=rf"'one' is {first} there and {second} here"):
                store.restore_snapshot(tmp_path / first)


def test_another_tree(taken):
    store, _, (params, state), snapshot = taken
    kept = seen(state, params)
    for tree, said in (
        ({"p": params, "s": state}, r"offloaded states at 1, but the tree to restore has them at s"),
        (params, "has no offloaded state"),
        (({"bias": params["bias"]}, state), r"snapshot/tree cannot be restored"),
    ):
        with pytest.raises(jmo.CheckpointError, match=said):
            store.restore_snapshot(snapshot, tree)
        assert_bits_equal(seen(state, params), kept)  # untouched


def truncated(snapshot):
    path = records(snapshot)[1]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1])
    return path.name


def removed(snapshot):
    path = records(snapshot)[0]
    path.unlink()
    return path.name


def manifest_changed(snapshot):
    path = snapshot / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    return r"snapshot/manifest.json.*CRC32C"


def manifest_cut(snapshot):
    path = snapshot / "process-0" / "manifest.json"
    path.write_text(path.read_text()[:-20])
    return "process-0/manifest.json cannot be read"


def manifest_gone(snapshot):
    (snapshot / "manifest.json").unlink()
    return "manifest.json: no such file.*incomplete"


def manifest_of_the_future(snapshot):
    path = snapshot / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    return "format 2, this version reads 1"


def process_gone(snapshot):
    shutil.rmtree(snapshot / "process-0")
    return "process-0/manifest.json: no such file"


def process_exchanged(snapshot):
    path = snapshot / "process-0" / "manifest.json"
    whole = json.loads(path.read_text())
    whole["content"]["optimizers"][0]["count"] = 5
    text = json.dumps(whole["content"], separators=(",", ":"), sort_keys=True).encode()
    whole["crc32c"] = native.crc32c(np.frombuffer(text, np.uint8))
    path.write_text(json.dumps(whole))
    return "is that of another snapshot"


def no_json(snapshot):
    (snapshot / "manifest.json").write_bytes(b"\x80\x04pickle")
    return "manifest.json cannot be read"


DAMAGES = [
    truncated,
    removed,
    manifest_changed,
    manifest_cut,
    manifest_gone,
    manifest_of_the_future,
    process_gone,
    process_exchanged,
    no_json,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_before_anything_is_touched(damage, taken):
    store, _, (params, state), snapshot = taken
    kept = seen(state, params)
    said = damage(snapshot)
    with pytest.raises(jmo.CheckpointError, match=said) as caught:
        store.restore_snapshot(snapshot, (params, state))
    assert "another" in str(caught.value) or "version that wrote it" in str(caught.value)
    assert_bits_equal(seen(state, params), kept)


@pytest.mark.parametrize("options", [SMALL, {"subgroup_elements": 1000}], ids=["verbatim", "in pieces"])
def test_a_changed_record_is_refused_by_name(options, taken, tmp_path):
    store, _, (params, _), snapshot = taken
    store.snapshot(tmp_path / "good")
    path = records(snapshot)[2]
    flip(path, 100)
    with jmo.Store(**options | {"host_memory": "2MB"}) as other:
        tx = jmo.adamw(1e-2, store=other)
        tx.init(params)
        with pytest.raises(jmo.CorruptRecordError, match=rf"{path.name}.*CRC32C.*optimizer .adam:.*restore another"):
            other.restore_snapshot(snapshot)
        (state,) = other.restore_snapshot(tmp_path / "good").values()
        train_on(tx, (params, state), record_gradients(params, 1))


def test_what_cannot_be_told_and_what_is_empty(tmp_path):
    """Inside a shard_map without specs the shards make up no whole leaves that we know of. No state at all is a state."""
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store)
        params = {"w": jnp.ones((8, 16))}
        state = tx.init(params)
        store.snapshot(tmp_path / "empty", (params, state))
        store.snapshot(tmp_path / "nothing")
        assert store.restore_snapshot(tmp_path / "nothing") == {}
        with pytest.raises(jmo.CheckpointError, match="of 0 optimizers"):
            store.restore_snapshot(tmp_path / "nothing", state)
        restored = store.restore_snapshot(tmp_path / "empty", (params, state))
        assert int(restored[1].count) == int(restored[1].ticket[0]) == 0
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store)

        def first_step(params):
            updates, _ = tx.update(params, tx.init(params), params)
            return optax.apply_updates(params, updates)

        step = jax.shard_map(first_step, mesh=mesh_of(data=8), in_specs=P("data"), out_specs=P("data"), check_vma=False)
        jax.block_until_ready(jax.jit(step)(params))
        with pytest.raises(ValueError, match=r"shard_map without param_specs=.*pass mesh="):
            store.snapshot(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "nothing"]


def test_settings_that_make_no_sense(tmp_path):
    with pytest.raises(ValueError, match="give both, or neither"):
        jmo.Store(snapshot_every=3)
    with pytest.raises(ValueError, match="snapshot_every=0"):
        jmo.Store(snapshot_every=0, snapshot_dir=tmp_path)
    with pytest.raises(ValueError, match="URL"):
        jmo.Store(snapshot_every=1, snapshot_dir="gs://b/x")


def test_a_full_file_system(tmp_path):
    """The real thing: a tmpfs of 4 MB, on which half of the records fit."""
    code = """
    import errno, subprocess
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", sys.argv[1]], check=True)
    params = {"w": jnp.ones((1000, 1000))}
    with jmo.Store(subgroup_elements=65536) as store:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        params, state = step(params, state, params)
        try:
            store.snapshot(sys.argv[1] + "/snapshot")
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        else:
            raise AssertionError("8 MB fit into 4")
        assert os.listdir(sys.argv[1]) == []
        params, state = step(params, state, params)
        store.flush()
    print("goes on")
    """
    process = start_python(code, tmp_path, unshare=True)
    out, err = process.communicate(timeout=120)
    if process.returncode and ("unshare" in err or "mount:" in err):
        pytest.skip(f"no mount namespaces here: {err}")
    assert process.returncode == 0, err
    assert "goes on" in out
