"""Several processes of one job: the same numbers, one ticket, and failures that every process hears of."""

from __future__ import annotations

import re

import pytest

import jax_mlp_offload as jmo
from tests.peers import end, run_peers, start_peers

MODEL = """
import errno, time
from jax_mlp_offload import native
mesh = mesh_of(data=2, fsdp=processes * devices // 2)
rng = np.random.default_rng(0)
WIDTH = 512  # makes several ops a device
params = {f"w{i}": np.asarray(rng.normal(size=(WIDTH, WIDTH)) / 22, np.float32) for i in range(6)}
params |= {"norm": np.ones((WIDTH,), np.float32)}
specs = {k: P("fsdp", None) if k != "norm" else P() for k in params}
x = shard(np.asarray(rng.normal(size=(32, WIDTH)), np.float32), mesh, P("fsdp"))

def loss(p, x):
    for w in p.values():
        x = jnp.tanh(x @ w) if w.ndim == 2 else x * w
    return jnp.mean(x**2)

def make_step(tx):
    @jax.jit
    def step(p, s, x):
        value, g = jax.value_and_grad(loss)(p, x)
        u, s = tx.update(g, s, p)
        p = optax.apply_updates(p, u)
        # a collective that follows the update
        return p, s, value, sum(jnp.sum(w) for w in p.values())

    return step

def begin(store):
    tx = jmo.adamw(1e-2, store=store, mesh=mesh, param_specs=specs)
    p = shard(params, mesh, specs)
    return tx, make_step(tx), p, jax.jit(tx.init)(p)

def refused(function):
    try:
        jax.block_until_ready(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")

def host(tree):
    return jax.tree.map(lambda a: [np.asarray(s.data) for s in a.addressable_shards], tree)

"""


def lines(output, what):
    return [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(what + " ")]


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_twenty_steps_equal_plain_optax_on_the_same_mesh(processes, devices, two_tiers):
    """float32 and bfloat16 leaves; replicas on one process and on several; each process keeps its shards.

    What the program communicates beside gathers of what is replicated: one ticket of four bytes.
    """
    code = """
    mesh = mesh_of(data=2, fsdp=2)
    shapes = {"embed": (256, 48), "norm": (48,), "out": (48, 128), "scale": (), "odd": (1031,), "table": (260, 261)}
    one = {**dict.fromkeys(shapes, P()), "embed": P("fsdp"), "out": P(None, "fsdp")}
    specs = {"full": one, "low": one}
    params = {"full": make_params(shapes), "low": make_params(shapes, BF16)}
    grads = record_gradients(params, 20, seed=3)
    with jmo.Store(*args, host_memory=260_000 * devices, subgroup_elements=8192) as store:
        tx = jmo.adamw(1e-2, weight_decay=0.1, store=store, mesh=mesh, param_specs=specs)
        new, state = train(tx, params, grads, mesh, specs)
        moments, masters = gathered((jmo.read_state(state), jmo.read_masters(state, new)), mesh)
        stats = store.stats()
        low = gathered(new["low"], mesh)

        def communicated(tx, params):
            placed = shard(params, mesh, specs)
            step = make_step(tx).lower(placed, jax.jit(tx.init)(placed), shard(params, mesh, specs))
            return collectives(step.compile())

        added = communicated(tx, params)
        added.subtract(communicated(optax.adamw(1e-2, weight_decay=0.1), params))
        reduced = {what: count for what, count in added.items() if what[0] != "all-gather" and count}
        assert reduced == {("all-reduce", "u32[1]"): 1}, reduced
    wide = [jax.tree.map(lambda a: np.asarray(a, np.float32), tree) for tree in (params, *grads)]
    expected, reference = gathered(train(optax.adamw(1e-2, weight_decay=0.1), wide[0], wide[1:], mesh, specs), mesh)
    assert_close(masters, expected)
    assert_close(moments, reference)
    assert_within_ulp(low, expected["low"])
    assert all(tier["bytes_read"] > 0 for tier in stats["tiers"]), stats
    print("\\nTICKET", int(state.ticket.addressable_data(0)[0]))
    print("\\nBYTES", stats["record_bytes_total"])
    """
    outputs = run_peers(code, *two_tiers, processes=processes, devices=devices)
    assert len({lines(output, "TICKET")[0] for output in outputs}) == 1
    elements = 256 * 48 + 48 + 48 * 128 + 1 + 1031 + 260 * 261
    total = sum(int(lines(output, "BYTES")[0]) for output in outputs)
    assert 18 * elements <= total < 1.5 * 18 * elements  # once, in records with some room at the end


