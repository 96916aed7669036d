"""The probe, on real directories and stores."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import errors, native, probe
from jax_mlp_offload.probe import Phase
from jax_mlp_offload.profile import device_of
from tests.limited import probe_files, wait_for

RECORD_BYTES = 256 * 2**10


def test_unequal_tiers(two_tiers):
    """Limits are exact from above; from below only ratios are compared, which a busy machine does not change much."""
    fast = jmo.File(two_tiers[0], read_limit="64MB", write_limit="32MB")
    slow = jmo.File(two_tiers[1], read_limit="16MB", write_limit="8MB")
    profiles = [probe.measure(tier, RECORD_BYTES, 1.0) for tier in (fast, slow)]
    for tier, profile in zip((fast, slow), profiles, strict=True):
        assert profile.name == os.path.realpath(tier.path)
        assert profile.record_bytes == RECORD_BYTES
        assert profile.device == device_of(tier)
        assert profile.read_bps < 1.25 * tier.number("read_limit")
        assert profile.write_bps < 1.25 * tier.number("write_limit")
        assert profile.mixed_bps < 1.25 * tier.number("write_limit")
        assert 1.2 < profile.read_bps / profile.write_bps < 3.3
        assert os.listdir(tier.path) == []
    for field in ("read_bps", "write_bps", "mixed_bps"):
        assert 2 < getattr(profiles[0], field) / getattr(profiles[1], field) < 8


def test_mixed_traffic_is_one_to_one(tmp_path):
    tier = jmo.File(tmp_path, read_limit="256MB", write_limit="16MB")
    read_bps, write_bps = probe.measure_briefly(tier, RECORD_BYTES, 1.0)
    assert write_bps < 1.25 * 16e6
    assert 0.4 < read_bps / write_bps < 4  # of limits 16 : 1
    assert os.listdir(tmp_path) == []


def test_the_short_probe_moves_small_records(tmp_path):
    tier = jmo.File(tmp_path, write_limit="64MB")
    result, sizes = [], set()
    thread = threading.Thread(target=lambda: result.append(probe.measure_briefly(tier, 2**30)))
    thread.start()
    while thread.is_alive():
        for path in probe_files(tmp_path):
            try:
                sizes.add((path.parent.name, path.stat().st_size))
            except FileNotFoundError:
                continue  # removed meanwhile
        time.sleep(0.002)
    assert len(result) == 1 and min(result[0]) > 0
    assert {size for _, size in sizes} - {0} == {4 * 2**20}
    assert len({row for row, _ in sizes}) <= 4
    assert os.listdir(tmp_path) == []


def test_progress(tmp_path):
    told = []
    probe.measure(jmo.File(tmp_path / "new"), RECORD_BYTES, 0.1, lambda phase, share: told.append((phase, share)))
    phases, shares = zip(*told, strict=True)
    assert list(dict.fromkeys(phases)) == list(Phase)
    assert list(shares) == sorted(shares) and shares[0] < 0.2 and shares[-1] == 1.0
    assert os.listdir(tmp_path) == []  # the directory was not there before


@pytest.mark.parametrize(
    ("capacity", "record_bytes", "rows"),
    [("1GiB", RECORD_BYTES, 8), ("1.6MiB", RECORD_BYTES, 6), ("600KiB", 148 * 2**10, 4)],
)
def test_what_fits(tmp_path, caplog, capacity, record_bytes, rows):
    seen = []
    tier = jmo.File(tmp_path, capacity=capacity)
    profile = probe.measure(
        tier,
        RECORD_BYTES - 1,  # rounded up
        0.1,
        lambda phase, share: seen.append([path.stat().st_size for path in probe_files(tmp_path)]),
    )
    assert profile.record_bytes == record_bytes
    assert max(map(sum, seen)) == record_bytes * rows <= tier.number("capacity")
    assert bool(caplog.records) == (record_bytes < RECORD_BYTES)
    assert all(str(tmp_path) in record.getMessage() and "148.0 KiB" in record.getMessage() for record in caplog.records)


def test_no_room(tmp_path):
    with pytest.raises(OSError, match=f"{tmp_path}.*16.0 KiB.*8.0 KiB are free") as raised:
        probe.measure(jmo.File(tmp_path, capacity="8KiB"), RECORD_BYTES, 0.1)
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("is_write", [True, False])
@pytest.mark.parametrize("brief", [True, False])
def test_a_refused_record(tmp_path, is_write, brief):
    native.inject_fault(str(tmp_path), is_write, after_count=5, error_number=errno.ENOSPC)
    with pytest.raises(errors.TierError, match=f"tier '{tmp_path}': .*No space left"):
        (probe.measure_briefly if brief else probe.measure)(jmo.File(tmp_path), RECORD_BYTES, 0.3)
    assert os.listdir(tmp_path) == []


def test_a_spoilt_record(tmp_path):
    def spoil(phase, share):
        if phase is Phase.READ:
            for path in probe_files(tmp_path):
                path.write_bytes(bytes(RECORD_BYTES))

    with pytest.raises(errors.CorruptRecordError, match=f"tier '{tmp_path}': .*CRC32C"):
        probe.measure(jmo.File(tmp_path), RECORD_BYTES, 0.3, spoil)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("phase", list(Phase))
def test_stop(tmp_path, phase):
    stop, after = threading.Event(), []

    def at(now, share):
        if stop.is_set():
            after.append(now)
        elif now is phase:
            stop.set()

    with pytest.raises(probe.ProbeStoppedError, match=str(tmp_path)):
        probe.measure(jmo.File(tmp_path), RECORD_BYTES, 0.2, at, stop)
    assert set(after) <= {phase}
    assert os.listdir(tmp_path) == []


def test_stop_the_short_probe(tmp_path):
    """A tier that needs a minute for a record is let go in the midst of it."""
    stop, raised = threading.Event(), []

    def run():
        try:
            probe.measure_briefly(jmo.File(tmp_path, write_limit="64KiB"), 4 * 2**20, 0.5, stop)
        except probe.ProbeStoppedError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: probe_files(tmp_path))
    stop.set()
    thread.join(60)
    assert not thread.is_alive() and raised
    assert os.listdir(tmp_path) == []


def test_beside_a_store(tmp_path):
    """Neither takes the other's folder for a leftover."""
    with jmo.Store(tmp_path, host_memory="1MiB"):
        (folder,) = os.listdir(tmp_path)
        probe.measure_briefly(jmo.File(tmp_path), RECORD_BYTES, 0.1)
        assert os.listdir(tmp_path) == [folder]


