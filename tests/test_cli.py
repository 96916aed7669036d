"""The command line, in processes of its own where that matters."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pty
import re
import signal
import stat
import subprocess
import sys

import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import cli
from jax_mlp_offload.profile import find, read_profile
from tests.limited import probe_files, wait_for

ROOT = pathlib.Path(__file__).parent.parent
QUICK = ["--record", "64KiB", "--seconds", "0.1"]


def start(*arguments, before=(), **options):
    command = [*before, sys.executable, "-m", "jax_mlp_offload", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)


def finish(process):
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "Traceback" not in (err or "")
    return process.returncode, out, err


def test_probe_prints_a_table_and_saves_beside_the_data(two_tiers):
    code, out, err = finish(start("probe", *two_tiers, *QUICK))
    assert code == 0, err
    assert f"same device as {two_tiers[0]}" in out and "iB/s" in out and "64.0 KiB" in out
    assert "\x1b" not in out + err and "\r" not in out + err  # no terminal, no progress bar
    entries = []
    for path in two_tiers:
        assert os.listdir(path) == ["tiers.json"]
        entry = find(jmo.File(path))
        assert entry is not None and entry.name == path
        entries.append(dataclasses.replace(entry, name="same"))
    assert entries[0] == entries[1]  # measured once


def test_probe_prints_json_and_saves_in_one_file(two_tiers, tmp_path):
    output = tmp_path / "profile.json"
    code, out, err = finish(start("probe", *two_tiers, *QUICK, "--json", "--output", output))
    assert code == 0, err
    assert json.loads(out) == json.loads(output.read_text())
    assert [entry.name for entry in read_profile(output)] == two_tiers
    assert all(os.listdir(path) == [] for path in two_tiers)


def test_probe_on_a_terminal(tmp_path):
    """The bar is drawn on standard error, and not on the table."""
    leader, terminal = pty.openpty()
    process = start("probe", tmp_path, "--record", "64KiB", "--seconds", "1", stderr=terminal)
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    code, out, _ = finish(process)
    assert code == 0
    assert b"\x1b[" in shown and "reading" in shown.decode()
    assert "\x1b" not in out and "64.0 KiB" in out


def test_probe_makes_a_directory_only_to_save_there(tmp_path, capsys):
    assert cli.main(["probe", str(tmp_path / "new"), *QUICK, "--output", str(tmp_path / "x.json")]) == 0
    assert os.listdir(tmp_path) == ["x.json"]
    assert cli.main(["probe", str(tmp_path / "new"), *QUICK]) == 0
    assert os.listdir(tmp_path / "new") == ["tiers.json"]
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_probe_of_a_key_value_store(capsys, tmp_path):
    assert cli.main(["probe", "memory://probe", *QUICK]) == 0
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("{")]
    assert find(jmo.Remote("memory://probe"), json.loads(line)) is not None
    assert "--output" in printed.err
    assert "memory://probe" in printed.out


@pytest.mark.parametrize(
    ("tier", "wrong"),
    [
        ("{tmp}/none/x", "No such file or directory"),
        ("{tmp}/file", "File exists|Not a directory"),
        ("{tmp}/file/x", "Not a directory"),
        ("http://host/x", "takes writes"),
        ("nosuch://bucket/x", "nosuch"),
    ],
)
def test_probe_of_what_is_no_tier(tmp_path, capsys, tier, wrong):
    (tmp_path / "file").write_text("")
    tier = tier.format(tmp=tmp_path)
    assert cli.main(["probe", tier, *QUICK]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert tier in line
    assert re.search(wrong, line)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("bad_first", [True, False])
def test_one_tier_of_two_fails(tmp_path, capsys, bad_first):
    """The other is measured and saved all the same, though both are on one device."""
    good, bad = str(tmp_path / "good"), str(tmp_path / "none" / "x")
    os.mkdir(good)
    assert cli.main(["probe", *([bad, good] if bad_first else [good, bad]), *QUICK]) == 1
    printed = capsys.readouterr()
    assert f"error: tier {bad!r}" in printed.err
    assert good in printed.out and "same device" not in printed.out
    assert find(jmo.File(good)) is not None
    assert os.listdir(tmp_path) == ["good"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["{tmp}", "--record", "many"],
        ["{tmp}", "--record", "1KiB"],
        ["{tmp}", "--seconds", "0"],
        ["{tmp}", "--seconds", "nan"],
        ["{tmp}", "--seconds", "soon"],
        ["{tmp}", "--output", "{tmp}/none/x.json"],
        ["{tmp}", "--output", "{tmp}"],
        [],
    ],
)
def test_wrong_arguments_of_probe(tmp_path, capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe", *(argument.format(tmp=tmp_path) for argument in arguments)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "usage:" in printed.err and (arguments[1:2] or ["PATH_OR_URL"])[0] in printed.err
    assert os.listdir(tmp_path) == []


def test_a_tier_given_twice(tmp_path, capsys):
    assert cli.main(["probe", str(tmp_path), f"{tmp_path}/.", *QUICK]) == 1
    assert "is the same directory" in capsys.readouterr().err


def test_help(capsys):
    for arguments in (["--help"], ["probe", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
    assert "tiers.json" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(tmp_path, number):
    process = start("probe", tmp_path, "--record", "64KiB", "--seconds", "600")
    wait_for(lambda: probe_files(tmp_path))
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == 128 + number and out == "" and "stopped" in err
    assert os.listdir(tmp_path) == []


def test_signal_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["probe", str(tmp_path), *QUICK]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.skipif(
    subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode != 0,
    reason="unshare -Urm is not permitted here, so no small file system can be mounted",
)
@pytest.mark.parametrize(
    ("mount", "code", "said"),
    [
        ("mount -t tmpfs -o size=4m none $0", 0, "has room for 3.6 MiB only"),
        ("mount -t tmpfs -o size=4m none $0; head -c 8m /dev/zero > $0/full 2> /dev/null", 1, "are free"),
        ("mount -t tmpfs -o ro none $0", 1, "Read-only file system"),
    ],
    ids=["small", "full", "read-only"],
)
def test_on_a_file_system(tmp_path, mount, code, said):
    tier, output = tmp_path / "tier", tmp_path / "profile.json"
    tier.mkdir()
    before = ["unshare", "-Urm", "--propagation", "private", "sh", "-c", f'{mount}; exec "$@"', str(tier)]
    ended, _, err = finish(start("probe", tier, "--seconds", "0.1", "--output", output, before=before))
    assert ended == code and said in err and str(tier) in err
    assert output.exists() == (code == 0)
    if code == 0:
        (entry,) = read_profile(output)
        assert 2**16 < entry.record_bytes < 2**20
