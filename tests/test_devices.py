"""A store's devices: which platforms they serve, and what they refuse."""

from __future__ import annotations

import jax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import accelerators, native
from jax_mlp_offload.accelerators import EmulatedFailure
from jax_mlp_offload.devices import Devices
from jax_mlp_offload.update_on import UpdateOn


def test_store_serves_one_platform():
    engine = native.Engine(1)
    ours = Devices(engine, UpdateOn.HOST, 1)
    assert ours.serve("cpu") is False
    with pytest.raises(ValueError, match=r"'gpu', but other optimizers of this store.*another Store"):
        ours.serve("gpu")
    engine.close()


def test_unknown_platform():
    engine = native.Engine(1)
    with pytest.raises(ValueError, match="'tpu' cannot be offloaded"):
        Devices(engine, UpdateOn.HOST, 1).serve("tpu")
    engine.close()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU here")
def test_gpu_that_is_not_there_is_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match="the params are on a GPU, but"):
        accelerators.cuda()


def test_bad_settings():
    with pytest.raises(ValueError, match="update_on='gpu' is unknown; use one of host, device, auto"):
        jmo.Store(update_on="gpu")
    with pytest.raises(ValueError, match="devices=0"), accelerators.emulate(0):
        pass
    with (
        pytest.raises(ValueError, match="call='fly' is unknown"),
        accelerators.emulate(1, failures=[EmulatedFailure("fly")]),
    ):
        pass
