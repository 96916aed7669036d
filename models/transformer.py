"""A small Llama-like decoder in Flax nnx: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Always true here: a `Config` is a set of sizes and dtypes and holds no arrays; parameters live outside the
module, as a nested dict of plain arrays made by `init_params` and used by `apply`; every parameter has
`config.param_dtype`, all arithmetic but the norms' reductions and the softmax (float32) runs in
`config.compute_dtype`. The layers are unrolled, not scanned, so that each layer's gradients exist as soon as
its backward pass is done.

Threads: pure functions, safe from any thread.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

Params: TypeAlias = dict[Any, Any]
"""A nested dict: `{"blocks": {0: {"attention": {"query": {"kernel": array}}}}}`."""

FSDP_AXIS = "fsdp"
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


def _linear(config: Config, fan_in: int, fan_out: int, rngs: nnx.Rngs, *, gain: float = 1.0) -> nnx.Linear:
    return nnx.Linear(
        fan_in,
        fan_out,
        use_bias=False,
        dtype=config.compute_dtype,
        param_dtype=config.param_dtype,
        kernel_init=_normal(gain / math.sqrt(fan_in)),
        rngs=rngs,
    )


def _norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.dim,
        epsilon=config.norm_eps,
        dtype=config.compute_dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        kv_dim = config.kv_heads * config.head_dim
        self.query = _linear(config, config.dim, config.dim, rngs)
        self.key = _linear(config, config.dim, kv_dim, rngs)
        self.value = _linear(config, config.dim, kv_dim, rngs)
        self.out = _linear(config, config.dim, config.dim, rngs, gain=1 / math.sqrt(2 * config.layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, seq, dim]` to the same shape."""
        batch, seq, dim = x.shape
        heads = (batch, seq, -1, self.config.head_dim)
        query = rotate(self.query(x).reshape(heads), self.config.rope_base)
        key = rotate(self.key(x).reshape(heads), self.config.rope_base)
        value = self.value(x).reshape(heads)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        result: jax.Array = self.out(mixed.reshape(batch, seq, dim))
        return result


class SwiGLU(nnx.Module):
    """The gated feed-forward layer (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.gate = _linear(config, config.dim, config.hidden, rngs)
        self.up = _linear(config, config.dim, config.hidden, rngs)
        self.down = _linear(config, config.hidden, config.dim, rngs, gain=1 / math.sqrt(2 * config.layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, seq, dim]` to the same shape."""
        result: jax.Array = self.down(jax.nn.silu(self.gate(x)) * self.up(x))
        return result


class Block(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, seq, dim]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _call_block(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


class Transformer(nnx.Module):
    """The decoder: token ids to next-token logits."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(
            config.vocab,
            config.dim,
            dtype=config.compute_dtype,
            param_dtype=config.param_dtype,
            embedding_init=_normal(EMBEDDING_STDDEV),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = _norm(config, rngs)
        self.head = _linear(config, config.dim, config.vocab, rngs, gain=EMBEDDING_STDDEV * math.sqrt(config.dim))

    def __call__(self, tokens: jax.Array, sharding: NamedSharding | None = None) -> jax.Array:
        """Returns float32 logits `[batch, seq, vocab]` for integer tokens `[batch, seq]`.

        Args:
          tokens: Token ids below `config.vocab`.
          sharding: Where activations `[batch, seq, dim]` are to live; None leaves it to the compiler.
        """
        call = nnx.remat(_call_block) if self.config.remat else _call_block
        x = self.embed(tokens.astype(jnp.int32))
        for block in self.blocks:
            if sharding is not None:
                x = jax.lax.with_sharding_constraint(x, sharding)
            x = call(block, x)
        logits: jax.Array = self.head(self.norm(x))
        return logits.astype(jnp.float32)


def init_params(config: Config, key: jax.Array) -> Params:
    """Returns fresh parameters; works under `jit` (with `out_shardings`) and `eval_shape`."""
    return dict(nnx.to_pure_dict(nnx.split(Transformer(config, rngs=nnx.Rngs(key)))[1]))


def abstract_params(config: Config) -> Params:
    """Returns the parameter tree as `jax.ShapeDtypeStruct`s; allocates nothing."""
    shapes: Params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    return shapes


def count_params(config: Config) -> int:
    """Returns the number of parameters; allocates nothing."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


def apply(config: Config, params: Params, tokens: jax.Array, sharding: NamedSharding | None = None) -> jax.Array:
    """Returns float32 logits `[batch, seq, vocab]`; a pure function of its arguments."""
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    logits: jax.Array = nnx.merge(nnx.graphdef(abstract), params)(tokens, sharding)
    return logits


def param_specs(model: Config | Params, mesh: Mesh | AbstractMesh, axis: str = FSDP_AXIS) -> Params:
    """Returns a tree of `PartitionSpec`s that shards each matrix over one mesh axis (FSDP).

    Args:
      model: A config, or a tree of arrays or `ShapeDtypeStruct`s.
      mesh: A mesh that has `axis`.
      axis: The axis to shard over.

    Returns:
      A tree of the parameters' structure: the largest dimension that the axis' size divides is sharded;
      vectors (norms) and matrices without such a dimension are replicated.

    Raises:
      ValueError: The mesh lacks the axis.
    """
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, not {axis!r}: name the one to shard over")
    size = mesh.shape[axis]

    def spec(leaf: Any) -> PartitionSpec:
        fitting = [i for i, extent in enumerate(leaf.shape) if extent % size == 0]
        if len(leaf.shape) < 2 or not fitting:
            return PartitionSpec()
        sharded = max(fitting, key=lambda i: leaf.shape[i])
        return PartitionSpec(*(axis if i == sharded else None for i in range(sharded + 1)))

    params = abstract_params(model) if isinstance(model, Config) else model
    specs: Params = jax.tree.map(spec, params)
    return specs
