"""That the CUDA extension is there, built first if it is not; and what the machine's GPUs are.

With the build backend installed it is the package's own editable build, else CMake in ``build/gpu-check``, whose library is
copied into the package. Nothing is downloaded. Thread contract: the main thread.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

from benchmarks.gpu.settings import Settings, environment, find_gpus

ROOT = pathlib.Path(__file__).parents[2]
EXTENSION = "jax_mlp_offload._native_cuda"
_PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_BACKEND = ("scikit_build_core", "nanobind", "pip")
_FIELDS = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max", "compute_cap")


def build(settings: Settings) -> dict[str, Any]:
    """Builds the extension if it cannot be imported, and has a new process import it.

    Raises:
      NotMeasured: in a rehearsal.
      RuntimeError: if it cannot be built, or imported, or JAX sees no GPU; with the end of the output.
    """
    settings.need_gpu("the extension")
    steps: list[str] = []
    if not _importable(settings):
        if all(importlib.util.find_spec(name) is not None for name in _BACKEND):
            steps.append("pip install --editable")
            command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
            _run([*command, "--config-settings=cmake.define.JMO_CUDA=ON", "--editable", "."], settings)
        else:
            steps.append("cmake in build/gpu-check")
            _build_with_cmake(settings)
    _run([sys.executable, "-c", f"import {EXTENSION}"], settings)
    return {"built": steps or ["was there"], "devices": find_gpus()}


def _importable(settings: Settings) -> bool:
    command = [sys.executable, "-c", f"import {EXTENSION}"]
    return not subprocess.run(command, cwd=ROOT, env=environment(settings), capture_output=True, check=False).returncode


def _build_with_cmake(settings: Settings) -> None:
    folder = ROOT / "build" / "gpu-check"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    _run(["cmake", "-S", str(ROOT), "-B", str(folder), "-DJMO_CUDA=ON", python], settings)
    _run(["cmake", "--build", str(folder), "-j", str(len(os.sched_getaffinity(0)))], settings)
    made = [path for name in ("_native", "_native_cuda") for path in folder.glob(f"{name}.*so")]
    if not made:
        raise RuntimeError(f"the build left no extension in {folder.name}")
    for path in made:
        shutil.copy2(path, ROOT / "jax_mlp_offload" / path.name)


def _run(command: list[str], settings: Settings) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment(settings), capture_output=True, text=True, check=False)
    if done.returncode:
        shown = " ".join(pathlib.Path(word).name if word.startswith("/") else word for word in command)
        raise RuntimeError(f"`{shown}` ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


# -- the machine


def software() -> dict[str, str | None]:
    """Versions of JAX's CUDA plugin and of the compiler that the extension is built with; None for what is not there."""
    found: dict[str, str | None] = {}
    for name in _PLUGIN:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    found["nvcc"] = None
    if nvcc is not None:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        release = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
        found["nvcc"] = release[1] if release else None
    return found


def gpus() -> list[dict[str, str]]:
    """Name, driver, memory and link of each GPU, as the driver's tool says; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return []
    found = [dict(zip(_FIELDS, line.split(", "), strict=False)) for line in done.stdout.splitlines() if line]
    chip_to_chip = _chip_to_chip()
    return [gpu | ({"chip_to_chip": chip_to_chip} if chip_to_chip else {}) for gpu in found]


def _chip_to_chip() -> str:
    """What the tool says of a link between CPU and GPU on one board; empty where there is none."""
    done = subprocess.run(["nvidia-smi", "c2c", "-s"], capture_output=True, text=True, check=False)
    links = [line.strip() for line in done.stdout.splitlines() if "GB/s" in line]
    return "" if done.returncode else ", ".join(links)
