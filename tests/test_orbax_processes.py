"""Checkpoints of several processes: each writes what it has, and any number of them restores it."""

from __future__ import annotations

import pytest

from tests.peers import run_peers

CODE = """
import zlib
import orbax.checkpoint as ocp

folder, mode = args[2:]
SAVED = 3
mesh = mesh_of(data=2, fsdp=processes * devices // 2)
shapes = {"embed": (256, 48), "norm": (48,), "out": (48, 128), "scale": (), "odd": (1031,), "table": (512, 513)}
one = {**dict.fromkeys(shapes, P()), "embed": P("fsdp"), "out": P(None, "fsdp")}
specs = {"full": one, "low": one}
params = {"full": make_params(shapes), "low": make_params(shapes, BF16)}
grads = record_gradients(params, 5, seed=3)
with (
    jmo.Store(*args[:2], host_memory=400_000 * devices, subgroup_elements=8192) as store,
    ocp.CheckpointManager(folder) as manager,
):
    tx = optax.chain(jmo.adamw(1e-2, weight_decay=0.1, store=store, mesh=mesh, param_specs=specs))
    step = make_step(tx, donate=True)
    tree = {"params": shard(params, mesh, specs)}
    tree["opt"] = jax.jit(tx.init)(tree["params"])

    def advance(tree, grads):
        for grad in grads:
            tree["params"], tree["opt"] = step(tree["params"], tree["opt"], shard(grad, mesh, specs))
        return tree

    if mode == "save":
        tree = advance(tree, grads[:SAVED])
        manager.save(SAVED, args=jmo.orbax.OffloadSave(tree))
    else:
        tree = manager.restore(SAVED, args=jmo.orbax.OffloadRestore(tree))
        assert int(tree["opt"][0].count.addressable_data(0)) == SAVED
    tree = advance(tree, grads[SAVED:])
    manager.wait_until_finished()
    whole = gathered((tree["params"], jmo.read_state(tree["opt"]), jmo.read_masters(tree["opt"], tree["params"])), mesh)
    print("DIGEST", zlib.crc32(b"".join(np.ascontiguousarray(x).tobytes() for x in jax.tree.leaves(whole))))
"""


@pytest.mark.parametrize(("saving", "restoring"), [((2, 2), [(2, 2), (4, 1), (1, 4)]), ((1, 4), [(2, 2)])])
def test_any_number_of_processes_goes_on_from_the_checkpoint_of_another(saving, restoring, two_tiers, tmp_path):
    """Asynchronous, beside steps: params, moments and masters are those of the run that saved, to the bit."""

    def run(mode, processes, devices):
        outputs = run_peers(CODE, *two_tiers, tmp_path / "run", mode, processes=processes, devices=devices)
        return {line for output in outputs for line in output.splitlines() if line.startswith("DIGEST")}

    expected = run("save", *saving)
    assert len(expected) == 1
    for each in restoring:
        assert run("restore", *each) == expected, each
    left = {path.name for path in (tmp_path / "run" / "3" / "default" / "jax_mlp_offload").iterdir()}
    assert not any(name.startswith("exchange") for name in left), left


FAILING = """
import errno
import orbax.checkpoint as ocp
from jax_mlp_offload import native

mesh = mesh_of(data=2, fsdp=processes * devices // 2)
params = make_params({"w": (512, 513), "norm": (48,)})
specs = dict.fromkeys(params, P())
with jmo.Store(args[0], host_memory="2MB", subgroup_elements=8192) as store, ocp.CheckpointManager(args[1]) as manager:
    tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
    step = make_step(tx)
    new = shard(params, mesh, specs)
    state = jax.jit(tx.init)(new)
    new, state = jax.block_until_ready(step(new, state, new))
    store.flush()
    if process == 1:
        native.inject_fault(args[0], is_write=False, error_number=errno.EIO)
    try:
        manager.save(1, args=jmo.orbax.OffloadSave({"opt": state}))
        manager.wait_until_finished()
    except Exception as error:
        print("RAISED", " ".join(str(error).split()))
    native.clear_faults()
    jax.block_until_ready(step(new, state, new))
    print("WENT ON")
    print("LEFT", manager.all_steps(read=True))
"""


def test_a_save_that_fails_in_one_process_fails_in_all_and_training_goes_on(tmp_path):
    outputs = run_peers(FAILING, tmp_path / "tier", tmp_path / "run")
    for output in outputs:
        said = dict(line.split(" ", 1) for line in output.splitlines() if line[:4] in ("RAIS", "WENT", "LEFT"))
        assert "Input/output error" in said["RAISED"], said
        assert (said["WENT"], said["LEFT"]) == ("ON", "[]"), said
