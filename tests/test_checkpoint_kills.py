"""A process that is killed at any moment of a step or a save: what is found afterwards is whole, and of one step."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.processes import start_python

KILLS = 10
STEPS = 400  # more than any process gets to

PROGRAM = """
import json, zlib
import orbax.checkpoint as ocp

folder, tier, digests, mode = sys.argv[1:]
params = {"full": make_params(SMALL_SHAPES), "low": make_params(SMALL_SHAPES, BF16, seed=3)}
grads = record_gradients(params, 4)
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 1000)

def digest(state):
    tree = state["params"], jmo.read_state(state["opt_state"]), jmo.read_masters(state["opt_state"], state["params"])
    return zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)))

def train(store):
    tx = optax.chain(optax.clip_by_global_norm(1.0), jmo.adamw(schedule, weight_decay=0.1, store=store))
    state = {"params": jax.tree.map(jnp.copy, params), "opt_state": tx.init(params)}
    step = make_step(tx, donate=True)

    def advance(state, number):
        state["params"], state["opt_state"] = step(state["params"], state["opt_state"], grads[number % len(grads)])
        return state

    return state, advance
"""

REFERENCE = (
    PROGRAM
    + """
known = {}
with jmo.Store() as store:
    state, advance = train(store)
    for number in range(STEPS):
        state = advance(state, number)
        known[number + 1] = digest(state)
print(json.dumps(known))
"""
)

TRAINING = (
    PROGRAM
    + """
known = {int(step): digest for step, digest in json.load(open(digests)).items()}
with jmo.Store(tier, host_memory="150KB", subgroup_elements=4096) as store:
    state, advance = train(store)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=mode == "async")
    with ocp.CheckpointManager(folder, options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            state = manager.restore(first, args=jmo.orbax.OffloadRestore(state))
            assert digest(state) == known[first], f"the checkpoint of step {first} is not that step's state"
        print("FOUND", first, flush=True)
        for number in range(first, STEPS):
            state = advance(state, number)
            manager.save(number + 1, args=jmo.orbax.OffloadSave(state))
"""
)


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "digests.json"
    process = start_python(f"STEPS = {STEPS}\n" + REFERENCE, "", "", "", "")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    path.write_text(out.splitlines()[-1])
    return path


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_found_after_a_kill_is_the_state_of_one_step(mode, digests, tmp_path):
    moments = random.Random(f"kills, {mode}")
    found = [0]
    while len(found) <= KILLS // 2 or found[-1] == 0:  # until there was something to compare
        slower = 1 + len(found) // KILLS  # a machine that is busy needs longer for its first step
        process = start_python(
            f"STEPS = {STEPS}\n" + TRAINING, tmp_path / "checkpoints", tmp_path / "tier", digests, mode
        )
        try:
            line = process.stdout.readline()  # the checkpoint has been compared by now
            assert line.startswith("FOUND"), process.communicate(timeout=60)
            found.append(int(line.split()[1]))
            time.sleep(moments.uniform(0.2, 2.0 * slower))  # the first step compiles
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
    assert found == sorted(found), found
