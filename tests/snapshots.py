"""What the tests of snapshots share."""

from __future__ import annotations

import pathlib
import zlib

import jax
import numpy as np

import jax_mlp_offload as jmo
from tests.support import SMALL_SHAPES, make_params, make_step, record_gradients

SMALL = {"host_memory": "110KB", "subgroup_elements": 4096}  # about a third of SMALL_SHAPES fits


def seen(state, params):
    """Params, moments and masters, as host arrays."""
    return jax.device_get((params, jmo.read_state(state), jmo.read_masters(state, params)))


def go_on(tx, params, state, grads):
    """What is seen after some more steps."""
    step = make_step(tx)
    for grad in grads:
        params, state = step(params, state, grad)
    return seen(state, params)


def host_states(states):
    """Counts by optimizer."""
    return {name: int(state.count) for name, state in states.items()}


def digest(folder):
    """Size and checksum of every file below a folder."""
    files = sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, zlib.crc32(path.read_bytes())) for path in files}


def allocated_bytes(*folders):
    """Bytes on disk below some folders, each inode once."""
    found = {}
    for folder in folders:
        for path in pathlib.Path(folder).rglob("*"):
            if path.is_file():
                info = path.stat()
                found[info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def records(snapshot):
    """The files of a snapshot's records."""
    return sorted(pathlib.Path(snapshot).glob("process-*/optimizer-*/b*"))


def flip(path, at):
    """Changes one bit of a file, under a name of its own if it has several."""
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[at] ^= 1
    path.unlink()
    path.write_bytes(content.tobytes())


def train(tx, params, grads):
    """Params and state after steps from a fresh state."""
    step, state = make_step(tx), tx.init(params)
    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


def straight(dtype, steps=5):
    """Params at first, gradients, and what is seen after steps without a break."""
    params = make_params(SMALL_SHAPES, dtype)
    grads = record_gradients(params, steps)
    with jmo.Store() as store:
        tx = jmo.adamw(1e-2, store=store)
        return params, grads, go_on(tx, params, tx.init(params), grads)


def train_on(tx, tree, grads):
    """Params and moments after some more steps from (params, state)."""
    step, (params, state) = make_step(tx), tree
    for grad in grads:
        params, state = step(params, state, grad)
    return params, jmo.read_state(state)
