"""A short pass through every native path: kernels of all dtypes, tiers, a mesh, a failure. Also run under sanitizers."""

from __future__ import annotations

import errno

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_mlp_offload as jmo
from jax_mlp_offload import native
from tests.support import assert_close, check_against_optax, make_params, make_step, record_gradients, run_reference

SHAPES = {"a": (300, 41), "b": (7,), "c": (4097,), "d": ()}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_kernels_and_tiers(dtype, kind, two_tiers):
    params = make_params(SHAPES, dtype)
    grads = record_gradients(params, 4)
    args = (1e-2,) if kind == "adamw" else (1e-2, 0.9)
    with jmo.Store(*two_tiers, host_memory="110KB", subgroup_elements=4096) as store:
        check_against_optax(getattr(jmo, kind)(*args, store=store), getattr(optax, kind)(*args), params, grads)
        assert store.stats()["misses"] > 0


def test_mesh(two_tiers):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(512, 64)), jnp.float32)}
    placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec("x")))
    with jmo.Store(*two_tiers, host_memory="800KB", subgroup_elements=4096) as store:
        tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs={"w": PartitionSpec("x")})
        step, state = make_step(tx), tx.init(params)
        new = placed
        for _ in range(3):
            new, state = step(new, state, placed)
        expected, _ = run_reference(optax.adamw(1e-2), params, [params] * 3)
        assert_close(new, expected)


def test_failure_and_close(tmp_path):
    params = make_params(SHAPES)
    grads = record_gradients(params, 1)[0]
    with jmo.Store(str(tmp_path), host_memory="100KB", subgroup_elements=4096) as store:
        tx = jmo.adamw(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        new, state = step(params, state, grads)
        jax.block_until_ready(new)
        native.inject_fault(str(tmp_path), is_write=False, error_number=errno.EIO)
        new, state = jax.block_until_ready(step(new, state, grads))
        native.clear_faults()
        with pytest.raises(jmo.TierError):
            store.flush()
        store._close_quietly()
