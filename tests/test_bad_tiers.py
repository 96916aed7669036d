"""Tiers that make no sense or cannot be used: an error at construction that names the tier and the remedy."""

from __future__ import annotations

import os

import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload.registry import live_stores

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("url", ["http://host/x", "https://host/x"])
def test_url_tiers_that_take_no_writes(url):
    with pytest.raises(ValueError, match=f"{url}.*only reads.*takes writes"):
        jmo.Store(url)


@pytest.mark.parametrize("tier", ["nosuch://bucket/x", jmo.Remote({"driver": "nosuch"})])
def test_url_tiers_that_nobody_knows(tier, tmp_path):
    with pytest.raises(ValueError, match=r"tier 'nosuch://.*TensorStore opens no such store"):
        jmo.Store(tmp_path, tier)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kvstore": "bucket/run7"}, ValueError, "'bucket/run7'.*no URL.*directory"),
        ({"kvstore": 3}, TypeError, r"Remote\(<int>\).*URL"),
        ({"kvstore": {"bucket": "b"}}, ValueError, "needs a 'driver'"),
        ({"connections": 0}, ValueError, "connections=0.*at least 1"),
        ({"connections": True}, ValueError, "connections=True"),
        ({"retries": -1}, ValueError, "retries=-1"),
        ({"retries": 1.5}, ValueError, "retries=1.5"),
        ({"request_timeout_s": 0}, ValueError, "request_timeout_s=0"),
        ({"request_timeout_s": float("nan")}, ValueError, "request_timeout_s=nan"),
        ({"object_bytes": "no size"}, ValueError, "object_bytes.*'no size'"),
        ({"object_bytes": 0}, ValueError, "object_bytes=0"),
        ({"capacity": "lots"}, ValueError, "capacity.*'lots'"),
    ],
)
def test_remote_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        jmo.Remote(**({"kvstore": "s3://bucket/run7"} | arguments))


def test_a_directory_on_another_host():
    with pytest.raises(ValueError, match=r"file://host/x.*'host'"):
        jmo.Store("file://host/x")


def test_a_directory_by_its_spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spec in ({"driver": "file", "path": "here/"}, {"driver": "file", "path": f"{tmp_path}/here"}):
        with jmo.Store(jmo.Remote(spec, capacity="1MiB")) as store:
            assert store.stats()["tiers"][0]["capacity_bytes"] == 2**20
            assert len(list((tmp_path / "here").iterdir())) == 1
        assert not list((tmp_path / "here").iterdir())
    with pytest.raises(ValueError, match="no path"):
        jmo.Store(jmo.Remote({"driver": "file"}))


def test_names_of_stores():
    named = {
        "memory://": "memory://",
        "s3://bucket/run7/": "s3://bucket/run7/",
        "gs://user@bucket": "gs://bucket",
    }
    assert {url: jmo.Remote(url).name for url in named} == named
    assert jmo.Remote({"driver": "gcs", "bucket": "b", "path": "p/q/"}).name == "gs://b/p/q"
    assert jmo.Remote({"driver": "file", "path": "/a/b/"}).name == "file:///a/b"


@pytest.mark.parametrize("tier", [None, 3, b"/tmp", ["/tmp"], {"path": "/tmp"}])
def test_tiers_that_are_no_paths(tier):
    with pytest.raises(TypeError, match=r"jmo\.File|directory"):
        jmo.Store(tier)


def test_a_password_in_a_url_is_not_shown():
    tier = jmo.Remote("s3://user:hunter2@bucket/run?token=hunter2")
    assert repr(tier) == "Remote('s3://bucket/run')"
    for arguments in ({"connections": 0}, {"capacity": -1}, {"request_timeout_s": 0}):
        with pytest.raises(ValueError, match="bucket/run") as caught:
            jmo.Remote(tier.kvstore, **arguments)
        assert "hunter2" not in str(caught.value)
    for wrong in ("s3//user:hunter2@bucket", b"s3://user:hunter2@bucket"):
        with pytest.raises((ValueError, TypeError), match="Remote") as caught:
            jmo.Remote(wrong)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="driver") as caught:
        jmo.Remote({"key": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_empty_path():
    with pytest.raises(TypeError, match="''"):
        jmo.Store("")


@pytest.mark.parametrize(
    "pair",
    [
        ("s3://b/p", "s3://b/p/"),
        ("memory://x", jmo.Remote("memory://x")),
        ("memory://x", jmo.Remote({"driver": "memory", "path": "x/"})),
        ("s3://b/p", jmo.Remote({"driver": "s3", "bucket": "b", "path": "p/"})),
        ("gs://b/p", jmo.Remote({"driver": "gcs", "bucket": "b", "path": "p"})),
    ],
)
def test_the_same_store_twice(pair):
    with pytest.raises(ValueError, match="same place"):
        jmo.Store(*pair)


def test_the_same_tier_twice(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    for one, two in [("a", "a"), ("a", "a/"), ("a", tmp_path / "a"), ("link", jmo.File("a"))]:
        with pytest.raises(ValueError, match=r"same directory.*once"):
            jmo.Store(one, two)
    assert not list((tmp_path / "a").iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity": "lots"}, ValueError, "capacity.*'lots'"),
        ({"capacity": 0}, ValueError, "capacity=0"),
        ({"read_limit": "0B"}, ValueError, "read_limit='0B'"),
        ({"write_limit": -1}, ValueError, "write_limit.*-1"),
        ({"write_limit": "4 furlongs"}, ValueError, "write_limit.*furlongs"),
        ({"io": "mmap"}, ValueError, "io='mmap'.*'native' or 'tensorstore'"),
        ({"read_limit": [1]}, TypeError, r"read_limit.*\[1\]"),
    ],
)
def test_file_arguments(arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        jmo.File(tmp_path, **arguments)


def test_tiers_that_cannot_be_written(tmp_path):
    """Permissions do not bind root, so these are paths that nobody can write."""
    (tmp_path / "file").write_text("")
    (tmp_path / "good").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    bad = ["file", "file/below", "no/such/parent", "dangling", "/proc/jmo-test", "/sys/jmo-test", "x" * 300]
    for path in bad:
        full = os.path.join(tmp_path, path)
        with pytest.raises(OSError, match=r"cannot be used.*give a directory") as caught:
            jmo.Store(tmp_path / "good", full)
        assert full in str(caught.value)
        # what the good tier got is gone again
        assert not list((tmp_path / "good").iterdir())
    assert (tmp_path / "file").read_text() == ""
    assert not live_stores()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_tier_without_permission(tmp_path):
    (tmp_path / "sealed").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match="sealed"):
        jmo.Store(tmp_path / "sealed")
