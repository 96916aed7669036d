// jax_mlp_offload._native_cuda: hands the CUDA runtime to jax_mlp_offload._native, which does everything
// else. So the package needs neither CUDA nor a driver to be imported, and this extension finds the driver
// when it is first used.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include "ffi/cuda/runtime.h"

namespace nb = nanobind;

NB_MODULE(_native_cuda, m) {
  m.attr("INTERFACE_VERSION") = jmo::DeviceRuntime::kVersion;
  m.attr("CUDA_VERSION") = CUDART_VERSION;
  m.def("runtime", [] {
    return nb::capsule(static_cast<jmo::DeviceRuntime*>(jmo::cuda::runtime()), jmo::kRuntimeCapsule);
  });
}
