// The fused update as a device does it: a cell at a time, element by element (cell_update.inl). Here in loops
// on the host, for the emulated device and for tests; CUDA's kernel (ffi/cuda/kernels.cu) is the same code.
//
// What always holds: the bits are those of update_run (ffi/core/update.h), whatever the rule and the types.
// Of a segment nothing is read or written but its elements, its cells and its count of adopted cells.
// Elements lie at multiples of their size. Results may take the place of gradients of the same size, if both
// begin at the same byte; otherwise they must not overlap. Thread contract: may be called from many threads
// at once, over different segments. On the calling thread denormals must be flushed (set_flush_denormals), as
// for update_run.
#pragma once

#include "ffi/device/runtime.h"

namespace jmo {

// All cells of all segments, one after the other. Pointers to gradients, params and results are to host
// memory here.
void run_device_update(const DeviceUpdate& update);

}  // namespace jmo
