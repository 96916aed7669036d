"""What is compared: one decoder and one train step, with the optimizer state kept in different places.

``plain``: optax on float32 masters, all on the device. ``pinned_host``: the same masters and moments in the host's pinned
memory by JAX's memory kinds, brought to the device inside the step and put back (docs.jax.dev, "JAX Memories and Host
Offloading", optimizer state). ``memory-*`` and ``disk-*``: ours, in host memory alone or with a directory as tier; the
last word says where the update runs. All start from the same weights and donate their whole state.
Thread contract: the main thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

import jax_mlp_offload as jmo
from benchmarks.gpu.settings import Settings, mesh_of
from models import training, transformer
from models.training import TrainState, TrainStep
from models.transformer import Config, Params

PLAIN, PINNED_HOST = "plain", "pinned_host"
OURS = ("memory-host", "memory-device", "disk-host", "disk-device")
SYSTEMS = (PLAIN, PINNED_HOST, *OURS)
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.1
_DISK_SHARE = 4  # of the state, one part of so many stays in memory
_STATE_BYTES = 10  # of a bfloat16 param
_LEAST_RECORDS = 4  # in memory, of each device
SEED = 0


@dataclasses.dataclass(frozen=True)
class System:
    """One of the systems, ready to step."""

    config: Config
    mesh: Mesh
    state: TrainState
    step: TrainStep
    tokens: jax.Array
    store: jmo.Store | None = None
    tier: jmo.File | None = None


@contextlib.contextmanager
def opened(name: str, settings: Settings, devices: int = 1) -> Iterator[System]:
    """One of ``SYSTEMS``; what it opened is closed at the end."""
    config, mesh = settings.config(), mesh_of(devices)
    tokens = training.place_batch(settings.tokens(config, devices), mesh)
    if name == PLAIN:
        tx = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        state = fresh_state(config, tx, mesh, jnp.float32)
        yield System(config, mesh, state, training.make_train_step(config, tx, mesh, state), tokens)
    elif name == PINNED_HOST:
        yield _pinned(config, mesh, tokens)
    else:
        with _ours(name, settings, config, mesh, tokens) as system:
            yield system


def fresh_state(config: Config, tx: optax.GradientTransformation, mesh: Mesh, dtype: DTypeLike) -> TrainState:
    """A state for ``tx``, which begins with zeros, made leaf by leaf: the peak of memory is that of the steps.

    Args:
      config: the model.
      tx: the optimizer.
      mesh: where it lies.
      dtype: of the params in the state: the weights', or float32 for masters of them.
    """
    abstract = training.abstract_state(config, tx, mesh, state_dtype=dtype)
    params = jax.tree.map(lambda weight: weight.astype(dtype), weights(config, mesh))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), abstract.opt_state)
    return TrainState(params, zeros)


def weights(config: Config, mesh: Mesh) -> Params:
    """The weights that all systems start from: normal values, and ones in norms."""
    rng = np.random.default_rng(SEED)

    def draw(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.Array:
        values = np.ones(leaf.shape, np.float32)
        if leaf.ndim > 1:
            values = rng.standard_normal(leaf.shape, np.float32) * np.float32(transformer.EMBEDDING_STDDEV)
        weight: jax.Array = jax.device_put(values.astype(leaf.dtype), NamedSharding(mesh, spec))
        return weight

    drawn: Params = jax.tree.map(draw, transformer.abstract_params(config), transformer.param_specs(config, mesh))
    return drawn


# -- ours


@contextlib.contextmanager
def _ours(name: str, settings: Settings, config: Config, mesh: Mesh, tokens: jax.Array) -> Iterator[System]:
    where, update_on = name.split("-")
    with contextlib.ExitStack() as stack:
        tier = None
        if where == "disk":
            if settings.tier is not None:
                pathlib.Path(settings.tier).mkdir(parents=True, exist_ok=True)
            folder = tempfile.TemporaryDirectory(prefix="gpu-check-", dir=settings.tier)
            tier = jmo.File(str(pathlib.Path(stack.enter_context(folder)) / "tier"))
        store = stack.enter_context(
            jmo.Store(*([tier] if tier else []), **_options(settings, config, mesh, where, update_on))
        )
        tx = jmo.adamw(
            LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            store=store,
            mesh=mesh,
            param_specs=transformer.param_specs(config, mesh),
        )
        state = fresh_state(config, tx, mesh, config.param_dtype)
        step = training.make_train_step(config, tx, mesh, state)
        yield System(config, mesh, state, step, tokens, store, tier)


def _options(settings: Settings, config: Config, mesh: Mesh, where: str, update_on: str) -> dict[str, Any]:
    """Keywords of the store: a quarter of the state in memory where there is a tier."""
    options: dict[str, Any] = {"subgroup_elements": settings.subgroup_elements, "update_on": update_on}
    if where == "disk":
        part = transformer.count_params(config) * _STATE_BYTES // _DISK_SHARE
        least = _LEAST_RECORDS * _STATE_BYTES * (settings.subgroup_elements or 0) * mesh.devices.size
        options["host_memory"] = max(part, least)
    return options


# -- JAX's own


class Held(NamedTuple):
    """State of ``keep_on_host``: float32 masters, and what optax keeps for them."""

    masters: Any
    inner: Any


def keep_on_host(tx: optax.GradientTransformation, shardings: Any) -> optax.GradientTransformation:
    """Has ``tx`` update float32 masters that lie, with its state, in pinned host memory between steps.

    Args:
      tx: an elementwise transformation whose state begins with zeros, and has the params' shapes or is scalar.
      shardings: of the params, on the device.
    """

    def init(params: Any) -> Held:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return Held(masters, tx.init(masters))

    def update(grads: Any, state: Held, params: Any = None) -> tuple[Any, Held]:
        on_device, on_host = placements(state, shardings)
        masters, inner = jax.device_put(state, on_device)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner = tx.update(wide, inner, masters)
        masters = optax.apply_updates(masters, updates)
        moved = jax.tree.map(
            lambda p, new: new.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), params, masters
        )
        new: Held = jax.device_put(Held(masters, inner), on_host)
        return moved, new

    return optax.GradientTransformation(init, update)


def placements(state: Held, shardings: Any) -> tuple[Held, Held]:
    """Where each leaf lies while it is updated, and between steps: scalars stay on the device."""
    mesh = jax.tree.leaves(shardings)[0].mesh
    whole = NamedSharding(mesh, PartitionSpec())
    like = {jax.tree.structure(shardings): shardings}

    def place(subtree: Any) -> Any:
        return like.get(jax.tree.structure(subtree), whole)

    def is_placed(subtree: Any) -> bool:
        return jax.tree.structure(subtree) in like

    on_device: Held = jax.tree.map(place, state, is_leaf=is_placed)
    on_host: Held = jax.tree.map(
        lambda leaf, sharding: sharding.with_memory_kind("pinned_host") if leaf.ndim else sharding, state, on_device
    )
    return on_device, on_host


def _pinned(config: Config, mesh: Mesh, tokens: jax.Array) -> System:
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), transformer.param_specs(config, mesh))
    tx = keep_on_host(optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY), shardings)

    params = weights(config, mesh)
    abstract = jax.eval_shape(tx.init, params)
    on_host = placements(abstract, shardings)[1]
    masters = jax.tree.map(lambda p, to: jax.device_put(p.astype(jnp.float32), to), params, on_host.masters)
    zeros = jax.tree.map(
        lambda leaf, to: jax.device_put(np.zeros(leaf.shape, leaf.dtype), to), abstract.inner, on_host.inner
    )
    state = TrainState(params, Held(masters, zeros))
    return System(config, mesh, state, training.make_train_step(config, tx, mesh, state), tokens)
