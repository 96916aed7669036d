"""The example models and the pre-training program: shapes, causality, sizes, data, and the command line.

Runs that need the library skip where it does not import; everything else runs without it.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import mlp, pretrain, report, sharding, training, transformer
from models.data import ByteCorpus
from tests.pretraining import TIMEOUT_S, bytes_in, compiled_quickly, metrics_in, pretraining, run_pretrain

CONFIG = transformer.Config(
    dim=32, layers=2, heads=4, kv_heads=2, hidden=64, param_dtype=jnp.float32, compute_dtype=jnp.float32
)
SINGLE = dataclasses.replace(CONFIG, layers=1)
TOKENS = np.random.default_rng(0).integers(0, 256, size=(2, 12)).astype(np.int32)


def logits_of(
    config: transformer.Config, params: transformer.Params, tokens: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Applies the model, compiled once a config."""
    return np.asarray(_apply(config, params, tokens))


_apply = jax.jit(transformer.apply, static_argnums=0)


def library_is_there() -> bool:
    """Whether `jax_mlp_offload`, with its extension, imports."""
    try:
        library = importlib.import_module("jax_mlp_offload")
    except ImportError:
        return False
    return all(hasattr(library, name) for name in ("Store", "adamw", "OffloadError"))


@pytest.fixture(scope="module", autouse=True)
def _compiled_quickly() -> Iterator[None]:
    with compiled_quickly():
        yield


@pytest.fixture(scope="module")
def params() -> transformer.Params:
    fresh: transformer.Params = jax.jit(lambda key: transformer.init_params(CONFIG, key))(jax.random.key(0))
    return fresh


class TestTransformer:
    def test_logits_have_the_documented_shape_and_dtype(self, params: transformer.Params) -> None:
        logits = logits_of(CONFIG, params, TOKENS)
        assert logits.shape == (2, 12, 256)
        assert logits.dtype == np.float32
        assert np.isfinite(logits).all()

    def test_a_later_token_does_not_change_earlier_logits(self, params: transformer.Params) -> None:
        changed = TOKENS.copy()
        changed[:, 7] = (changed[:, 7] + 1) % 256
        before = logits_of(CONFIG, params, TOKENS)
        after = logits_of(CONFIG, params, changed)
        np.testing.assert_allclose(after[:, :7], before[:, :7], rtol=0, atol=1e-6)
        assert (np.abs(after[:, 7:] - before[:, 7:]).max(axis=(0, 2)) > 1e-4).all()

    def test_positions_matter(self, params: transformer.Params) -> None:
        """Without rotary positions the last logits would not see the order of the tokens before."""
        swapped = TOKENS.copy()
        swapped[:, [1, 5]] = TOKENS[:, [5, 1]]
        single = {**params, "blocks": {0: params["blocks"][0]}}
        last = [logits_of(SINGLE, single, tokens)[:, -1] for tokens in (TOKENS, swapped)]
        assert np.abs(last[0] - last[1]).max() > 1e-4

    def test_rotation_depends_on_relative_position_only(self) -> None:
        query, key = jax.random.normal(jax.random.key(1), (2, 8))
        rows = [transformer.rotate(jnp.tile(x, (1, 9, 1, 1)), 10_000.0)[0, :, 0] for x in (query, key)]
        scores = np.asarray(rows[0] @ rows[1].T)
        np.testing.assert_allclose(scores[5, 2], scores[8, 5], rtol=1e-5)
        assert abs(scores[5, 2] - scores[5, 4]) > 1e-3

    def test_grouped_queries_equal_repeated_keys_and_values(self, params: transformer.Params) -> None:
        full = dataclasses.replace(CONFIG, kv_heads=CONFIG.heads)
        repeats = CONFIG.heads // CONFIG.kv_heads

        def repeat(path: Any, leaf: jax.Array) -> jax.Array:
            if not {"key", "value"} & set(jax.tree_util.keystr(path, simple=True, separator="/").split("/")):
                return leaf
            return jnp.repeat(leaf, repeats, axis=1)

        repeated = jax.tree_util.tree_map_with_path(repeat, params)
        np.testing.assert_allclose(
            logits_of(full, repeated, TOKENS), logits_of(CONFIG, params, TOKENS), rtol=0, atol=1e-5
        )

    def test_remat_changes_no_gradient(self, params: transformer.Params) -> None:
        def loss(params: transformer.Params, config: transformer.Config) -> jax.Array:
            return jnp.square(transformer.apply(config, params, jnp.asarray(TOKENS))).mean()

        gradient = jax.jit(jax.grad(loss), static_argnums=1)
        single = {**params, "blocks": {0: params["blocks"][0]}}
        plain = gradient(single, SINGLE)
        recomputed = gradient(single, dataclasses.replace(SINGLE, remat=True))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, recomputed)

    @pytest.mark.parametrize(
        ("name", "low", "high"),
        [
            ("nano", 70e3, 90e3),
            ("tiny", 0.9e6, 1.2e6),
            ("small", 15e6, 20e6),
            ("125m", 120e6, 130e6),
            ("350m", 340e6, 360e6),
            ("1.3b", 1.25e9, 1.35e9),
        ],
    )
    def test_presets_have_about_the_size_they_say(self, name: str, low: float, high: float) -> None:
        leaves = jax.tree.leaves(transformer.abstract_params(transformer.preset(name)))
        assert low <= sum(leaf.size for leaf in leaves) <= high
        assert {leaf.dtype for leaf in leaves} == {np.dtype(jnp.bfloat16)}

    def test_a_config_says_how_many_params_it_has(self, params: transformer.Params) -> None:
        assert transformer.count_params(CONFIG) == sum(leaf.size for leaf in jax.tree.leaves(params))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"heads": 5}, "heads=5"), ({"kv_heads": 3}, "kv_heads=3"), ({"layers": 0}, "layers=0")],
    )
    def test_sizes_that_do_not_fit_are_refused(self, changes: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


class TestTraining:
    def test_float32_masters_see_gradients_of_the_rounded_weights(self) -> None:
        """The reference rounds masters to bf16 for the forward pass, and its gradients are bf16 values."""
        config = dataclasses.replace(SINGLE, param_dtype=jnp.bfloat16)
        mesh = sharding.make_mesh({"fsdp": 1})
        keep = optax.GradientTransformation(
            jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params)),
            lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
        )
        state = training.init_state(config, keep, mesh, seed=0, state_dtype=jnp.float32)
        masters = jax.tree.map(lambda leaf: np.asarray(leaf) * np.float32(1 + 2.0**-10), state.params)
        weights = jax.tree.map(lambda leaf: jax.device_put(leaf.astype(jnp.bfloat16)), masters)
        state = training.TrainState(jax.tree.map(jax.device_put, masters), state.opt_state)
        step = training.make_train_step(config, keep, mesh, state)
        tokens = training.place_batch(TOKENS, mesh)
        state, loss = step(state, tokens)

        narrow = training.TrainState(weights, keep.init(weights))
        narrow, expected = training.make_train_step(config, keep, mesh, narrow)(narrow, tokens)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        for wide, bf16 in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(narrow.opt_state), strict=True):
            assert (wide.dtype, bf16.dtype) == (jnp.float32, jnp.bfloat16)
            wide_values, values = np.asarray(wide), np.asarray(bf16).astype(np.float32)
            np.testing.assert_array_equal(wide_values, wide_values.astype(jnp.bfloat16).astype(np.float32))
            np.testing.assert_allclose(wide_values, values, rtol=2**-6, atol=1e-5)

    def test_the_schedule_warms_up_then_falls_to_a_tenth(self) -> None:
        learning_rate = training.schedule(1.0, warmup=4, steps=20)
        values = [float(learning_rate(step)) for step in range(21)]
        assert 0 < values[0] < values[1] < values[4] == pytest.approx(1.0)
        assert values[20] == pytest.approx(0.1)
        assert all(map(math.isfinite, [float(training.schedule(1.0, 10, 3)(step)) for step in range(3)]))

    def test_vectors_are_not_decayed(self, params: transformer.Params) -> None:
        mask = training.decay_mask(params)
        assert mask["norm"]["scale"] is False
        assert mask["head"]["kernel"] is True


