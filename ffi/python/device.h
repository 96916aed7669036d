// Python's view of ffi/device: runtimes, and the links of an engine's devices.
#pragma once

#include <nanobind/nanobind.h>

namespace jmo {

void bind_devices(nanobind::module_& m);

}  // namespace jmo
