// How fast a device's link is: pinned copies of one size, each way alone and both ways at once.
//
// Thread contract: any thread, outside of steps (it takes memory of the device for its time).
#pragma once

#include <cstddef>

#include "ffi/device/runtime.h"

namespace jmo {

// In bytes/s; both: the sum of the two directions.
struct LinkSpeed {
  double to_host_bps = 0, to_device_bps = 0, both_bps = 0;
};

// The best of `repeats` copies of `bytes`, after one that is not counted.
Status measure_link(DeviceRuntime& runtime, int device, size_t bytes, int repeats, LinkSpeed* speed);

}  // namespace jmo
