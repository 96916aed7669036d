// The kernels of the CUDA runtime, for code that is not compiled by nvcc.
//
// What always holds: a launch neither allocates nor waits once load_kernels has been called for the device;
// its operands are read when the stream gets to it. Thread contract: any thread, with the device in use set.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/device/runtime.h"

namespace jmo::cuda {

// Loads them onto the device in use: CUDA would load each at its first launch, which may wait for all that is
// running.
cudaError_t load_kernels();
// The fused update of `cells` cells, as many as update.segments have.
cudaError_t launch_update(const DeviceUpdate& update, int64_t cells, cudaStream_t stream);
cudaError_t launch_set_u32(uint32_t* to, uint32_t value, cudaStream_t stream);

}  // namespace jmo::cuda