class TestMLP:
    def test_any_optax_transform_trains_it(self) -> None:
        state = mlp.create_state(optax.adamw(1e-2))
        losses = []
        for step in range(30):
            state, loss = mlp.train_step(state, *mlp.synthetic_batch(step))
            losses.append(float(loss))
        assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
        assert int(state.step) == 30


class TestData:
    def test_batches_depend_on_seed_and_step_only(self) -> None:
        first, second = ByteCorpus(max_bytes=100_000), ByteCorpus(max_bytes=100_000)
        batch = first.batch(3, batch=4, seq=16, seed=1)
        assert batch.shape == (4, 17)
        assert batch.dtype == np.int32
        assert batch.min() >= 0
        assert batch.max() <= 255
        np.testing.assert_array_equal(batch, second.batch(3, batch=4, seq=16, seed=1))
        assert (batch != first.batch(4, batch=4, seq=16, seed=1)).any()
        assert (batch != first.batch(3, batch=4, seq=16, seed=2)).any()

    def test_files_are_joined_in_the_order_of_their_paths(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        for name, text in (("c.py", "three"), ("b/x.py", "two"), ("a.py", "one"), ("a.txt", "no")):
            (tmp_path / name).write_text(text)
        assert ByteCorpus(tmp_path).data.tobytes() == b"one\ntwo\nthree\n"
        assert ByteCorpus(tmp_path, max_bytes=6).data.tobytes() == b"one\ntw"

    def test_every_window_of_a_short_text_can_come_up(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text("0123")
        batch = ByteCorpus(tmp_path).batch(0, batch=64, seq=3)
        assert {bytes(row.astype(np.uint8)) for row in batch} == {b"0123", b"123\n"}

    def test_a_folder_without_text_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=f"{tmp_path}.*no text"):
            ByteCorpus(tmp_path)
        with pytest.raises(ValueError, match=f"{tmp_path / 'missing'}.*does not exist"):
            ByteCorpus(tmp_path / "missing")
        (tmp_path / "a.py").write_text("short")
        with pytest.raises(ValueError, match=f"{tmp_path}.*6 bytes"):
            ByteCorpus(tmp_path).batch(0, batch=1, seq=16)


class TestPretrain:
    def test_plain_optax_end_to_end_on_two_devices(self, tmp_path: Path) -> None:
        arguments = ("--optimizer", "optax", "--preset", "nano", "--steps", "3", "--devices", "2")
        code, output, error = run_pretrain(
            *arguments, "--batch", "4", "--seq", "32", "--warmup", "1", "--out", tmp_path
        )
        assert (code, error) == (0, "")
        assert f"{transformer.count_params(transformer.preset('nano')):,}" in output
        metrics = metrics_in(tmp_path)
        assert [line["step"] for line in metrics] == [1, 2, 3]
        assert metrics[0]["loss"] == pytest.approx(math.log(256), abs=0.3)
        assert metrics[2]["loss"] < metrics[0]["loss"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--preset", "huge"), "huge"),
            (("--param-dtype", "f8"), "f8"),
            (("--batch", "3", "--devices", "2"), "--batch 3"),
            (("--steps", "0"), "--steps 0"),
            (("--lr", "nan"), "--lr nan"),
            (("--data", "no/such/folder"), "no/such/folder"),
            (("--devices", "64", "--batch", "64"), "--mesh fsdp=64"),
        ],
    )
    def test_wrong_settings_are_one_line_and_exit_code_2(
        self,
        arguments: tuple[str, ...],
        message: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        jax.devices()  # fixes the number of devices, so that 64 are too many
        try:
            code = pretrain.main(["--preset", "tiny", "--optimizer", "optax", "--out", str(tmp_path), *arguments])
        except SystemExit as exit_:
            code = exit_.code  # type: ignore[assignment]
        output = capsys.readouterr()
        assert code == 2
        assert message in output.err
        assert output.err.count("\n") == 1
        assert output.out == ""

    def test_comparison_says_whether_losses_agree(self) -> None:
        reference = report.Result("optax", losses=[5.0] * 25)
        near = report.Result("jmo", losses=[5.001] * 20 + [6.0] * 5)
        far = report.Result("jmo", losses=[5.0] * 19 + [5.1])
        broken = report.Result("jmo", losses=[5.0, math.nan])
        assert [report.comparison_table(run, reference)[2] for run in (near, far, broken)] == [True, False, False]


needs_library = pytest.mark.skipif(not library_is_there(), reason="jax_mlp_offload does not import yet")


@needs_library
class TestPretrainOffloaded:
    def test_end_to_end_moves_state_through_two_tiers(self, tmp_path: Path) -> None:
        tiers = [tmp_path / "fast", tmp_path / "slow"]
        sizes = ("--preset", "nano", "--batch", "2", "--seq", "32", "--warmup", "1")
        memory = ("--host-memory", "250KB", "--subgroup-elements", "4096")
        where = ("--tier", tiers[0], "--tier", tiers[1], "--out", tmp_path / "out")
        assert pretrain.main([*sizes, "--steps", "3", *memory, *map(str, where)]) == 0
        metrics = metrics_in(tmp_path / "out")
        assert len(metrics) == 3
        assert len(metrics[0]["tiers"]) == 2
        assert min(bytes_in(tmp_path / "out", key) for key in ("bytes_read", "bytes_written")) > 0
        assert sum(line["misses"] for line in metrics) > 0
        assert metrics[2]["loss"] < metrics[0]["loss"]

    def test_too_little_memory_is_one_line_and_exit_code_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sizes = ("--batch", "1", "--seq", "8", "--host-memory", "4KiB")
        code = pretrain.main(["--preset", "nano", *sizes, "--out", str(tmp_path)])
        error = capsys.readouterr().err
        assert code == 2
        assert "host_memory" in error
        assert error.count("\n") == 1

    def test_an_unwritable_tier_is_one_line_and_exit_code_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("not a folder")
        code = pretrain.main(["--preset", "tiny", "--tier", str(tmp_path / "file"), "--out", str(tmp_path / "out")])
        error = capsys.readouterr().err
        assert code == 2
        assert str(tmp_path / "file") in error
        assert error.count("\n") == 1


@needs_library
@pytest.mark.skipif(os.name == "nt", reason="SIGINT of another process needs POSIX")
def test_sigint_ends_after_the_step_with_a_summary(tmp_path: Path) -> None:
    """With state on tiers: the store is closed, and its folders are gone."""
    arguments = ("--preset", "nano", "--steps", "100000", "--batch", "1", "--seq", "16")
    with pretraining(*arguments, "--tier", tmp_path / "tier", "--out", tmp_path / "out") as process:
        assert process.stdout is not None
        assert "step 1/" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (130, "")
    assert "interrupted" in output
    assert metrics_in(tmp_path / "out")
    assert not list((tmp_path / "tier").iterdir())
