"""Optimizers whose params are an accelerator's: the same numbers over the split ops, and what the programs look like."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jax_mlp_offload as jmo
from tests import meshes
from tests.emulated import emulate
from tests.meshes import mesh_of
from tests.support import assert_bits_equal, make_params, make_step, record_gradients, run

P = PartitionSpec
SHAPES = {"a": (257, 300), "b": (5000,), "c": (3,)}
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())
STEPS = 4


@pytest.fixture(params=["host", "device"])
def place(request):
    return request.param


def both(train, place="host", count=1, **options):
    """What ``train(store)`` gives on the CPU, and on emulated accelerators."""
    with jmo.Store(**options) as store:
        expected = train(store)
    with emulate(count), jmo.Store(update_on=place, **options) as store:
        return expected, train(store), store.stats()["devices"]


class TestNumbers:
    @pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_bits_are_those_of_the_cpu(self, dtype, grad_dtype, place):
        """Also where a gradient has another dtype than its param, so that it lies apart, and where it has another user."""
        params = make_params(SHAPES, dtype)
        gradients = record_gradients(params, STEPS, dtype=grad_dtype)

        def train(store):
            tx = jmo.adamw(1e-2, weight_decay=0.1, store=store)

            @jax.jit
            def step(params, state, grads):
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state, optax.global_norm(grads)

            new, state, norms = params, tx.init(params), []
            for grads in gradients:
                new, state, norm = step(new, state, grads)
                norms.append(norm)
            return new, jmo.read_state(state), norms

        expected, ours, (device,) = both(train, place, subgroup_elements=16384)
        assert_bits_equal(ours, expected)
        assert device["update_on"] == place
        param_bytes, grad_bytes = jnp.dtype(dtype).itemsize, jnp.dtype(grad_dtype).itemsize
        copied = STEPS * ELEMENTS if place == "host" else 0
        assert device["bytes_to_host"] == copied * (param_bytes + grad_bytes)
        assert device["bytes_to_device"] == copied * param_bytes
        assert (device["on_device_busy_s"] > 0) == (place == "device")

    def test_without_params_only_gradients_come(self):
        params = make_params(SHAPES)
        gradients = record_gradients(params, STEPS)
        expected, ours, (device,) = both(lambda store: run(jmo.adam(1e-2, store=store), params, gradients)[0])
        assert_bits_equal(ours, expected)
        assert device["bytes_to_host"] == 4 * STEPS * ELEMENTS

    def test_records_on_tiers(self, two_tiers, place):
        params = make_params({"wide": (700, 300), "more": (300, 300)}, "bfloat16")
        gradients = record_gradients(params, 6)
        with jmo.Store() as store:
            expected, _ = run(jmo.adamw(1e-2, store=store), params, gradients, donate=True)
        options = {"host_memory": "1MiB", "subgroup_elements": 16384, "update_on": place}
        with emulate(), jmo.Store(*two_tiers, **options) as store:
            ours, _ = run(jmo.adamw(1e-2, store=store), params, gradients, donate=True)
            assert store.stats()["misses"] > 0
        assert_bits_equal(ours, expected)

    def test_mesh_with_replicas(self, place):
        """Gradients are cut and packed, results gathered, on eight devices at once."""
        mesh = mesh_of(data=2, fsdp=4)
        params = make_params({"w": (64, 96), "b": (40,), "c": (5, 3)}, "bfloat16")
        specs = {"w": P("fsdp", None), "b": P(), "c": P()}
        gradients = record_gradients(params, STEPS)

        def train(store):
            tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
            new, state = meshes.train(tx, params, gradients, mesh, specs)
            return jax.tree.map(np.asarray, (new, jmo.read_state(state)))

        expected, ours, used = both(train, place, count=8, subgroup_elements=4096)
        assert_bits_equal(ours, expected)
        assert len(used) == 8

    def test_inside_scan_and_cond(self, place):
        params = make_params({"w": (100, 60)}, "bfloat16")
        gradients = record_gradients(params, 8)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)

        def train(store):
            tx = jmo.adamw(1e-2, store=store)

            def update(carry, grads):
                params, state = carry
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            def maybe(carry, grads):
                odd = carry[1].count % 2 == 1
                return jax.lax.cond(odd, lambda c: update(c, grads), lambda c: update(c, grads), carry), None

            new, _ = jax.jit(lambda *carry: jax.lax.scan(maybe, carry, stacked)[0])(params, tx.init(params))
            return new

        expected, ours, _ = both(train, place)
        assert_bits_equal(ours, expected)

    def test_two_optimizers_in_one_program(self, place):
        params = make_params({"w": (100, 60), "v": (90, 70)}, "bfloat16")
        gradients = record_gradients(params, STEPS)

        def train(store):
            each = {"w": jmo.adamw(1e-2, store=store, name="w"), "v": jmo.sgd(1e-2, 0.9, store=store, name="v")}
            return run(optax.partition(each, {"w": "w", "v": "v"}), params, gradients, donate=True)[0]

        expected, ours, _ = both(train, place)
        assert_bits_equal(ours, expected)

    def test_skipped_steps_and_zero_gradients(self, place):
        """Old params are handed back on the device; a constant gradient is nobody's buffer to write to."""
        params = make_params({"w": (100, 60)}, "bfloat16")
        bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
        gradients = [*record_gradients(params, 2), bad, *record_gradients(params, 1, seed=5)]

        def train(store):
            tx = jmo.adamw(1e-2, store=store, skip_nonfinite=True)
            new, state = run(tx, params, gradients)
            zero = jax.jit(lambda p, s: tx.update(jax.tree.map(jnp.zeros_like, p), s, p))
            updates, _ = zero(new, state)
            return new, updates

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jmo.SkippedStepWarning)
            expected, ours, _ = both(train, place)
        assert_bits_equal(ours, expected)

    def test_snapshot_and_restore(self, tmp_path, place):
        params = make_params({"w": (100, 60)}, "bfloat16")
        first, second = record_gradients(params, 2), record_gradients(params, 2, seed=7)
        tiers = [tmp_path / "a", tmp_path / "b"]
        for tier in tiers:
            tier.mkdir()
        with emulate(), jmo.Store(str(tiers[0]), update_on=place) as store:
            tx = jmo.adamw(1e-2, store=store)
            new, state = run(tx, params, first)
            store.snapshot(tmp_path / "snapshot", {"params": new, "state": state})
            expected, _ = run(tx, new, second, state)
        with emulate(), jmo.Store(str(tiers[1]), update_on=place) as store:
            tx = jmo.adamw(1e-2, store=store)
            template = {"params": params, "state": tx.init(params)}
            restored = store.restore_snapshot(tmp_path / "snapshot", template)
            ours, _ = run(tx, restored["params"], second, restored["state"])
        assert_bits_equal(ours, expected)


