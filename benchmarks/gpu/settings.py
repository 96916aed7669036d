"""What every part of the GPU check is told, and the model that comes of it.

Settings go from the program to its parts as JSON. A part that cannot measure something here says so with ``NotMeasured``:
it never gives a figure in its place. Thread contract: any thread; ``ready`` once, on the main thread, before JAX looks for
devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mlp_offload import accelerators
from models import sharding, transformer

WARM_UP = 3
_HEAD_DIM, _SMALL_HEAD_DIM = 64, 16
_HIDDEN_PER_DIM = 2.75  # as in the presets
_SMALL_DIM = 512
_VOCAB = 256  # bytes
_EMULATED_DELAY_US = 200


class NotMeasured(Exception):  # noqa: N818 (it is no error)
    """This machine, or this platform, has not what the figure is of; the text says what is missing."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line, as the parts need it.

    Attributes:
      platform: "cuda" or "cpu"; the latter is a rehearsal, whose times mean nothing.
      params: elements of the model, about.
      steps: counted ones.
      batch: sequences a step and device.
      seq: tokens a sequence.
      subgroup_elements: of the store; None: automatic.
      tier: a directory for state on disk; None: a temporary one.
    """

    platform: str
    params: int
    steps: int
    batch: int
    seq: int
    subgroup_elements: int | None = None
    tier: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real thing."""
        return self.platform == "cuda"

    def to_json(self) -> str:
        """Text that ``from_json`` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that ``to_json`` wrote."""
        return cls(**json.loads(text))

    def config(self) -> transformer.Config:
        """The decoder that has about ``params`` elements: bfloat16 weights, and activations too on a GPU."""
        return sized(self.params, jnp.bfloat16 if self.on_gpu else jnp.float32)

    def tokens(self, config: transformer.Config, devices: int) -> np.ndarray[Any, Any]:
        """A batch for so many devices: int32 [batch, seq + 1]."""
        shape = (self.batch * devices, self.seq + 1)
        return np.random.default_rng(0).integers(0, config.vocab, shape, np.int32)

    @contextlib.contextmanager
    def ready(self, devices: int = 1) -> Iterator[None]:
        """Has this process see its devices: those that are there, or on CPUs ``devices`` that are made up.

        In a rehearsal stores take those for accelerators behind an emulated link, whose delays are random.

        Raises:
          RuntimeError: if there is no GPU, and ``devices`` is not 0.
        """
        if self.on_gpu:
            if devices:
                find_gpus()
            yield
            return
        jax.config.update("jax_num_cpu_devices", devices)
        with accelerators.emulate(devices, seed=0, longest_delay_us=_EMULATED_DELAY_US):
            yield

    def need_gpu(self, what: str) -> None:
        """Raises ``NotMeasured`` in a rehearsal."""
        if not self.on_gpu:
            raise NotMeasured(f"{what} is a GPU's")


def find_gpus() -> list[str]:
    """Kinds of the GPUs that JAX sees.

    Raises:
      RuntimeError: if it sees none.
    """
    try:
        return [device.device_kind for device in jax.devices("cuda")]
    except (RuntimeError, AssertionError) as error:  # the latter where there is no plugin at all
        raise RuntimeError(
            "JAX sees no GPU: a driver for CUDA 13 and jax's plugin for it have to be there (pip install '.[cuda13]')"
        ) from error


def environment(settings: Settings) -> dict[str, str]:
    """That of a part's process: one platform, and no memory taken before it is used, so that peaks are true."""
    root = str(pathlib.Path(__file__).parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {
        **os.environ,
        "JAX_PLATFORMS": settings.platform,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if not settings.on_gpu:
        variables["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # times mean nothing, so compiling may be quick
    return variables


def sized(params: int, compute_dtype: Any) -> transformer.Config:
    """A decoder of about ``params`` elements: as deep as it is wide, in heads of 64, or 16 where it is small.

    Raises:
      ValueError: if that is less than a layer of two heads.
    """
    # a block has 4 dim² of attention and 3 dim · hidden of SwiGLU; layers = dim / 64
    per_block = 4 + 3 * _HIDDEN_PER_DIM
    wanted = (params * _HEAD_DIM / per_block) ** (1 / 3)
    head_dim = _HEAD_DIM if wanted >= _SMALL_DIM else _SMALL_HEAD_DIM
    dim = round(wanted / head_dim) * head_dim
    if dim < 2 * head_dim:
        raise ValueError(f"--params {params} are too few for a decoder; give at least 1e4")
    hidden = round(dim * _HIDDEN_PER_DIM / head_dim) * head_dim
    layers = max(1, round((params - 2 * _VOCAB * dim) / (per_block * dim**2)))
    heads = dim // head_dim
    return transformer.Config(
        dim=dim, layers=layers, heads=heads, kv_heads=heads, hidden=hidden, vocab=_VOCAB, compute_dtype=compute_dtype
    )


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """The first devices, weights and batch split over them."""
    return sharding.make_mesh({"fsdp": devices})
