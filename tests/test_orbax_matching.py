"""What a restore takes for what: masters by their dtype, states by their optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_mlp_offload as jmo
from tests.checkpoints import as_struct, restore, save, tree_of
from tests.support import BF16, advance, assert_close, make_params, make_step, record_gradients, run_reference


@pytest.mark.parametrize(("saved", "restored"), [(BF16, jnp.float16), (jnp.float16, BF16), (BF16, jnp.float32)])
def test_masters_of_params_of_another_dtype_are_not_taken(saved, restored, tmp_path):
    """Remainders of bf16 params are no masters of fp16 ones: the params are."""
    params = make_params({"w": (40, 60)}, saved)
    grads = record_gradients(params, 4, scale=0.1)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        tree = tree_of(*advance(make_step(tx), params, tx.init(params), grads[:3]))
        moments = jax.tree.map(np.asarray, jmo.read_state(tree["opt"]))
        path = save(tmp_path / "saved", tree)
    new = jax.tree.map(lambda p: p.astype(restored), tree["params"])
    last = jax.tree.map(lambda g: g.astype(restored), grads[3])
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        like = {"params": jax.tree.map(as_struct, new), "opt": jax.eval_shape(tx.init, new)}
        with pytest.warns(jmo.CheckpointWarning, match="float32 masters"):
            found = restore(path, like)
        after, state = advance(make_step(tx), found["params"], found["opt"], [last])
        masters = jmo.read_masters(state, after)
    expected, _ = run_reference(optax.adamw(1e-2), new, [last], moments)
    assert_close(masters, expected)


def test_two_states_for_one_optimizer_are_refused(tmp_path):
    """Two open stores have the same optimizer: the last one's init would take both."""
    params = make_params({"w": (7, 5)})
    with jmo.Store() as one, jmo.Store() as other:
        first, second = jmo.adamw(1e-2, store=one), jmo.adamw(1e-2, store=other)
        states = {"x": first.init(params), "y": second.init(params)}
        _, states["x"] = advance(make_step(first), params, states["x"], [params])
        _, states["y"] = advance(make_step(second), params, states["y"], [params])
        path = save(tmp_path / "saved", states)
        with pytest.raises(jmo.CheckpointError, match=r"x and y would both go to optimizer .*store="):
            restore(path, states)
        jmo.read_state(states)  # neither has been touched
