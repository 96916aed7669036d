// The accelerator of ffi/device/runtime.h by CUDA. Thread contract: as DeviceRuntime.
#pragma once

#include "ffi/device/runtime.h"

namespace jmo::cuda {

// The one of this process. It is never destroyed: streams may outlive whatever runs at exit.
DeviceRuntime* runtime();

}  // namespace jmo::cuda
