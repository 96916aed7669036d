"""What was saved on one mesh, set of tiers and size of subgroups is restored on others, bit for bit."""

from __future__ import annotations

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload.division import chunk_shape
from tests.checkpoints import (
    abstract,
    as_struct,
    described,
    everything,
    go_on,
    restore,
    restore_plain,
    save,
    save_plain,
    schedule,
    tree_of,
)
from tests.meshes import P, host, mesh_of, shard
from tests.support import BF16, advance, assert_bits_equal, assert_close, make_step, run_reference

SAVED, LAST = 3, 5  # steps
CHUNK_ELEMENTS = 4 * 2**20  # at most
DTYPES = {"odd": BF16, "eight": BF16, "embed": jnp.float32, "half": jnp.float16, "scalar": BF16, "wide": BF16}
SHAPES = {"odd": (1031,), "eight": (8,), "embed": (24, 36), "half": (12, 5), "scalar": (), "wide": (48, 24)}


def drawn(seed):
    """A tree of all dtypes: each has records of its own kind."""
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=SHAPES[name]), np.float32).astype(DTYPES[name]) for name in SHAPES}


PARAMS, GRADS = drawn(0), [drawn(1 + step) for step in range(LAST)]


def specs_on(mesh):
    """Rows over fsdp and columns over data, where they divide."""
    axes = dict(mesh.shape)

    def spec(shape):
        wanted = zip(("fsdp", "data"), shape, strict=False)
        return P(*(axis if axis in axes and size % axes[axis] == 0 else None for axis, size in wanted))

    return {name: spec(shape) if name != "half" else P() for name, shape in SHAPES.items()}


def rule(kind, **more):
    return kind.adamw(schedule(), weight_decay=0.1, **more)


class Place:
    """A mesh (or one device), and what a store is made with.

    Args:
      axes: of the mesh; none: one device.
      explicit: whether they are.
      tiers: how many.
      **store: options of the store.
    """

    def __init__(self, axes=None, explicit=False, tiers=0, **store):
        self.mesh = mesh_of(explicit, **axes) if axes else None
        self.tiers, self.store = tiers, store

    def put(self, tree):
        return jax.tree.map(jnp.asarray, tree) if self.mesh is None else shard(tree, self.mesh, specs_on(self.mesh))

    def open(self, folder):
        paths = [folder / f"tier{number}" for number in range(self.tiers)]
        for path in paths:
            path.mkdir(parents=True)
        return jmo.Store(*paths, **self.store)

    def rule(self, store):
        return rule(jmo, store=store, mesh=self.mesh)


