"""The example models on meshes and in several processes: rules, the command line, the launcher, whole runs."""

from __future__ import annotations

import contextlib
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import launch, pretrain, settings, sharding, transformer
from tests.pretraining import TIMEOUT_S, UNOPTIMIZED, bytes_in, compiled_quickly, losses_in, pretraining

P = PartitionSpec
RUN = ("--preset", "nano", "--steps", "3", "--batch", "4", "--seq", "16", "--warmup", "1")
RECORDS = ("--subgroup-elements", "2048")


def abstract_mesh(text: str) -> jax.sharding.AbstractMesh:
    sizes = sharding.parse_mesh(text)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly() -> Iterator[None]:
    with compiled_quickly():
        yield


class TestRules:
    def test_a_mesh_is_read_in_the_order_of_its_axes(self) -> None:
        assert list(sharding.parse_mesh("tensor=4, data=2").items()) == [("data", 2), ("tensor", 4)]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("rows=2", "no axis 'rows'"),
            ("data=0", "data 0 is not positive"),
            ("data=-1", "data -1 is not positive"),
            ("data=x", "'data=x' is no axis=size"),
            ("data", "'data' is no axis=size"),
            ("", "no axis=size"),
            ("data=2,data=2", "comes twice"),
        ],
    )
    def test_a_wrong_mesh_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            sharding.parse_mesh(text)

    def test_every_dimension_has_a_rule(self) -> None:
        """A name without a rule would never be sharded, and nobody would notice."""
        config = transformer.preset("tiny")
        specs = transformer.param_specs(config, abstract_mesh("data=2,fsdp=2,tensor=2"))
        block = specs["blocks"][0]
        column, row = {"kernel": P("fsdp", "tensor")}, {"kernel": P("tensor", "fsdp")}
        assert specs["embed"]["embedding"] == P("tensor", "fsdp")
        assert specs["head"] == column
        assert block["attention"]["query"] == block["attention"]["key"] == block["attention"]["value"] == column
        assert block["attention"]["out"] == {"kernel": P("tensor", None, "fsdp")}
        assert block["mlp"] == {"gate": column, "up": column, "down": row}
        assert specs["norm"] == block["mlp_norm"] == block["attention_norm"] == {"scale": P()}

    def test_what_an_axis_does_not_divide_stays_whole(self) -> None:
        config = transformer.preset("tiny")  # 4 heads, 2 of keys and values, 128 wide, 512 hidden
        specs = transformer.param_specs(config, abstract_mesh("fsdp=3,tensor=4"))
        attention = specs["blocks"][0]["attention"]
        assert attention["query"] == {"kernel": P(None, "tensor")}
        assert attention["key"] == attention["value"] == {"kernel": P()}
        assert specs["blocks"][0]["mlp"]["down"] == {"kernel": P("tensor")}

    @pytest.mark.parametrize("mesh", ["data=4", "fsdp=8", "tensor=2", "data=2,fsdp=3", "fsdp=2,tensor=8"])
    def test_specs_name_axes_of_the_mesh_that_divide(self, mesh: str) -> None:
        config, sizes = transformer.preset("nano"), sharding.parse_mesh(mesh)
        params = transformer.abstract_params(config)
        specs = transformer.param_specs(config, abstract_mesh(mesh))
        assert jax.tree.structure(params) == jax.tree.structure(specs)
        for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True):
            for extent, axis in zip(leaf.shape, spec, strict=False):
                assert axis is None or extent % sizes[axis] == 0

    def test_several_axes_of_one_dimension_are_taken_as_far_as_they_divide(self) -> None:
        mesh = abstract_mesh("data=2,fsdp=2")
        fitted = [sharding.fit([("data", "fsdp"), "tensor"], (rows, 4), mesh) for rows in (4, 6, 3)]
        assert fitted == [P(("data", "fsdp")), P("data"), P()]

    def test_activations_do_not_change_with_the_mesh(self) -> None:
        config = transformer.preset("nano", param_dtype="float32")
        rng = np.random.default_rng(0)
        shapes = transformer.abstract_params(config)
        params = jax.tree.map(lambda leaf: rng.normal(scale=0.1, size=leaf.shape).astype(np.float32), shapes)
        tokens = rng.integers(0, 256, size=(4, 8)).astype(np.int32)
        mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
        apply = jax.jit(transformer.apply, static_argnums=(0, 3))
        whole, split = apply(config, params, tokens, None), apply(config, params, tokens, mesh)
        assert split.sharding.spec == P(("data", "fsdp"), None, "tensor")
        np.testing.assert_allclose(split, whole, rtol=0, atol=1e-5)


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--mesh rows=2", "no axis 'rows'"),
            ("--mesh fsdp=2 --devices 2", "--devices 2 is short for --mesh fsdp=2"),
            ("--devices 0", "--devices 0"),
            ("--batch 4 --mesh data=2,fsdp=3", "--batch 4 is no multiple of the 6 parts"),
            ("--processes 0", "--processes 0"),
            ("--processes 3 --mesh fsdp=4", "does not divide among 3 processes"),
            ("--processes 2 --distributed", "--processes 2 starts processes here"),
            ("--coordinator a:1", "give --num-processes, --process-id too"),
            ("--coordinator a:1 --num-processes 2 --process-id 2", "--process-id 2 is none"),
            ("--coordinator a --num-processes 2 --process-id 1", "no HOST:PORT"),
            ("--distributed --process-id 1", "--distributed asks the cluster"),
        ],
    )
    def test_what_does_not_fit_is_one_line_and_exit_code_2(
        self, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert pretrain.main(arguments.split()) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    @pytest.mark.parametrize(
        ("arguments", "mesh", "cpu_devices"),
        [
            ("", {"fsdp": 1}, 1),
            ("--devices 4", {"fsdp": 4}, 4),
            ("--mesh tensor=2,data=4", {"data": 4, "tensor": 2}, 8),
            ("--processes 2", {"fsdp": 2}, 1),
            ("--mesh data=4 --coordinator host:1 --num-processes 2 --process-id 1", {"data": 4}, 2),
            ("--distributed", None, None),
        ],
    )
    def test_devices_follow_from_mesh_and_processes(
        self, arguments: str, mesh: dict[str, int] | None, cpu_devices: int | None
    ) -> None:
        parsed = settings.parse(arguments.split())
        assert (parsed.mesh, parsed.cpu_devices) == (mesh, cpu_devices)
        assert parsed.on_devices(8).mesh == (mesh or {"fsdp": 8})


class TestLauncher:
    """With children that are as quick as a bare interpreter, told apart by their last argument."""

    def run(self, code: str, capfd: pytest.CaptureFixture[str], grace_s: float = 60) -> tuple[int, str]:
        prelude = "import os, signal, sys, time\nme = int(sys.argv[-1])\n"
        program = (sys.executable, "-c", prelude + textwrap.dedent(code))
        return launch.run([], 2, program=program, grace_s=grace_s), capfd.readouterr().err

    def test_a_child_that_waits_for_one_that_failed_is_killed(self, capfd: pytest.CaptureFixture[str]) -> None:
        code, error = self.run(
            "time.sleep(1000) if me == 0 else sys.exit('pretrain: failed: disk on fire')", capfd, 0.1
        )
        assert code == 1
        assert error.splitlines() == [
            "pretrain: failed: process 1: disk on fire",
            "pretrain: failed: process 0: killed, 0.1 s after the first failure",
        ]

    def test_a_child_that_a_signal_ended_is_named(self, capfd: pytest.CaptureFixture[str]) -> None:
        code, error = self.run("os.kill(os.getpid(), signal.SIGKILL) if me == 1 else None", capfd)
        assert (code, error) == (1, "pretrain: failed: process 1: killed by SIGKILL\n")

    def test_one_line_where_all_fail_alike(self, capfd: pytest.CaptureFixture[str]) -> None:
        code, error = self.run("print('pretrain: error: no tier', file=sys.stderr); sys.exit(2)", capfd)
        assert (code, error) == (2, "pretrain: error: no tier\n")

    def test_what_children_say_is_shown_with_their_number(self, capfd: pytest.CaptureFixture[str]) -> None:
        code, error = self.run("print('a warning', me, file=sys.stderr)", capfd)
        assert code == 0
        assert sorted(error.splitlines()) == ["process 0: a warning 0", "process 1: a warning 1"]

    def test_ctrl_c_reaches_every_child(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Both wait for SIGTERM, and one of them gives the launcher its SIGINT once both do."""
        code = """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.kill(os.getppid(), signal.SIGINT) if me == 1 else None
        signal.sigwait({signal.SIGTERM})
        sys.exit(130)
        """
        assert self.run(code, capfd) == (130, "")

    def test_a_signal_that_comes_before_the_first_child(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = launch.free_port

        def interrupted() -> int:
            signal.raise_signal(signal.SIGINT)
            return find()

        monkeypatch.setattr(launch, "free_port", interrupted)
        assert self.run("time.sleep(1000)", capfd) == (130, "")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A comparison on eight devices along three axes, with state on tiers: its folder and exit code."""
    out = tmp_path_factory.mktemp("compared")
    mesh = ("--mesh", "data=2,fsdp=2,tensor=2")
    return out, pretrain.main([*RUN, *RECORDS, "--host-memory", "750KB", *mesh, "--compare", "--out", str(out)])


class TestRuns:
    def test_losses_agree_on_three_axes(self, compared: tuple[Path, int]) -> None:
        out, code = compared
        assert code == 0
        offloaded, plain = losses_in(out / "jmo"), losses_in(out / "optax")
        assert len(offloaded) == len(plain) == 3
        np.testing.assert_allclose(offloaded, plain, rtol=1e-4)
        assert bytes_in(out / "jmo", "bytes_read") > 0

    def test_two_processes_train_together(
        self,
        compared: tuple[Path, int],
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """On another mesh of half as many devices, with the losses of one process."""
        for name, value in UNOPTIMIZED.items():
            monkeypatch.setenv(name, value)
        mesh = ("--mesh", "data=2,tensor=2", "--processes", "2")
        code = pretrain.main([*RUN, *RECORDS, "--host-memory", "300KB", *mesh, "--out", str(tmp_path)])
        output, error = capfd.readouterr()
        assert (code, error) == (0, "")
        assert output.count("step 3/3") == output.count("process 0 of 2") == 1
        np.testing.assert_allclose(losses_in(tmp_path), losses_in(compared[0] / "optax"), rtol=1e-4)
        assert bytes_in(tmp_path, "bytes_read") > 0

    def test_a_record_that_one_process_cannot_read_ends_both(self, tmp_path: Path) -> None:
        """The one that met it names it; the other says that it was another; the launcher says both, and ends."""
        tier = tmp_path / "tier"
        arguments = ("--preset", "nano", "--steps", "100000", "--batch", "2", "--seq", "16", "--processes", "2")
        memory = ("--host-memory", "200KiB", "--subgroup-elements", "4096")
        with pretraining(*arguments, *memory, "--tier", tier, "--out", tmp_path / "out") as process:
            assert process.stdout is not None
            assert "step 1/" in process.stdout.readline()
            folder = next(tier.glob("jmo-*"))
            while not damage_records(folder):
                assert process.poll() is None
            _, error = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 1
        lines = error.splitlines()
        assert len(lines) == 2
        assert all(line.startswith("pretrain: failed: process ") for line in lines)
        assert sum(str(folder) in line and "CRC32C" in line for line in lines) == 1
        assert sum("failed in another process" in line for line in lines) == 1

    def test_processes_with_other_settings_are_refused_by_all(self) -> None:
        port = launch.free_port()
        member = (*RUN, "--mesh", "data=2", "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2")
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(pretraining(*member, "--process-id", str(i), "--seed", str(7 * i)))
                for i in range(2)
            ]
            for process in started:
                output, error = process.communicate(timeout=TIMEOUT_S)
                assert (process.returncode, output) == (2, "")
                assert error == (
                    "pretrain: error: processes [1] have other settings or text than process 0: start all with the same\n"
                )


def damage_records(folder: Path) -> int:
    """Overwrites the start of each record in a tier's folder; returns of how many."""
    damaged = 0
    for record in folder.glob("*/*/c/**/*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # by now it belongs to another record
            with record.open("r+b") as file:
                file.write(bytes(range(256)))
            damaged += 1
    return damaged
