"""Other Python processes that use this package."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def start_python(code, *args, unshare=False):
    """A process that runs ``code`` with this package and one CPU device."""
    prelude = "import jax, jax.numpy as jnp, optax, numpy as np, os, sys, signal, warnings, json\n" + (
        "import jax_mlp_offload as jmo\nfrom tests.support import *\n"
    )
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, args)]
    if unshare:
        command = ["unshare", "-Urm", "--propagation", "private", *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)


def finish(process, timeout_s=120):
    """Its output, once it has ended well."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the process hangs; {out}\n{err}")
    assert process.returncode == 0, f"{out}\n{err}"
    return out
