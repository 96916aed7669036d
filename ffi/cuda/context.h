// What every call into CUDA needs: the device in use for as long as the call takes, and what failed in words.
//
// What always holds: a thread has the context afterwards that it had before (XLA's threads have one of XLA's
// own), and no error of ours stays behind on it. Thread contract: any thread.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/core/status.h"

namespace jmo::cuda {

// What `call` told of a device; -1 where no device was meant.
Status told(cudaError_t error, const char* call, int device);

// Whether there is a driver, one that this runtime can use; what to do if not.
Status check_driver();

// A device that has a context already, where making one costs nothing; 0 if none has.
int device_with_context();

class DeviceInUse {
 public:
  explicit DeviceInUse(int device);
  ~DeviceInUse();
  DeviceInUse(const DeviceInUse&) = delete;
  DeviceInUse& operator=(const DeviceInUse&) = delete;
  const Status& status() const { return status_; }

 private:
  void* before_ = nullptr;  // the context that was current
  bool changed_ = false;
  Status status_;
};

}  // namespace jmo::cuda
