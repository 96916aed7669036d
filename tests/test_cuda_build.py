"""How the extensions are built: what they link, that CUDA's imports without a GPU, and how its kernels were compiled."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import shutil
import subprocess

import pytest

from jax_mlp_offload import accelerators, native

CUDA_SOURCES = pathlib.Path(__file__).parents[1] / "ffi" / "cuda"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc here")


def extension_path(name: str) -> str:
    spec = importlib.util.find_spec(f"jax_mlp_offload.{name}")
    if spec is None or spec.origin is None:
        assert name == "_native_cuda"
        assert NVCC is None, "nvcc is here, so the CUDA extension must be: is the package installed again?"
        pytest.skip("built without CUDA, since there is no nvcc here")
    return spec.origin


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", ["_native", "_native_cuda"])
def test_needs_no_library_of_cuda(name):
    path = extension_path(name)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "--dynamic", "--wide", path))
    assert "libstdc++.so.6" in needed
    assert [library for library in needed if re.search("cuda|libnv|cupti", library)] == []
    undefined = output_of("nm", "--dynamic", "--undefined-only", "--format=just-symbols", path).split()
    assert any(symbol.startswith("Py") for symbol in undefined)
    assert [symbol for symbol in undefined if re.match("cu[A-Z]|cuda[A-Z]|__cuda|nv[A-Z]", symbol)] == []


def test_exports_its_entry_only():
    exported = output_of("nm", "--dynamic", "--defined-only", "--format=just-symbols", extension_path("_native_cuda"))
    assert "PyInit__native_cuda" in exported.split()
    assert not re.search(r"\bcu(da)?[A-Z]|jmo", exported)


def test_imports_without_a_gpu():
    extension_path("_native_cuda")
    extension = importlib.import_module("jax_mlp_offload._native_cuda")
    assert extension.CUDA_VERSION >= 12000
    runtime = native.runtime_of_capsule(extension.runtime(), extension.INTERFACE_VERSION)
    assert runtime.name == "cuda"
    if pathlib.Path("/dev/nvidiactl").exists():
        assert runtime.devices() > 0
        return
    version = f"{extension.CUDA_VERSION // 1000}.{extension.CUDA_VERSION % 1000 // 10}"
    with pytest.raises(RuntimeError, match=f"no NVIDIA driver is installed .* install one for CUDA {version} or newer"):
        runtime.devices()
    assert runtime.numa_node(0) == -1
    with pytest.raises(RuntimeError, match="params are on a GPU, but CUDA gives none: no NVIDIA driver"):
        accelerators.cuda()


def test_refuses_another_interface():
    extension_path("_native_cuda")
    extension = importlib.import_module("jax_mlp_offload._native_cuda")
    with pytest.raises(ValueError, match="build the package again"):
        native.runtime_of_capsule(extension.runtime(), extension.INTERFACE_VERSION + 1)


@needs_nvcc
def test_kernel_rounds_like_the_hosts(tmp_path):
    """Nothing is contracted, denormals are flushed, divisions and roots are correctly rounded, accesses are wide."""
    described = re.search(r'COMPILE_OPTIONS\s+"([^"]+)"', (CUDA_SOURCES / "CMakeLists.txt").read_text())
    assert described is not None
    ptx = tmp_path / "kernels.ptx"
    command = [NVCC, "-std=c++17", "-O3", *described[1].split(";"), "-arch=compute_80", f"-I{CUDA_SOURCES.parents[1]}"]
    subprocess.run([*command, "-ptx", "-o", str(ptx), str(CUDA_SOURCES / "kernels.cu")], check=True)
    instructions = set(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.\w+)+)", ptx.read_text(), re.MULTILINE))
    arithmetic = {i for i in instructions if re.match(r"(add|sub|mul|div|sqrt|rcp|fma|mad)\..*f(32|64)$", i)}
    assert {"add.rn.ftz.f32", "mul.rn.ftz.f32", "div.rn.ftz.f32", "sqrt.rn.ftz.f32"} <= arithmetic
    assert {i for i in arithmetic if i.endswith("f32")} == {i for i in arithmetic if ".rn.ftz." in i}
    assert {i for i in arithmetic if i.endswith("f64")} == {"mul.rn.f64", "div.rn.f64"}
    assert not {i for i in instructions if i.startswith("fma")}
    assert {"ld.v4.u32", "ld.v2.u32", "st.v4.u32", "st.v2.u32"} <= instructions
