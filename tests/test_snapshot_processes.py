"""Snapshots of a mesh that spans processes: whole for all or for none, and restored by as many processes or fewer."""

from __future__ import annotations

import json
import os

import numpy as np

from tests.peers import run_peers
from tests.processes import finish, start_python

SHAPES = """
shapes = {"embed": (96, 64), "norm": (48,), "out": (64, 136), "scale": (), "table": (400, 200)}
specs = {**dict.fromkeys(shapes, P()), "embed": P("fsdp"), "out": P("data", "fsdp"), "table": P(None, "fsdp")}
params, grads = make_params(shapes, BF16), record_gradients(make_params(shapes, BF16), 5)
mesh = mesh_of(data=2, fsdp=2)

def begin(store):
    tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
    p = shard(params, mesh, specs)
    return make_step(tx), p, jax.jit(tx.init)(p)

def advance(step, p, s, grads):
    for grad in grads:
        p, s = jax.block_until_ready(step(p, s, shard(grad, mesh, specs)))
    return p, s

def save(path, s, p):
    seen = gathered((p, jmo.read_state(s), jmo.read_masters(s, p)), mesh)
    if jax.process_index() == 0:
        np.savez(path, *[leaf.view(f"u{leaf.dtype.itemsize}") for leaf in map(np.asarray, jax.tree.leaves(seen))])

OPTIONS = {"host_memory": 100_000 * len(jax.local_devices()), "subgroup_elements": 4096}
"""


def content(path):
    with np.load(path) as found:
        return [found[name] for name in found.files]


def assert_same(first, second):
    for a, b in zip(content(first), content(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_two_processes_and_back(tmp_path):
    code = (
        SHAPES
        + """
with jmo.Store(args[0] + "/tier", **OPTIONS) as store:
    step, p, s = begin(store)
    p, s = advance(step, p, s, grads[:3])
    store.snapshot(args[0] + "/whole", {"p": p, "s": s})
    store.snapshot(args[0] + "/states")
    after = advance(step, p, s, grads[3:])
    save(args[0] + "/straight.npz", after[1], after[0])
    (s,) = store.restore_snapshot(args[0] + "/states").values()  # after the failure of an update, say
    after = advance(step, p, s, grads[3:])
    save(args[0] + "/states.npz", after[1], after[0])
    stats = store.stats()
    assert all(tier["bytes_read"] > 0 for tier in stats["tiers"]), stats
with jmo.Store(args[0] + "/tier", **OPTIONS) as store:
    step, p, s = begin(store)
    tree = store.restore_snapshot(args[0] + "/whole", {"p": p, "s": s})
    p, s = advance(step, tree["p"], tree["s"], grads[3:])
    save(args[0] + "/whole.npz", s, p)
"""
    )
    run_peers(code, tmp_path)
    for name in ("states", "whole"):
        assert_same(tmp_path / "straight.npz", tmp_path / f"{name}.npz")
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    assert [process for process, _ in manifest["content"]["processes"]] == [0, 1]
    code = (
        """
jax.config.update("jax_num_cpu_devices", 4)
from tests.meshes import *
"""
        + SHAPES
        + """
mesh = mesh_of(data=4, fsdp=1) if sys.argv[2] == "other" else mesh
with jmo.Store(sys.argv[1] + "/tier", **OPTIONS) as store:
    step, p, s = begin(store)
    tree = store.restore_snapshot(sys.argv[1] + "/whole", {"p": p, "s": s})
    p, s = advance(step, tree["p"], tree["s"], grads[3:])
    save(sys.argv[1] + "/one.npz", s, p)
"""
    )
    for mesh in ("same", "other"):
        finish(start_python(code, tmp_path, mesh))
        assert_same(tmp_path / "straight.npz", tmp_path / "one.npz")


def test_one_that_cannot_write_or_read_fails_all(tmp_path):
    code = (
        SHAPES
        + """
import errno
from jax_mlp_offload import native

def refused(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\\n", " ")
    raise AssertionError("was not refused")

folder = args[0]
with jmo.Store(folder + "/tier", **OPTIONS) as store:
    step, p, s = begin(store)
    p, s = advance(step, p, s, grads[:2])
    if process == 1:
        native.inject_fault(folder + "/.new-", is_write=True, error_number=errno.ENOSPC)
    print("\\nTOLD", refused(lambda: store.snapshot(folder + "/snapshot")))
    native.clear_faults()
    jax.experimental.multihost_utils.sync_global_devices("looked")
    print("\\nLEFT", sorted(os.listdir(folder)))
    p, s = advance(step, p, s, grads[2:3])
    store.snapshot(folder + "/snapshot")
    print("\\nTOLD", refused(lambda: store.snapshot(folder + "/snapshot")))
    if process == 0:
        os.rename(folder + "/snapshot/process-1", folder + "/away")
    jax.experimental.multihost_utils.sync_global_devices("moved")
    print("\\nTOLD", refused(lambda: store.restore_snapshot(folder + "/snapshot")))
    if process == 1:
        os.rename(folder + "/away", folder + "/snapshot/process-1")
    jax.experimental.multihost_utils.sync_global_devices("moved back")
    if process == 1:
        native.inject_fault(folder + "/snapshot", is_write=False, error_number=errno.EIO)
    print("\\nTOLD", refused(lambda: store.restore_snapshot(folder + "/snapshot")))
    native.clear_faults()
    (s,) = store.restore_snapshot(folder + "/snapshot").values()
    advance(step, p, s, grads[3:])
"""
    )
    code = "import jax.experimental.multihost_utils\n" + code
    outputs = [output.splitlines() for output in run_peers(code, tmp_path)]
    told = [[line for line in lines if line.startswith("TOLD ")] for lines in outputs]
    assert "process 1 could not do its part: OSError" in told[0][0] and "No space left" in told[0][0]
    assert "No space left" in told[1][0] and "training can go on" in told[1][0]
    assert all("LEFT ['tier']" in lines for lines in outputs)
    assert all("give a path that is not there" in lines[1] for lines in told)
    assert all("process-1/manifest.json: no such file" in lines[2] for lines in told)
    assert "another process could not load its part" in told[0][3]
    assert "CorruptRecordError" in told[1][3]


def test_snapshots_by_themselves(tmp_path):
    code = (
        SHAPES
        + """
import threading, time
with jmo.Store(args[0] + "/tier", **OPTIONS, snapshot_every=2, snapshot_dir=args[0] + "/snapshots") as store:
    step, p, s = begin(store)
    for grad in grads + grads[:1]:
        p, s = advance(step, p, s, [grad])
        store.flush()
        while any(thread.name == "jmo-snapshot" for thread in threading.enumerate()):
            time.sleep(0.01)
    print("\\nCOUNTS", json.dumps(store.stats()["snapshots"]))
    (state,) = store.restore_snapshot(args[0] + "/snapshots").values()
    assert int(state.count) == 6
"""
    )
    for output in run_peers(code, tmp_path):
        (line,) = [line for line in output.splitlines() if line.startswith("COUNTS ")]
        counts = json.loads(line.removeprefix("COUNTS "))
        assert counts["taken"] == 3 and counts["failed"] == counts["skipped"] == 0, counts
    assert sorted(os.listdir(tmp_path / "snapshots")) == ["lock", "step-4", "step-6"]
