"""Where updates run: what is made of measured bandwidths."""

from __future__ import annotations

import pytest

from jax_mlp_offload import accelerators, native, update_on
from jax_mlp_offload.update_on import UpdateOn


def test_pcie_leaves_it_to_the_host_and_a_coherent_link_to_the_device():
    """PCIe 5 x16 beside a host that is not starved of cores; NVLink-C2C beside Grace."""
    pcie = update_on.host_params_per_s(55e9, 55e9, 8e9)
    assert pcie == 8e9 > update_on.device_params_per_s(90e9)
    grace = update_on.host_params_per_s(300e9, 300e9, 12e9)
    assert grace == 12e9 < update_on.device_params_per_s(600e9)


def test_a_slow_host_leaves_it_to_the_device():
    assert update_on.host_params_per_s(55e9, 55e9, 1e9) < update_on.device_params_per_s(90e9)


def test_auto_measures():
    with accelerators.emulate(1):
        accelerator = accelerators.emulated(accelerators.emulation())
        assert update_on.choose(UpdateOn.AUTO, accelerator.runtime, 0, 1, 1) in (True, False)
        speeds = native.measure_link(accelerator.runtime, 0, 1 << 20, 2)
        assert all(speed > 0 for speed in speeds)
        with pytest.raises(ValueError, match="0 bytes"):
            native.measure_link(accelerator.runtime, 0, 0, 2)
        assert update_on.choose(UpdateOn.DEVICE, accelerator.runtime, 0, 1, 1)
        assert not update_on.choose(UpdateOn.HOST, accelerator.runtime, 0, 1, 1)