@pytest.mark.parametrize(
    ("record_bytes", "seconds", "wrong"),
    [(0, 1, "record_bytes=0"), (4096.0, 1, "record_bytes="), (True, 1, "record_bytes="), (4096, 0, "seconds=0"),
     (4096, float("inf"), "seconds=inf"), (4096, "1", "seconds='1'")],
)  # fmt: skip
def test_wrong_arguments(tmp_path, record_bytes, seconds, wrong):
    for measure in (probe.measure, probe.measure_briefly):
        with pytest.raises(ValueError, match=wrong):
            measure(jmo.File(tmp_path), record_bytes, seconds)


def test_one_device(two_tiers, tmp_path):
    first, second = map(jmo.File, two_tiers)
    new, limited = jmo.File(tmp_path / "not" / "yet"), jmo.File(tmp_path, read_limit=1)
    by_tensorstore, remote = jmo.File(tmp_path, io="tensorstore"), jmo.Remote("s3://bucket/run7/")
    tiers = [remote, first, second, new, limited, by_tensorstore]
    assert probe.measured_with(tiers) == [0, 1, 1, 1, 4, 5]  # what is slower by itself is measured by itself
    assert len({device_of(tier) for tier in tiers[1:]}) == 1
    assert device_of(remote) == "s3://bucket/run7"


@pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev,
    reason="there is no second file system to compare with",
)
def test_two_devices(tmp_path):
    assert probe.measured_with([jmo.File("/dev/shm"), jmo.File(tmp_path)]) == [0, 1]
    assert device_of(jmo.File("/dev/shm/none/x")) == device_of(jmo.File("/dev/shm")) != device_of(jmo.File(tmp_path))


# -- by TensorStore


def test_memory():
    profile = probe.measure(jmo.Remote("memory://probe/x"), RECORD_BYTES, 0.2)
    assert profile.name == profile.device == "memory://probe/x"
    assert profile.record_bytes == RECORD_BYTES
    assert min(profile.read_bps, profile.write_bps, profile.mixed_bps) > 0
    assert min(probe.measure_briefly(jmo.Remote("memory://probe/x"), RECORD_BYTES, 0.1)) > 0


def test_files_by_tensorstore(tmp_path):
    seen = []
    tier = jmo.File(tmp_path, io="tensorstore")
    profile = probe.measure(tier, RECORD_BYTES, 0.2, lambda phase, share: seen.extend(probe_files(tmp_path)))
    assert profile.name == str(tmp_path) and min(profile.read_bps, profile.write_bps, profile.mixed_bps) > 0
    assert seen
    assert os.listdir(tmp_path) == []
