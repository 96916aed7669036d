"""Whether tiers change a bit, at full size: ``python -m benchmarks.equal --help``.

Trains the same params on the same gradients twice, with all state in host memory and on the tiers that are given, and
compares params, float32 masters and moments bit by bit. A tier is a path, a URL, or a TensorStore kvstore spec as JSON.
With a server of your own (``python -m moto.server -p 5000``, and a bucket made by ``curl -X PUT
http://127.0.0.1:5000/bucket``) an S3 tier on loopback is::

    --tier '{"driver": "s3", "bucket": "bucket", "path": "run/", "endpoint": "http://127.0.0.1:5000", "aws_region": "x"}'

Exit status 1 if anything differs. Thread contract: the main thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mlp_offload as jmo
from benchmarks import report, workload

_MB = 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    load = workload.Workload.of(int(args.params), args.layers, jnp.bfloat16, 1)
    expected, _ = _train(args, load, [])
    actual, stats = _train(args, load, args.tier)
    differing = sum(
        int(np.count_nonzero(a.view(np.uint8) != b.view(np.uint8))) for a, b in zip(expected, actual, strict=True)
    )
    rows = [
        [tier["name"], *(f"{tier[key] / _MB:,.0f}" for key in ("bytes_read", "bytes_written")), f"{tier['share']:.3f}"]
        for tier in stats["tiers"]
    ]
    report.print_table(
        f"{load.elements:,} params, {args.steps} steps", ["tier", "MB read", "MB written", "share"], rows
    )
    print(f"{sum(a.nbytes for a in expected):,} bytes of params, masters and moments compared; {differing} differ")
    return 1 if differing else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal", description=__doc__)
    add = parser.add_argument
    add("--params", type=float, default=100e6, help="bf16 elements")
    add("--layers", type=int, default=25)
    add("--tier", action="append", type=_tier, required=True, metavar="PATH, URL or JSON")
    add("--host-memory", default="340MB")
    add("--steps", type=int, default=5)
    return parser.parse_args(arguments)


def _tier(text: str) -> Any:
    return jmo.Remote(json.loads(text)) if text.startswith("{") else text


def _train(
    args: argparse.Namespace, load: workload.Workload, tiers: Sequence[Any]
) -> tuple[list[np.ndarray[Any, Any]], dict[str, Any]]:
    """Params, masters and moments after the last step, each as one flat array; and the statistics."""
    params, grads = load.draw(seed=0, scale=load.width**-0.5), load.draw(seed=1, scale=1e-3)
    with jmo.Store(*tiers, host_memory=args.host_memory if tiers else None) as store:
        tx = jmo.adamw(1e-3, weight_decay=0.1, store=store)
        step, state = workload.update_step(tx), tx.init(params)
        for _ in range(args.steps):
            params, state = jax.block_until_ready(step(params, state, grads))
        kept = jax.tree.leaves((params, jmo.read_masters(state, params), jmo.read_state(state)))
        return [np.asarray(leaf).reshape(-1) for leaf in kept], store.stats()


if __name__ == "__main__":
    raise SystemExit(main())
