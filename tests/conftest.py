"""Eight CPU devices for every test; no store left open and no injected fault left behind by one."""

from __future__ import annotations

import contextlib
import gc

import jax
import pytest

DEVICES = 8
CHUNK_BYTES = 96 << 10  # of accelerators, so that chunks are used again and again
LONGEST_DELAY_US = 100  # of an emulated accelerator's operations


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--platform", choices=("cpu", "cuda"), default="cpu", help="where the tests' arrays are")
    parser.addoption(
        "--emulate",
        type=int,
        default=None,
        metavar="SEED",
        help="have stores take the CPU's devices for accelerators, emulated with delays from this seed",
    )
    parser.addoption("--slow", action="store_true", help="run tests that take more than a minute or much memory")
    parser.addoption("--replay-seed", type=int, default=None, help="run only this seed of the scheduler's simulation")


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_platforms", config.getoption("--platform"))
    jax.config.update("jax_num_cpu_devices", DEVICES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="takes long or much memory; run with --slow"))


@pytest.fixture(autouse=True, scope="session")
def _accelerators(request: pytest.FixtureRequest):
    """Small chunks and probes, and the whole session on emulated accelerators, if that is asked for."""
    from jax_mlp_offload import accelerators, devices, update_on

    seed = request.config.getoption("--emulate")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(devices, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(update_on, "PROBE_BYTES", CHUNK_BYTES)
        if seed is not None:
            stack.enter_context(accelerators.emulate(DEVICES, seed, LONGEST_DELAY_US))
        yield


@pytest.fixture(autouse=True, scope="module")
def _garbage_of_a_module():
    """What outlives a test is searched for garbage again only here: JAX keeps so much that it takes up to 0.3 s a time."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
    gc.collect()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    from jax_mlp_offload import native
    from jax_mlp_offload.registry import live_stores

    before = set(live_stores())
    yield
    native.clear_faults()
    left = [store for store in live_stores() if store not in before]
    for store in left:
        store._close_quietly()
    gc.collect()
    gc.freeze()
    assert not left, f"a test left stores open: {left}"


@pytest.fixture
def two_tiers(tmp_path):
    """Two directories for tiers."""
    paths = [tmp_path / "nvme", tmp_path / "pfs"]
    for path in paths:
        path.mkdir()
    return [str(path) for path in paths]
