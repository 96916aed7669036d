"""A small Llama-like decoder in Flax nnx: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Always true here: a `Config` is a set of sizes and dtypes and holds no arrays; parameters live outside the
module, as a nested dict of plain arrays made by `init_params` and used by `apply`; every parameter has
`config.param_dtype`, all arithmetic but the norms' reductions and the softmax (float32) runs in
`config.compute_dtype`. Every dimension of every parameter has a logical name (Flax's `out_sharding` metadata), which
the rules of `models.sharding` map to a mesh. The layers are unrolled, not scanned, so that each layer's gradients
exist as soon as its backward pass is done.

Threads: pure functions, safe from any thread.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from models.sharding import RULES, constrain, fit

Params: TypeAlias = dict[Any, Any]
"""A nested dict: `{"blocks": {0: {"attention": {"query": {"kernel": array}}}}}`."""

EMBEDDING_STDDEV = 0.02


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and dtypes of one decoder.

    Attributes:
      dim: Width of the residual stream.
      layers: Number of blocks.
      heads: Query heads; `dim` is a multiple of it and the head size is even.
      kv_heads: Key and value heads; divides `heads`. Equal to `heads` it is plain multi-head attention.
      hidden: Width of the SwiGLU layer.
      vocab: Number of token values; 256 for bytes.
      rope_base: Base of the rotary wavelengths.
      norm_eps: Added to the mean square in RMSNorm.
      remat: Recompute each block in the backward pass rather than keep its activations.
      param_dtype: dtype of every parameter.
      compute_dtype: dtype of activations and matrix products.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 256
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    remat: bool = False
    param_dtype: DTypeLike = jnp.bfloat16
    compute_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads", "hidden", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a positive size")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim={self.dim} over heads={self.heads}: the head size must be a whole, even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.dim // self.heads


PRESETS: Mapping[str, Config] = {
    "nano": Config(dim=64, layers=1, heads=4, kv_heads=2, hidden=192),
    "tiny": Config(dim=128, layers=4, heads=4, kv_heads=2, hidden=512),
    "small": Config(dim=512, layers=6, heads=8, kv_heads=2, hidden=1408),
    "125m": Config(dim=768, layers=20, heads=12, kv_heads=4, hidden=2048),
    "350m": Config(dim=1024, layers=32, heads=16, kv_heads=4, hidden=2688, remat=True),
    "1.3b": Config(dim=2048, layers=28, heads=32, kv_heads=8, hidden=5888, remat=True),
}


def preset(name: str, **changes: Any) -> Config:
    """Returns the preset `name` with fields replaced by `changes`.

    Raises:
      ValueError: There is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: choose one of {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Applies rotary position embeddings (Su et al. 2021, arXiv 2104.09864, §3.4), halves paired.

    Args:
      x: `[batch, seq, heads, head_dim]`; position is the index along `seq`.
      base: Base of the wavelengths.

    Returns:
      An array of x's shape and dtype; angles are computed in float32.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _normal(stddev: float) -> nnx.Initializer:
    """A normal initializer that samples in float32 whatever the parameter's dtype, then rounds."""

    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> jax.Array:
        del out_sharding  # the caller shards whole trees, see `init_params`
        return (stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return init


def _named(*names: str) -> dict[str, Any]:
    """Metadata of a parameter with these logical axes. Whoever makes the tree shards it whole, see `init_params`."""
    return {"out_sharding": names, "eager_sharding": False}


def _linear(
    config: Config,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    rngs: nnx.Rngs,
    *,
    gain: float = 1.0,
) -> nnx.LinearGeneral:
    """A matrix product without bias from and to dimensions given as {logical axis: size}."""
    return nnx.LinearGeneral(
        tuple(inputs.values()),
        tuple(outputs.values()),
        axis=tuple(range(-len(inputs), 0)),
        use_bias=False,
        dtype=config.compute_dtype,
        param_dtype=config.param_dtype,
        kernel_init=_normal(gain / math.sqrt(math.prod(inputs.values()))),
        kernel_metadata=_named(*inputs, *outputs),
        rngs=rngs,
    )


def _norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.dim,
        epsilon=config.norm_eps,
        dtype=config.compute_dtype,
        param_dtype=config.param_dtype,
        scale_metadata=_named("norm"),
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

    def __init__(self, config: Config, mesh: Mesh | None, *, rngs: nnx.Rngs) -> None:
        self.config, self.mesh = config, mesh
        embed = {"embed": config.dim}
        heads = {"heads": config.heads, "head_dim": config.head_dim}
        kv_heads = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
        self.query = _linear(config, embed, heads, rngs)
        self.key = _linear(config, embed, kv_heads, rngs)
        self.value = _linear(config, embed, kv_heads, rngs)
        self.out = _linear(config, heads, embed, rngs, gain=1 / math.sqrt(2 * config.layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, seq, dim]` to the same shape."""

        def split(x: jax.Array, heads: str) -> jax.Array:
            return constrain(x, self.mesh, "batch", None, heads, None)

        query = rotate(split(self.query(x), "heads"), self.config.rope_base)
        key = rotate(split(self.key(x), "kv_heads"), self.config.rope_base)
        value = split(self.value(x), "kv_heads")
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        result: jax.Array = self.out(split(mixed, "heads"))
        return result


class SwiGLU(nnx.Module):
    """The gated feed-forward layer (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: Config, mesh: Mesh | None, *, rngs: nnx.Rngs) -> None:
        self.mesh = mesh
        embed, hidden = {"embed": config.dim}, {"hidden": config.hidden}
        self.gate = _linear(config, embed, hidden, rngs)
        self.up = _linear(config, embed, hidden, rngs)
        self.down = _linear(config, hidden, embed, rngs, gain=1 / math.sqrt(2 * config.layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, seq, dim]` to the same shape."""
        wide = constrain(jax.nn.silu(self.gate(x)) * self.up(x), self.mesh, "batch", None, "hidden")
        result: jax.Array = self.down(wide)
        return result


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: Config, mesh: Mesh | None, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, mesh, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = SwiGLU(config, mesh, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, seq, dim]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _call_block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


class Transformer(nnx.Module):
    """The decoder: token ids to next-token logits.

    Args:
      config: Its sizes.
      mesh: Over which activations are laid out; None leaves that to the compiler.
      rngs: For the weights.
    """

    def __init__(self, config: Config, mesh: Mesh | None = None, *, rngs: nnx.Rngs) -> None:
        self.config, self.mesh = config, mesh
        self.embed = nnx.Embed(
            config.vocab,
            config.dim,
            dtype=config.compute_dtype,
            param_dtype=config.param_dtype,
            embedding_init=_normal(EMBEDDING_STDDEV),
            embedding_metadata=_named("vocab", "embed"),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, mesh, rngs=rngs) for _ in range(config.layers)])
        self.norm = _norm(config, rngs)
        vocab = {"vocab": config.vocab}
        self.head = _linear(config, {"embed": config.dim}, vocab, rngs, gain=EMBEDDING_STDDEV * math.sqrt(config.dim))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns float32 logits `[batch, seq, vocab]` for integer tokens `[batch, seq]` below `config.vocab`."""
        call = nnx.remat(_call_block) if self.config.remat else _call_block
        # gathered over fsdp first: as it lies, the partitioner could only replicate the looked-up rows
        table = constrain(self.embed.embedding.get_value(), self.mesh, "vocab", None)
        # widened before its rows are taken, so their gradients are summed in the wide dtype
        x = jnp.take(table.astype(self.config.compute_dtype), tokens, axis=0)
        for block in self.blocks:
            x = call(block, constrain(x, self.mesh, "batch", None, None))
        logits = constrain(self.head(self.norm(x)), self.mesh, "batch", None, "vocab")
        return logits.astype(jnp.float32)


def init_params(config: Config, key: jax.Array) -> Params:
    """Returns fresh parameters; works under `jit` (with `out_shardings`) and `eval_shape`."""
    return dict(nnx.to_pure_dict(nnx.split(Transformer(config, rngs=nnx.Rngs(key)))[1]))


def abstract_params(config: Config) -> Params:
    """Returns the parameter tree as `jax.ShapeDtypeStruct`s; allocates nothing."""
    return dict(nnx.to_pure_dict(_abstract(config)[1]))


def count_params(config: Config) -> int:
    """Returns the number of parameters; allocates nothing."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def apply(config: Config, params: Params, tokens: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """Returns float32 logits `[batch, seq, vocab]`; a pure function of its arguments."""
    logits: jax.Array = nnx.merge(_abstract(config, mesh)[0], params)(tokens)
    return logits


def param_specs(config: Config, mesh: Mesh | AbstractMesh) -> Params:
    """Returns the tree of `PartitionSpec`s that the rules give the parameters on a mesh.

    A mesh axis that does not divide a dimension (that of heads counts heads) leaves it whole; norms are replicated.
    """
    with nnx.logical_axis_rules(RULES):
        wanted = nnx.to_pure_dict(nnx.get_partition_spec(_abstract(config)[1]))
    specs: Params = jax.tree.map(lambda leaf, spec: fit(spec, leaf.shape, mesh), abstract_params(config), dict(wanted))
    return specs


@functools.lru_cache(maxsize=16)
def _abstract(config: Config, mesh: Mesh | None = None) -> tuple[nnx.GraphDef[Transformer], nnx.State[Any, Any]]:
    """The decoder's structure, and its variables as shapes, for reading only: large ones take seconds to make."""
    graph, variables = nnx.split(nnx.eval_shape(lambda: Transformer(config, mesh, rngs=nnx.Rngs(0))))
    return graph, variables
