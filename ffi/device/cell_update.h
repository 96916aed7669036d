// The fused update as a device does it: a cell at a time, element by element (cell_update.inl), here on the
// host, for the emulated device and for tests. CUDA's kernel (ffi/cuda/update.cu) is the same code.
//
// What always holds: the bits are those of update_run (ffi/core/update.h), whatever the rule and the types. A
// cell reads and writes nothing outside its elements but its hash and its segment's count of adopted cells.
// Results go to `out`, which may begin where `grad` does, or overlap it, only where both have elements of one
// size and begin at the same byte: an element's result then takes the place of its own gradient. Otherwise
// they must not overlap. Thread contract: may be called from many threads at once, over different segments.
// On the calling thread denormals must be flushed (set_flush_denormals), as for update_run.
#pragma once

#include "ffi/device/runtime.h"

namespace jmo {

// All cells of all segments, one after the other. Pointers to gradients, params and results are to host
// memory here.
void run_device_update(const DeviceUpdate& update);

}  // namespace jmo
