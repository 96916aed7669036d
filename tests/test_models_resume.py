"""Checkpoints of the pre-training program: what is saved, what `--resume` goes on with, what it refuses.

A run that goes on from a checkpoint has, to the bit, the losses of one that was never interrupted; the tests compare
one in this process with one that a new process has resumed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from models import pretrain
from tests.pretraining import (
    TIMEOUT_S,
    bytes_in,
    compiled_quickly,
    losses_in,
    metrics_in,
    pretraining,
    run_pretrain,
    steps_saved,
)

RUN = ("--preset", "nano", "--batch", "2", "--seq", "16", "--warmup", "1")
TIERS = ("--host-memory", "250KB", "--subgroup-elements", "4096")
PLAIN = ("--optimizer", "optax")
FLOAT32 = ("--param-dtype", "f32")
SHORT = ("--steps", "6", "--save-every", "3")
MORE = 10
"""Steps that runs do at least after they were resumed, before they are interrupted again."""


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly() -> Iterator[None]:
    jax.devices()  # now, with all of them: the program would make up as few as it needs
    with compiled_quickly():
        yield


def run_here(*arguments: str | Path) -> int:
    return pretrain.main([*map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of plain optax on float32 params that saved after 2, 4 and, at its end, 5 steps."""
    out = tmp_path_factory.mktemp("finished")
    assert run_here(*RUN, *PLAIN, *FLOAT32, "--steps", "5", "--save-every", "2", "--out", out) == 0
    return out