class TestProgram:
    def test_all_pushes_come_before_the_first_pull(self):
        """Each of several buckets; results are the gradients' own buffers, which nobody copies."""
        params = make_params({f"w{i}": (128, 128) for i in range(4)}, "bfloat16")
        x = jnp.ones((8, 128), jnp.bfloat16)

        def loss(params, x):
            for w in params.values():
                x = jnp.tanh(x @ w)
            return jnp.mean(x.astype(jnp.float32))

        with emulate(), jmo.Store(subgroup_elements=16384) as store:
            tx = jmo.adamw(1e-2, store=store)

            def step(params, state):
                updates, state = tx.update(jax.grad(loss)(params, x), state, params)
                return optax.apply_updates(params, updates), state

            compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params)).compile()
            text = compiled.as_text()
            lines = [line for line in text.splitlines() if "custom-call" in line and "jmo_p" in line]
            targets = [re.search(r'custom_call_target="(jmo_\w+)"', line)[1] for line in lines]
            assert targets == ["jmo_push"] * 4 + ["jmo_pull"] * 4
            assert all("output_to_operand_aliasing" in line for line in lines)
            entry = dict(re.findall(r"(?m)^  (?:ROOT )?(%\S+) = (.*)$", text))
            gradients = [re.search(r"custom-call\(\S+, \S+, (%[\w.]+)", line)[1] for line in lines[:4]]
            assert not any(re.search(r" copy\(", entry[gradient]) for gradient in gradients)

    def test_pull_without_its_push_is_refused(self):
        with emulate(), jmo.Store() as store:
            tx = jmo.adam(1e-2, store=store)
            params = make_params({"w": (8,)})
            run(tx, params, record_gradients(params, 1))
            token = jax.ShapeDtypeStruct((1,), jnp.uint32)
            call = jax.ffi.ffi_call(
                "jmo_pull",
                [token, jax.ShapeDtypeStruct((8,), jnp.float32)],
                has_side_effect=True,
                input_output_aliases={1: 1},
            )
            numbers = {"store": np.int64(store.engine.number), "instance": np.int64(0), "bucket": np.int64(0)}
            pull = jax.jit(lambda t, x: call(t, x, apart=np.array([], np.int64), **numbers))
            with pytest.raises(jax.errors.JaxRuntimeError, match="jmo_pull without its jmo_push"):
                jax.block_until_ready(pull(jnp.zeros(1, jnp.uint32), jnp.zeros(8)))

    def test_pull_reads_nothing_that_may_be_worked_out_twice(self):
        """Every operand of a pull is the program's input, or came back from a push."""
        mesh = mesh_of(data=2)
        params = make_params({"w": (64, 64), "b": (40,), "c": (5, 3)}, "bfloat16")
        specs = {"w": P(), "b": P(), "c": P()}
        placed = meshes.shard(params, mesh, specs)
        with emulate(2), jmo.Store() as store:
            tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)

            def step(params, state, x):
                grads = jax.tree.map(lambda p: p.astype(jnp.float32) * x, params)  # of another dtype
                updates, state = tx.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            text = jax.jit(step).lower(placed, tx.init(placed), 2.0).compile().as_text()
        entry = dict(re.findall(r"(?m)^  (?:ROOT )?(%\S+) = (.*)$", text))
        pulls = [line for line in entry.values() if 'custom_call_target="jmo_pull"' in line]
        assert pulls
        for pull in pulls:
            _, *operands = re.search(r"custom-call\(([^)]*)\)", pull)[1].split(", ")
            for operand in operands:
                made = entry[operand]
                source = re.search(r"get-tuple-element\((%[\w.]+)\)", made)
                assert source, made
                assert 'custom_call_target="jmo_push"' in entry[source[1]]

    def test_program_for_another_platform_is_refused_when_it_is_lowered(self):
        with jmo.Store() as store:
            tx = jmo.adam(1e-2, store=store)
            params = make_params({"w": (8,)})
            step, state = make_step(tx), tx.init(params)
            with pytest.raises(ValueError, match=r"program is for cuda, but .* on cpu; call init with params"):
                step.trace(params, state, params).lower(lowering_platforms=("cuda",))

    def test_disable_jit_is_refused(self):
        with emulate(), jmo.Store() as store, jax.disable_jit():
            tx = jmo.adam(1e-2, store=store)
            params = make_params({"w": (8,)})
            with pytest.raises(ValueError, match=r"take it out of jax\.disable_jit"):
                tx.update(params, tx.init(params), params)

    def test_more_buckets_than_any_step_had_before(self):
        params = make_params({f"w{i}": (64,) for i in range(200)})
        with emulate(), jmo.Store(subgroup_elements=64) as store:
            first, _ = run(jmo.adam(1e-2, store=store, name="a"), params, record_gradients(params, 1))
            second, _ = run(jmo.adam(1e-2, store=store, name="b"), params, record_gradients(params, 1))
        assert_bits_equal(first, second)
