"""Arguments and uses that make no sense: an error at once that names the value and the remedy, and nothing hangs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload.registry import live_stores
from tests.support import BF16, assert_close, make_params, make_step, record_gradients, run, run_reference

pytestmark = pytest.mark.timeout(60)


# -- the store's arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"host_memory": "16 GiBi"}, ValueError, r"host_memory='16 GiBi'.*16GiB"),
        ({"host_memory": "much"}, ValueError, r"host_memory='much'.*16GiB"),
        ({"host_memory": ""}, ValueError, r"host_memory=''"),
        ({"host_memory": "-1GiB"}, ValueError, r"host_memory='-1GiB'"),
        ({"host_memory": -5}, ValueError, r"host_memory=-5"),
        ({"host_memory": 0}, ValueError, r"host_memory=0.*records"),
        ({"host_memory": "0GiB"}, ValueError, r"host_memory='0GiB'"),
        ({"host_memory": float("nan")}, ValueError, r"host_memory=nan"),
        ({"host_memory": float("inf")}, ValueError, r"host_memory=inf"),
        ({"host_memory": True}, TypeError, r"host_memory is True"),
        ({"host_memory": [1]}, TypeError, r"host_memory is \[1\]"),
        ({"subgroup_elements": 0}, ValueError, r"subgroup_elements=0.*at least 1"),
        ({"subgroup_elements": -4}, ValueError, r"subgroup_elements=-4"),
        ({"subgroup_elements": 1.5}, ValueError, r"subgroup_elements=1.5"),
        ({"subgroup_elements": "64Mi"}, ValueError, r"subgroup_elements='64Mi'"),
        ({"subgroup_elements": True}, ValueError, r"subgroup_elements=True"),
        ({"kernel_threads": 0}, ValueError, r"kernel_threads=0"),
        ({"order": "lru"}, ValueError, r"order='lru'.*resident-first.*sequential|order='lru'.*sequential"),
        ({"versions": 2}, ValueError, r"versions=2.*versions=1"),
        ({"versions": 0}, ValueError, r"versions=0"),
        ({"exclusive": "always"}, ValueError, r"exclusive='always'.*'auto', True or False"),
        ({"exclusive": None}, ValueError, r"exclusive=None.*'auto'"),
        ({"exclusive": 1}, ValueError, r"exclusive=1.*'auto'"),
        ({"profile": "x.json"}, ValueError, r"profile 'x.json' cannot be read: No such file"),
        ({"profile": {}}, ValueError, r"is no profile.*format"),
        ({"profile": 7}, TypeError, r"profile is 7.*path"),
        ({"deadline_s": 0}, ValueError, r"deadline_s=0"),
        ({"deadline_s": -1.0}, ValueError, r"deadline_s=-1.0"),
        ({"deadline_s": float("nan")}, ValueError, r"deadline_s=nan"),
        ({"deadline_s": 1e12}, ValueError, r"deadline_s=1.*at most"),
        ({"host_mem": "1GiB"}, TypeError, r"host_mem"),
    ],
)
def test_store_arguments(arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        jmo.Store(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())
    assert not live_stores()


# -- host memory


def test_host_memory_too_small_for_the_slots(tmp_path):
    params = make_params({"w": (50000,)})
    with jmo.Store(tmp_path, host_memory=40_000, subgroup_elements=8192) as store:
        tx = jmo.adam(1e-2, store=store)
        with pytest.raises(ValueError, match=r"host_memory=.*too small.*\d+ bytes.*subgroup_elements=8192"):
            run(tx, params, [params])
    # the size that it names is enough
    with pytest.raises(ValueError, match="too small") as caught, jmo.Store(tmp_path, host_memory=1000) as store:
        run(jmo.adam(1e-2, store=store), params, [params])
    needed = int(str(caught.value).split(" bytes) in all")[0].rsplit("(", 1)[1])
    with jmo.Store(tmp_path, host_memory=needed) as store:
        run(jmo.adam(1e-2, store=store), params, [params])


def test_host_memory_too_small_without_a_tier():
    params = make_params({"w": (50000,), "v": (50000,)})
    message = r"Raise host_memory.*give the store a tier"
    with jmo.Store(host_memory="300KB") as store, pytest.raises(ValueError, match=message):
        run(jmo.adam(1e-2, store=store), params, [params])


def test_a_second_optimizer_without_room():
    params = make_params({"w": (50000,)})
    with jmo.Store(host_memory="500KB") as store:
        run(jmo.adam(1e-2, store=store, name="one"), params, [params])
        with pytest.raises(ValueError, match=r"host_memory=.*no room.*raise host_memory or give it a tier"):
            run(jmo.adam(1e-2, store=store, name="two"), params, [params])


def test_a_refused_update_leaves_the_store_usable(tmp_path):
    params = make_params({"w": (50000,)})
    small = make_params({"w": (3000,)})
    grads = record_gradients(small, 3)
    with jmo.Store(tmp_path, host_memory=60_000, subgroup_elements=8192) as store:
        with pytest.raises(ValueError, match="too small"):
            run(jmo.adam(1e-2, store=store, name="large"), params, [params])
        new, _ = run(jmo.adam(1e-2, store=store, name="small"), small, grads)
        assert_close(new, run_reference(optax.adam(1e-2), small, grads)[0])


# -- the optimizers' arguments


@pytest.mark.parametrize("factory", [jmo.adamw, jmo.adam, jmo.sgd])
def test_optimizer_arguments(factory, tmp_path):
    for store in (None, "store", tmp_path, jmo.Store):
        with pytest.raises(TypeError, match=r"store=.*jmo\.Store\(\.\.\.\)"):
            factory(1e-2, store=store)
    with pytest.raises(TypeError, match=r"store=None"):
        factory(1e-2)
    with jmo.Store() as store:
        for mode in ("ignore", "", None, True):
            with pytest.raises(ValueError, match=r"foreign_params=.*watch.*adopt.*error"):
                factory(1e-2, store=store, foreign_params=mode)
        for name in ("", 3, b"x"):
            with pytest.raises(ValueError, match=r"name=.*non-empty"):
                factory(1e-2, store=store, name=name)


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_moment_dtypes(dtype):
    with jmo.Store() as store:
        with pytest.raises(ValueError, match=f"mu_dtype='{dtype}'.*bfloat16"):
            jmo.adamw(1e-2, mu_dtype=dtype, store=store)
        with pytest.raises(ValueError, match=f"nu_dtype='{dtype}'.*bfloat16"):
            jmo.adamw(1e-2, nu_dtype=dtype, store=store)
        with pytest.raises(ValueError, match=f"accumulator_dtype='{dtype}'.*bfloat16"):
            jmo.sgd(1e-2, 0.9, accumulator_dtype=dtype, store=store)


# -- params and gradients


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.float8_e4m3fn, jnp.bool_, np.float64])
def test_dtypes_of_params(dtype):
    params = {"fine": jnp.ones(3), "odd": np.ones(3, dtype)}
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store)
        for init in (tx.init, lambda p: jax.eval_shape(tx.init, p)):
            if dtype == np.float64 and init is not tx.init:
                continue  # JAX makes float32 of it
            with pytest.raises(ValueError, match=rf"'odd'.*{np.dtype(dtype).name}.*float32.*optax\.masked"):
                init(params)


@pytest.mark.parametrize("leaf", [1.0, "text", object()])
def test_params_that_are_no_arrays(leaf):
    with jmo.Store() as store, pytest.raises(TypeError, match=r"'odd'.*arrays"):
        jmo.adam(1e-2, store=store).init({"odd": leaf})


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.float8_e4m3fn])
def test_dtypes_of_gradients(dtype):
    params = {"w": jnp.ones(3)}
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store)
        state = tx.init(params)
        for update in (tx.update, jax.jit(tx.update)):
            with pytest.raises(ValueError, match=rf"gradient of \['w'\].*{jnp.dtype(dtype).name}.*float32"):
                update({"w": jnp.ones(3, dtype)}, state, params)


def test_gradients_of_another_shape_or_tree():
    params = {"w": jnp.ones(3), "v": jnp.ones(2)}
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store)
        state = tx.init(params)
        with pytest.raises(ValueError, match=r"gradient of \['w'\] has shape \(4,\), the param \(3,\)"):
            tx.update({"w": jnp.ones(4), "v": jnp.ones(2)}, state, params)
        with pytest.raises(ValueError, match=r"'v'|keys"):
            tx.update({"w": jnp.ones(3)}, state, params)
        for odd in (None, 0.0):
            with pytest.raises(TypeError, match=rf"gradient of \['v'\] is {odd}.*zeros"):
                tx.update({"w": jnp.ones(3), "v": odd}, state, params)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"w": (3,), "v": (2,), "more": (2,)}, "'more'|leaves"),
        ({"w": (3,)}, "'v'|leaves"),
        ({"w": (3, 1), "v": (2,)}, r"'w'.*\(3,\).*\(3, 1\)"),
        ({"renamed": (3,), "v": (2,)}, "'renamed'|'w'"),
    ],
)
@pytest.mark.parametrize("name", [None, "mine"])
def test_params_that_changed_since_init(changed, message, name):
    params = make_params({"w": (3,), "v": (2,)})
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, name=name)
        _, state = run(tx, params, [params])
        other = make_params(changed)
        with pytest.raises(ValueError, match=rf"not those given to init.*({message})"):
            jax.jit(tx.update)(other, state, other)


@pytest.mark.parametrize("name", [None, "mine"])
def test_params_of_another_dtype_than_at_init(name):
    params = make_params({"w": (3,)})
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store, name=name)
        _, state = run(tx, params, [params])
        other = make_params({"w": (3,)}, BF16)
        with pytest.raises(ValueError, match=r"not those given to init.*'w'.*float32.*bfloat16"):
            jax.jit(tx.update)(other, state, other)


def test_update_without_init():
    params = make_params({"w": (3,)})
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        with jmo.Store() as other:
            state = jmo.adamw(1e-2, store=other).init(params)
        with pytest.raises(ValueError, match=r"init.*call init\(params\)"):
            tx.update(params, state, params)


def test_two_optimizers_of_one_identity():
    one, two = make_params({"w": (3,)}), make_params({"w": (4,)})
    with jmo.Store() as store:
        jmo.adam(1e-2, store=store).init(one)
        for init in (jmo.adam(1e-2, store=store).init, jmo.adamw(1e-3, store=store).init):
            with pytest.raises(ValueError, match=r"same identity.*'w'.*\(3,\).*\(4,\).*name="):
                init(two)
        jmo.sgd(1e-2, store=store).init(two)  # another rule
        jmo.adam(1e-2, store=store, name="other").init(two)
        with pytest.raises(ValueError, match=r"same identity.*name="):
            jmo.sgd(1e-2, store=store, name="other").init(one)


def test_two_trainings_of_one_identity_and_the_same_params():
    """They cannot be told apart by their params: the second one's first update makes the first one's state stale."""
    params = make_params({"w": (30,)})
    with jmo.Store() as store:
        a, b = jmo.adam(1e-2, store=store), jmo.adam(1e-3, store=store)
        step_a, step_b = make_step(a), make_step(b)
        new, state_a = step_a(params, a.init(params), params)
        jax.block_until_ready(step_b(params, b.init(params), params))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)ticket \d+.*latest is \d+"):
            jax.block_until_ready(step_a(new, state_a, params))


# -- states


def test_stale_ticket(tmp_path):
    params = make_params({"w": (50, 400)})
    grads = record_gradients(params, 4)
    with jmo.Store(tmp_path, host_memory="110KB", subgroup_elements=4096) as store:
        tx = jmo.adam(1e-2, store=store)
        step, state = make_step(tx), tx.init(params)
        states, new = [state], params
        for grad in grads[:2]:
            new, state = step(new, state, grad)
            states.append(state)
        jax.block_until_ready(new)
        old, latest = (int(s.ticket[0]) for s in states[1:])
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(step(new, states[1], grads[2]))
        text = str(caught.value)
        assert f"ticket {old}" in text
        assert str(latest) in text
        assert "restore" in text
        assert "init" in text
        # a state of the future, or of another process
        bogus = jmo.OffloadState(state.count, jnp.asarray([latest + 1000], jnp.uint32))
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{latest + 1000}.*{latest}"):
            jax.block_until_ready(step(new, bogus, grads[2]))
        with pytest.raises(ValueError, match=rf"ticket {old}.*earlier step"):
            jmo.read_state(states[1])
        # the refusal harmed nothing: the latest state goes on
        for grad in grads[2:]:
            new, state = step(new, state, grad)
        expected, plain = run_reference(optax.adam(1e-2), params, grads)
        assert_close(new, expected)
        assert_close(jmo.read_state(state), plain)
        assert store.stats()["misses"] > 0


def test_a_closed_store():
    params = make_params({"w": (3000,)})
    store = jmo.Store()
    tx = jmo.adamw(1e-2, store=store)
    step, state = make_step(tx), tx.init(params)
    new, state = step(params, state, params)
    jax.block_until_ready(new)
    store.close()
    store.close()  # idempotent
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"closed|no store"):  # the program that is compiled already
        jax.block_until_ready(step(new, state, params))
    with pytest.raises(jmo.ClosedError, match="new Store"):
        jax.jit(tx.update)(params, state, params)
    for use in (store.stats, store.flush, lambda: tx.init(params), lambda: jmo.adam(1e-2, store=store).init(params)):
        with pytest.raises(jmo.ClosedError, match="new Store"):
            use()
    with pytest.raises(ValueError, match="closed store"):
        jmo.read_state(state)


def test_masters_of_the_wrong_params():
    params = make_params({"w": (30,), "v": (3,)}, BF16)
    with jmo.Store() as store:
        new, state = run(jmo.adam(1e-2, store=store), params, [params])
        for wrong in ({"w": new["w"]}, {**new, "w": new["w"][:5]}, {**new, "v": new["v"].astype(jnp.float32)}):
            with pytest.raises(ValueError, match=r"read_masters.*\['[wv]'\].*whole tree"):
                jmo.read_masters(state, wrong)
        with pytest.raises(ValueError, match="no OffloadState"):
            jmo.read_masters(optax.adam(1e-2).init(params), new)
