"""kill -9 at random moments of steps and snapshots: only whole snapshots are ever seen."""

from __future__ import annotations

import random
import time

import jax.numpy as jnp
import numpy as np
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload.snapshots.folder import whole
from tests.processes import start_python
from tests.snapshots import SMALL, seen
from tests.support import SMALL_SHAPES, assert_bits_equal, make_params, make_step, record_gradients

KILLS = 12
STEPS = 60

CODE = """
tier, folder, by_itself, steps = sys.argv[1], sys.argv[2], sys.argv[3] == "1", int(sys.argv[4])
options = {"snapshot_every": 1, "snapshot_dir": folder} if by_itself else {}
store = jmo.Store(tier, host_memory="110KB", subgroup_elements=4096, **options)
params = make_params(SMALL_SHAPES)
tx = jmo.adamw(1e-2, store=store)
step, state = make_step(tx), tx.init(params)
grads = record_gradients(params, steps)
print("begins", flush=True)
for number in range(10**6):
    if number % steps == 0:  # afresh: its snapshots come in the place of those of before
        params, state = make_params(SMALL_SHAPES), tx.init(params)
        kept = 0
    params, state = step(params, state, grads[number % steps])
    if not by_itself:
        store.snapshot(f"{folder}/step-{number + 1}")
"""


def reference():
    """What is seen after each step."""
    params = make_params(SMALL_SHAPES)
    found = {}
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        for number, grad in enumerate(record_gradients(params, STEPS), 1):
            params, state = step(params, state, grad)
            found[number] = seen(state, params)
    return found


@pytest.mark.parametrize("by_itself", [False, True], ids=["asked for", "by itself"])
def test_kill_at_random_moments(by_itself, tmp_path):
    expected = reference()
    rng = random.Random(20)
    found = 0
    for number in range(KILLS // 2):
        folder = tmp_path / f"snapshots{number if not by_itself else ''}"
        folder.mkdir(exist_ok=True)
        process = start_python(CODE, tmp_path / "tier", folder, int(by_itself), STEPS)
        try:
            assert process.stdout.readline() == "begins\n", process.stderr.read()
            end_s = time.monotonic() + 60
            while not (folder / "step-1").exists() and not (folder / "step-2").exists():
                assert time.monotonic() < end_s
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.3))
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == -9
        snapshots = whole(folder)
        assert len(snapshots) == len(list(folder.glob("step-*")))  # none that is not whole has such a name
        with jmo.Store(tmp_path / "tier", **SMALL) as store:
            jmo.adamw(1e-2, store=store).init(make_params(SMALL_SHAPES))
            for snapshot in snapshots[:3]:
                (state,) = store.restore_snapshot(snapshot).values()
                count = int(state.count)
                assert_bits_equal(seen(state, expected[count][0]), expected[count], f"{snapshot.name}: ")
                found += 1
    assert found >= KILLS // 2
    if not by_itself:
        return
    # the next one of this folder removes what the dead left
    with jmo.Store(snapshot_every=1, snapshot_dir=folder) as store:
        tx = jmo.adamw(1e-2, store=store)
        params = make_params(SMALL_SHAPES)
        make_step(tx)(params, tx.init(params), {name: jnp.asarray(np.ones_like(p)) for name, p in params.items()})
    assert not list(folder.glob(".*"))
    assert len(whole(folder)) <= 2