class TestResume:
    @pytest.mark.parametrize(
        "optimizer",
        [PLAIN, TIERS, (*TIERS, *FLOAT32)],
        ids=["optax", "jmo-bf16", "jmo-f32"],
    )
    def test_losses_are_those_of_an_uninterrupted_run(self, optimizer: tuple[str, ...], tmp_path: Path) -> None:
        """The crash came after step 6, while it was saved: what is left is the save that step 4 ran beside."""
        whole, crashed = tmp_path / "whole", tmp_path / "crashed"
        assert run_here(*RUN, *optimizer, *SHORT, "--out", whole) == 0
        shutil.copytree(whole, crashed, ignore=shutil.ignore_patterns("tiers"))
        os.rename(crashed / "checkpoints" / "6", crashed / "checkpoints" / "6.orbax-checkpoint-tmp")
        with (crashed / "metrics.jsonl").open("a") as file:
            file.write('{"step": 7, "lo')
        code, output, error = run_pretrain(*RUN, *optimizer, *SHORT, "--resume", "--out", crashed)
        assert (code, error) == (0, "")
        assert "3, resumed after step 3" in output
        assert [line["step"] for line in metrics_in(crashed)] == [1, 2, 3, 4, 5, 6]
        assert losses_in(crashed) == losses_in(whole)
        assert steps_saved(crashed) == [3, 6]
        if "optax" not in optimizer:
            assert bytes_in(crashed, "bytes_read") > 0

    def test_either_optimizer_goes_on_from_the_other_with_float32_params(self, finished: Path, tmp_path: Path) -> None:
        there, back = tmp_path / "there", tmp_path / "back"
        for source, out, newest, optimizer in ((finished, there, 5, TIERS), (there, back, 4, PLAIN)):
            shutil.copytree(source, out)
            shutil.rmtree(out / "checkpoints" / str(newest))
            settings = (*FLOAT32, "--steps", "5", "--save-every", "3", "--resume")
            assert run_here(*RUN, *optimizer, *settings, "--out", out) == 0
            np.testing.assert_allclose(losses_in(out), losses_in(finished), rtol=1e-5)

    def test_the_newest_two_and_the_end_are_saved(self, finished: Path) -> None:
        assert steps_saved(finished) == [4, 5]

    def test_a_finished_run_has_nothing_left_to_do(self, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = losses_in(finished)
        settings = (*FLOAT32, "--steps", "5", "--resume")
        assert run_here(*RUN, *PLAIN, *settings, "--out", finished) == 0
        assert "0, resumed after step 5" in capsys.readouterr().out
        assert losses_in(finished) == before


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--lr", "2e-3"), "--lr 0.002: .* trained with --lr 0.001"),
            (("--steps", "7"), "--steps 7: .* trained with --steps 5"),
            (("--seed", "1"), "--seed 1"),
            (("--batch", "4"), "--batch 4"),
            (("--preset", "tiny"), "--preset tiny"),
            (("--param-dtype", "bf16"), "--param-dtype bf16"),
            (("--compute-dtype", "bf16"), "--compute-dtype bf16"),
            (("--clip-norm", "1"), "--clip-norm 1.0: .* trained with no --clip-norm"),
            (("--data", "models"), "--data of .* bytes with CRC32"),
            (("--compare",), "--resume .* --compare"),
            (("--save-every", "0"), "--save-every 0"),
            (("--out", "no/such/run"), "--resume: there is no checkpoint in 'no/such/run/checkpoints'"),
        ],
    )
    def test_what_does_not_fit_is_one_line_and_exit_code_2(
        self,
        arguments: tuple[str, ...],
        message: str,
        finished: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "text.py").write_text("x" * 1000)
        monkeypatch.chdir(tmp_path)
        settings = (*FLOAT32, "--steps", "5", "--resume", "--out", finished)
        self.refused([*settings, *arguments], message, capsys)

    def test_optimizers_do_not_mix_with_bf16_params(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_here(*RUN, *PLAIN, "--steps", "1", "--save-every", "1", "--out", tmp_path) == 0
        capsys.readouterr()
        refused = ["--optimizer", "jmo", "--steps", "1", "--resume", "--out", tmp_path]
        self.refused(refused, "--optimizer jmo: .* trained with --optimizer optax", capsys)

    def test_a_fresh_run_leaves_checkpoints_alone(self, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
        fresh = [*FLOAT32, "--steps", "5", "--save-every", "1", "--out", finished]
        self.refused(fresh, "--save-every 1: .* checkpoint of step 5 .* --resume", capsys)
        assert steps_saved(finished) == [4, 5]

    def test_a_damaged_checkpoint_fails_by_name(self, finished: Path, tmp_path: Path) -> None:
        """In a process of its own: what Orbax leaves of its other reads comes up later."""
        out = tmp_path / "out"
        shutil.copytree(finished, out)
        for file in (out / "checkpoints" / "5" / "state").glob("**/d/*"):
            os.truncate(file, 10)
        code, _, error = run_pretrain(*RUN, *PLAIN, *FLOAT32, "--steps", "5", "--resume", "--out", out)
        assert code == 1
        said = f"pretrain: failed: checkpoints in '{out / 'checkpoints'}': "  # and what the first read met that failed
        # Orbax's threads write beside it, so it need not begin a line
        assert len(re.findall(re.escape(said) + r"\S", error)) == 1, error

    def refused(self, arguments: list[str | Path], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        optimizer = () if "--optimizer" in arguments or "--compare" in arguments else PLAIN
        code = run_here(*RUN, *optimizer, *arguments)
        output, error = capsys.readouterr()
        assert (code, output) == (2, "")
        assert error.count("\n") == 1
        assert re.search(message, error), error


class TestSignals:
    def test_sigterm_saves_and_resume_goes_on(self, tmp_path: Path) -> None:
        done = self.interrupted(tmp_path / "out", 2)
        resumed = self.interrupted(tmp_path / "out", len(done) + MORE, "--resume")
        whole = self.interrupted(tmp_path / "whole", len(done) + MORE)
        assert [line["step"] for line in metrics_in(tmp_path / "out")] == [*range(1, len(resumed) + 1)]
        assert all(one == other for one, other in zip(resumed, whole, strict=False))
        assert steps_saved(tmp_path / "out") == [len(done), len(resumed)]

    def test_sigterm_to_the_launcher_saves_one_step_of_all(self, tmp_path: Path) -> None:
        """One process on as many devices goes on from it."""
        done = self.interrupted(tmp_path / "out", 2, "--processes", "2")
        assert steps_saved(tmp_path / "out") == [len(done)]
        resumed = self.interrupted(tmp_path / "out", len(done) + MORE, "--devices", "2", "--resume")
        whole = self.interrupted(tmp_path / "whole", len(done) + MORE, "--devices", "2")
        both = min(len(resumed), len(whole))
        np.testing.assert_allclose(resumed[:both], whole[:both], rtol=1e-5)

    def interrupted(self, out: Path, steps: int, *arguments: str) -> list[float]:
        """The losses of a run that gets a SIGTERM once it has done so many steps, and is at its end long after."""
        settings = ("--steps", "100000", "--save-every", "100000", "--out", out)
        with pretraining(*RUN, *TIERS, *settings, *arguments) as process:
            recorded = out / "metrics.jsonl"
            while process.poll() is None and not (recorded.exists() and recorded.read_text().count("\n") >= steps):
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            output, error = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, error) == (130, "")
        assert "(interrupted)" in output
        return losses_in(out)