PLACES = {
    "memory": lambda: Place(),
    "device": lambda: Place(tiers=1, host_memory="40KB", subgroup_elements=512),
    "two": lambda: Place({"fsdp": 2}, tiers=2, host_memory="60KB", subgroup_elements=300),
    "three": lambda: Place({"fsdp": 3}),
    "four": lambda: Place({"fsdp": 4}, tiers=2, host_memory="50KB", subgroup_elements=256),
    "square": lambda: Place({"data": 2, "fsdp": 2}, tiers=1, host_memory="50KB", subgroup_elements=256),
    "explicit": lambda: Place({"data": 2, "fsdp": 4}, explicit=True),
}
WRITERS = ["device", "four", "square"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By place: the checkpoint, ``everything`` at the save and two steps later."""
    folder, found = tmp_path_factory.mktemp("written"), {}
    for name in WRITERS:
        place = PLACES[name]()
        with place.open(folder / name) as store:
            tx = place.rule(store)
            params = place.put(PARAMS)
            step = make_step(tx, donate=True)
            tree = tree_of(*advance(step, params, tx.init(params), list(map(place.put, GRADS[:SAVED]))))
            if place.tiers:
                store.flush()
                assert store.stats()["misses"] > 0
            path = save(folder / name / "checkpoint", tree)
            saved = everything(tree)
            found[name] = path, saved, go_on(step, tree, list(map(place.put, GRADS[SAVED:])))
    return found


def test_all_places_train_alike(written):
    """So that what is restored elsewhere can be compared bit for bit; and as plain optax does."""
    for name in WRITERS[1:]:
        assert_bits_equal(written[name][1:], written[WRITERS[0]][1:])
    masters, moments = run_reference(rule(optax), jax.tree.map(jnp.asarray, PARAMS), GRADS)
    assert_close(written[WRITERS[0]][2][1:], (masters, moments))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        *(("four", reader) for reader in ("memory", "device", "two", "three", "square", "explicit")),
        *(("square", reader) for reader in ("device", "four", "explicit")),
        *(("device", reader) for reader in ("memory", "four", "square")),
    ],
)
def test_restored_elsewhere(writer, reader, written, tmp_path):
    path, saved, straight = written[writer]
    place = PLACES[reader]()
    with place.open(tmp_path) as store:
        tx, params = place.rule(store), place.put(PARAMS)
        restored = restore(path, abstract(tx, params, place.mesh))
        for leaf, param in zip(jax.tree.leaves(restored["params"]), jax.tree.leaves(params), strict=True):
            assert leaf.sharding == param.sharding
        assert_bits_equal(everything(restored), saved)
        step = make_step(tx, donate=True)
        assert_bits_equal(go_on(step, restored, list(map(place.put, GRADS[SAVED:]))), straight)


def test_shardings_come_from_the_abstract_params(written):
    """Neither the optimizer nor its init knows the mesh; and the state is given without shardings, as eval_shape does."""
    path, saved, straight = written["four"]
    place = PLACES["two"]()
    params = place.put(PARAMS)
    with jmo.Store() as store:
        tx = rule(jmo, store=store)
        restored = restore(path, tree_of(jax.tree.map(as_struct, params), jax.eval_shape(tx.init, PARAMS)))
        assert_bits_equal(everything(restored), saved)
        found = go_on(make_step(tx, donate=True), restored, list(map(place.put, GRADS[SAVED:])))
        assert_bits_equal(found, straight)


def test_a_mesh_that_changes_in_a_running_process(written, tmp_path):
    """The same optimizer goes on elsewhere: to a mesh and back."""
    path, _, straight = written["square"]
    with jmo.Store() as store:
        for number, name in enumerate(("memory", "four", "square", "memory")):
            place = PLACES[name]()
            params, tx = place.put(PARAMS), place.rule(store)
            step = make_step(tx, donate=True)
            tx.init(params)  # says that they have moved
            restored = restore(path, abstract(tx, params, place.mesh), store=store)
            assert_bits_equal(go_on(step, restored, list(map(place.put, GRADS[SAVED:]))), straight)
            path = save(tmp_path / str(number), restore(path, abstract(tx, params, place.mesh), store=store))


# -- dtypes


@pytest.mark.parametrize(("stored", "wanted"), [(BF16, None), (None, BF16)])
def test_moments_of_another_dtype(stored, wanted, tmp_path):
    params = {name: jnp.asarray(PARAMS[name]) for name in ("embed", "odd")}
    grads = [{name: jnp.asarray(grad[name]) for name in params} for grad in GRADS]
    with jmo.Store() as store:
        tx = rule(jmo, store=store, mu_dtype=stored, nu_dtype=stored)
        tree = tree_of(*advance(make_step(tx), params, tx.init(params), grads[:SAVED]))
        path, (new, masters, (adam, *rest)) = save(tmp_path / "ours", tree), everything(tree)
    plain = rule(optax, mu_dtype=stored)
    theirs = save_plain(tmp_path / "theirs", tree_of(params, run_reference(plain, params, grads[:SAVED])[1]))
    assert described(path) == described(theirs)  # optax has no nu_dtype

    dtype = wanted or jnp.float32
    mu = jax.tree.map(lambda x: x.astype(dtype), adam.mu)
    nu = jax.tree.map(lambda x: x.astype(dtype), adam.nu)
    with jmo.Store() as store:
        tx = rule(jmo, store=store, mu_dtype=wanted, nu_dtype=wanted)
        names = [jnp.dtype(x).name for x in (stored or jnp.float32, dtype)]
        with pytest.warns(jmo.CheckpointWarning, match="mu from {} to {}".format(*names)):
            restored = restore(path, abstract(tx, params))
        expected = (new, masters, (adam._replace(mu=mu, nu=nu), *rest))
        assert_bits_equal(everything(restored), expected)
        step = make_step(tx)
        straight = go_on(step, restored, grads[SAVED:])
        with pytest.warns(jmo.CheckpointWarning):
            again = save(tmp_path / "again", restore(path, abstract(tx, params)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as it was written, so nothing is converted
            assert_bits_equal(go_on(step, restore(again, abstract(tx, params)), grads[SAVED:]), straight)


# -- leaves of many chunks


@pytest.mark.parametrize(
    ("shape", "axes"), [((5, 1_000_003), None), ((6, 2_097_170), {"fsdp": 2}), ((3, 2_800_001), {"data": 2})]
)
def test_large_leaves_are_cut_into_chunks(shape, axes, tmp_path):
    whole = np.random.default_rng(0).normal(size=math.prod(shape)).astype(np.float32).reshape(shape)
    mesh = None if axes is None else mesh_of(**axes)
    spec = P(None, "fsdp") if axes and "fsdp" in axes else P()
    params = {"w": jnp.asarray(whole)} if mesh is None else shard({"w": whole}, mesh, {"w": spec})
    with jmo.Store() as store:
        tx = jmo.adam(1e-2, store=store, mesh=mesh)
        step = make_step(tx)
        tree = tree_of(*advance(step, params, tx.init(params), [params, params]))
        path = save(tmp_path / "ours", tree)
        moments = host(jmo.read_state(tree["opt"]))
        chunk = described(path)["opt", "0", "mu", "w"][3].chunk_shape
        assert math.prod(chunk) <= CHUNK_ELEMENTS and chunk != shape
        assert_bits_equal(host(restore_plain(path, tree_of(params, moments))["opt"]), moments)
    with jmo.Store(subgroup_elements=700_001) as store:
        tx = jmo.adam(1e-2, store=store)
        restored = restore(path, abstract(tx, {"w": jnp.asarray(whole)}))
        assert_bits_equal(host(jmo.read_state(restored["opt"])), moments)


@pytest.mark.parametrize("rows", [60_013, 4_194_319])
def test_chunks_of_shards_that_hardly_divide_are_few(rows):
    """A prime number of rows: chunks of one row would be as many as there are rows."""
    row = max(1, 80 * 60_013 // rows)
    shape = (rows, row)
    chunk = chunk_shape(shape, (2 * rows, row), CHUNK_ELEMENTS)
    assert rows % chunk[0] == 0
    assert math.prod(-(-size // part) for size, part in zip(shape, chunk, strict=True)) <= 64