def test_a_failure_in_one_process_is_raised_by_all_in_the_next_update(tmp_path):
    """The failing one says the cause; flush tells the others too; a fresh start goes on."""
    code = (
        MODEL
        + """
with jmo.Store(args[0], host_memory="2MB", subgroup_elements=16384) as store:
    tx, step, p, s = begin(store)
    for _ in range(3):
        p, s, *_ = jax.block_until_ready(step(p, s, x))
    store.flush()
    assert step.lower(p, s, x).as_text().count("jmo_update") > 1
    if process == 1:
        native.inject_fault(args[0], is_write=False, error_number=errno.EIO)
    # the step itself ends well everywhere, and its collectives with it
    p2, s2, *_ = jax.block_until_ready(step(p, s, x))
    assert int(s2.ticket.addressable_data(0)[0]) == 2**32 - 1
    print("\\nTOLD", refused(store.flush))
    print("\\nTOLD", refused(lambda: step(p2, s2, x)))
    print("\\nTOLD", refused(lambda: step(p, s, x)))  # the state before the failure is no longer there
    native.clear_faults()
    s = jax.jit(tx.init)(p)
    for _ in range(2):
        p, s, *_ = jax.block_until_ready(step(p, s, x))
    store.flush()
    moments = host(jmo.read_state(s)[0].mu)
with jmo.Store() as other:
    tx, step, p, s = begin(other)
    for i in range(5):
        s = jax.jit(tx.init)(p) if i == 3 else s
        p, s, *_ = jax.block_until_ready(step(p, s, x))
    assert_bits_equal(moments, host(jmo.read_state(s)[0].mu))
"""
    )
    told = [lines(output, "TOLD") for output in run_peers(code, tmp_path)]
    assert all("failed in another process" in text for text in told[0]), told[0]
    assert all("injected fault" in text and "errno 5" in text for text in told[1]), told[1]
    assert [text.split(":")[0] for text in told[0]] == ["OffloadError", "JaxRuntimeError", "JaxRuntimeError"]


def test_what_only_one_process_knows_is_made_known_before_anyone_raises(tmp_path):
    """What fails once its step is over: the next step hands back old params, the one after is refused by all."""
    code = (
        MODEL
        + """
with jmo.Store(args[0], host_memory="2MB", subgroup_elements=16384) as store:
    tx, step, p, s = begin(store)
    for _ in range(2):
        p, s, *_ = jax.block_until_ready(step(p, s, x))
    store.flush()
    scheduler = store.engine.scheduler
    if process == 1:  # as when a write fails for good with nobody waiting for it
        fail = scheduler._operations.fail
        store.engine.driver.call(lambda: fail(scheduler.instances[0], jmo.OffloadError("errno 28")), 10)
    before = host(p)
    p, s, *_ = jax.block_until_ready(step(p, s, x))
    assert int(s.ticket.addressable_data(0)[0]) == 2**32 - 1
    if process == 1:
        # its replicas' shares, the second of two, are as they were
        own = [[a[0].ravel()[a[0].size // 2 :] for name, a in t.items() if name != "norm"] for t in (host(p), before)]
        assert_bits_equal(*own)
    print("\\nTOLD", refused(store.flush))
    print("\\nTOLD", refused(lambda: step(p, s, x)))
    store._close_quietly()
with jmo.Store(args[0], host_memory="2MB", subgroup_elements=16384) as store:
    tx, step, _, s = begin(store)
    p, s, *_ = jax.block_until_ready(step(p, s, x))
    later = jax.block_until_ready(step(p, s, x))
    # a replay is refused by all at once, and harms nothing
    print("\\nSTALE", refused(lambda: step(p, s, x)))
    p, s, *_ = jax.block_until_ready(step(later[0], later[1], x))
    # a record that one of them cannot read: none is left waiting for it in a gather
    store.flush()
    if process == 1:
        for file in store.engine.backends[0]._folder.path.glob("*/*/c/*/0"):
            file.unlink()
    print("\\nREAD", refused(lambda: jmo.read_state(s)))
"""
    )
    outputs = run_peers(code, tmp_path)
    told = [lines(output, "TOLD") for output in outputs]
    assert all("failed in another process" in text for text in told[0])
    assert all("errno 28" in text for text in told[1])
    stale = [lines(output, "STALE")[0] for output in outputs]
    assert stale[0] == stale[1]
    assert re.search(r"ticket \d+, but the latest is \d+", stale[0])
    read = [lines(output, "READ")[0] for output in outputs]
    assert "another process cannot read" in read[0]
    assert "No such file" in read[1]


def test_a_process_that_dies_takes_the_others_with_it(tmp_path):
    """JAX's runtime ends them; nobody hangs, and the next one that starts there removes what they left."""
    code = (
        MODEL
        + """
store = jmo.Store(args[0], host_memory="2MB", subgroup_elements=16384)
tx, step, p, s = begin(store)
for number in range(1000):
    p, s, *_ = jax.block_until_ready(step(p, s, x))
    if process == 1 and number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    first, second = start_peers(code, tmp_path)
    try:
        second.wait(timeout=100)
        assert second.returncode == -9
        out, err = first.communicate(timeout=150)
        assert first.returncode != 0, out + err
    finally:
        end([first, second])
    assert len(list(tmp_path.iterdir())) == 2
    with jmo.Store(tmp_path):
        assert len(list(tmp_path.iterdir())) == 1
