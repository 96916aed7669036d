"""Profiles: what is saved of a tier, and where it is found again."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat

import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload.profile import TierProfile, as_json, find, profile_name, read_profile, write_profile

EXAMPLE = TierProfile(
    name="/x", read_bps=2e9, write_bps=1e9, mixed_bps=0.6e9, read_latency_s=1e-4, write_latency_s=2e-4,
    record_bytes=2**26, device="8:1", measured_at="2026-01-02T03:04:05+00:00", hostname="node1",
)  # fmt: skip


def test_a_profile_reads_back(tmp_path):
    path, entries = tmp_path / "tiers.json", [EXAMPLE, dataclasses.replace(EXAMPLE, name="s3://b/x", record_bytes=4096)]
    write_profile(path, entries)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["tiers.json"]
    assert read_profile(path) == read_profile(str(path)) == read_profile(as_json(entries)) == read_profile(entries)
    assert read_profile(path) == entries
    write_profile(path, entries[:1])
    assert read_profile(path) == entries[:1]


def test_a_profile_that_cannot_be_written(tmp_path):
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "taken", tmp_path / "none" / "tiers.json"):
        with pytest.raises(OSError, match=str(path)):
            write_profile(path, [EXAMPLE])
    assert os.listdir(tmp_path) == ["taken"]


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[" + b"9" * 10_000 + b"]", "no JSON"),
        ([], "is no profile"),
        ({"format": 1}, "is no profile"),
        ({"format": 2, "tiers": []}, "format 2"),
        ({"tiers": []}, "format None"),
        ({"format": 1, "tiers": [7]}, "tier 0 is 7"),
        ({"format": 1, "tiers": [{"name": "/x"}]}, "tier 0 has no read_bps"),
        *[
            ({"format": 1, "tiers": [{**dataclasses.asdict(EXAMPLE), field: value}]}, f"tier 0: {field}=")
            for field, value in [
                ("read_bps", 0),
                ("write_bps", -1.0),
                ("mixed_bps", float("nan")),
                ("mixed_bps", float("inf")),
                ("mixed_bps", 10**400),
                ("read_latency_s", "1"),
                ("write_latency_s", True),
                ("record_bytes", 1.5),
                ("device", ""),
                ("name", None),
                ("hostname", 1),
                ("measured_at", "yesterday"),
            ]
        ],
    ],
)
def test_a_wrong_profile_says_what_is_wrong(tmp_path, caplog, content, wrong):
    path = tmp_path / "tiers.json"
    path.write_bytes(content if isinstance(content, bytes) else b"")
    if not isinstance(content, bytes):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"{path}.*{wrong}"):
        find(jmo.File("/x"), path)
    assert find(jmo.File(tmp_path)) is None  # beside the data it is a warning
    assert str(path) in caplog.text and wrong in caplog.text and caplog.records[0].levelno == logging.WARNING


def test_what_is_no_profile():
    with pytest.raises(ValueError, match=r"/none/x\.json.*cannot be read: No such file"):
        read_profile("/none/x.json")
    for wrong in (7, [7], None):
        with pytest.raises(TypeError, match="profile is"):
            read_profile(wrong)


def test_find(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    tier, through_link = jmo.File(tmp_path / "data"), jmo.File(tmp_path / "link")
    assert profile_name(tier) == profile_name(through_link)
    beside = dataclasses.replace(EXAMPLE, name=profile_name(tier), read_bps=1.0)
    passed = dataclasses.replace(EXAMPLE, name=str(tmp_path / "link"), read_bps=2.0)
    assert find(tier) is None
    assert find(tier, [EXAMPLE]) is None
    assert find(tier, [EXAMPLE, passed]) == find(through_link, as_json([passed])) == passed
    write_profile(tmp_path / "data" / "tiers.json", [beside])
    assert find(tier) == find(through_link) == beside
    assert find(tier, [EXAMPLE]) == beside
    assert find(tier, [passed]) == passed


def test_find_a_key_value_store():
    entry = dataclasses.replace(EXAMPLE, name="s3://bucket/run7")
    spec = jmo.Remote({"driver": "s3", "bucket": "bucket", "path": "run7/"})
    for tier in (spec, jmo.Remote("s3://bucket/run7/"), jmo.Remote("s3://key:secret@bucket/run7")):
        assert find(tier, [EXAMPLE, entry]) == entry
        assert find(tier) is None
    assert find(jmo.Remote("s3://bucket/run8"), [entry]) is None
