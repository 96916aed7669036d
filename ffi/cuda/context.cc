// Contexts by the driver's own calls, which alone can tell and restore that a thread has none. They are
// looked up through the runtime, so that nothing here is linked against the driver. Thread contract: as
// context.h.
#include "ffi/cuda/context.h"

#include <cuda.h>

#include <string>

namespace jmo::cuda {
namespace {

struct DriverCalls {
  decltype(&cuCtxGetCurrent) get_current = nullptr;
  decltype(&cuCtxSetCurrent) set_current = nullptr;
  decltype(&cuDeviceGet) device = nullptr;
  decltype(&cuDevicePrimaryCtxGetState) primary_state = nullptr;
  cudaError_t error = cudaSuccess;
};

template <typename Call>
cudaError_t look_up(const char* name, Call* call) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess) return error;
  *call = reinterpret_cast<Call>(found);
  return result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound;
}

const DriverCalls& driver_calls() {
  static const DriverCalls calls = [] {
    DriverCalls found;
    found.error = look_up("cuCtxGetCurrent", &found.get_current);
    if (found.error == cudaSuccess) found.error = look_up("cuCtxSetCurrent", &found.set_current);
    if (found.error == cudaSuccess) found.error = look_up("cuDeviceGet", &found.device);
    if (found.error == cudaSuccess) found.error = look_up("cuDevicePrimaryCtxGetState", &found.primary_state);
    return found;
  }();
  return calls;
}

std::string version_text(int version) {  // 13020 is 13.2
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

Status told(cudaError_t error, const char* call, int device) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // it has been told, so the next call on this thread shall not tell it again
  const std::string where = device < 0 ? "" : " on device " + std::to_string(device);
  return {Code::kIo, std::string(call) + where + " failed: " + cudaGetErrorName(error) + " (" +
                         cudaGetErrorString(error) + ")"};
}

Status check_driver() {
  int driver = 0, runtime = 0;
  Status status = told(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion", -1);
  if (status.ok()) status = told(cudaDriverGetVersion(&driver), "cudaDriverGetVersion", -1);
  if (!status.ok()) return status;
  if (driver == 0) {
    return {Code::kIo,
            "no NVIDIA driver is installed on this machine (CUDA driver version 0, runtime version " +
                version_text(runtime) + "): install one for CUDA " + version_text(runtime) +
                " or newer, and in a container pass the devices through"};
  }
  if (driver / 1000 < runtime / 1000) {
    return {Code::kIo,
            "the NVIDIA driver supports CUDA " + version_text(driver) +
                ", but this extension was built for CUDA " + version_text(runtime) +
                ": install a newer driver, or build with the CUDA toolkit that the driver supports"};
  }
  return {};
}

int device_with_context() {
  const DriverCalls& calls = driver_calls();
  int count = 0;
  if (calls.error != cudaSuccess) return 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // no error of ours stays behind
    return 0;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    unsigned flags = 0;
    int active = 0;
    if (calls.device(&device, ordinal) == CUDA_SUCCESS &&
        calls.primary_state(device, &flags, &active) == CUDA_SUCCESS && active != 0) {
      return ordinal;
    }
  }
  return 0;
}

DeviceInUse::DeviceInUse(int device) {
  const DriverCalls& calls = driver_calls();
  if (calls.error != cudaSuccess) {
    status_ = told(calls.error, "cudaGetDriverEntryPointByVersion", device);
    return;
  }
  CUcontext before = nullptr;
  if (calls.get_current(&before) != CUDA_SUCCESS) before = nullptr;  // not initialised, so there is none
  before_ = before;
  int current = -1;
  if (before != nullptr && cudaGetDevice(&current) == cudaSuccess && current == device) return;
  changed_ = true;
  status_ = told(cudaSetDevice(device), "cudaSetDevice", device);
}

DeviceInUse::~DeviceInUse() {
  // It was current before; if it has been destroyed since, the thread has none, which is what is wanted.
  if (changed_) (void)driver_calls().set_current(static_cast<CUcontext>(before_));
}

}  // namespace jmo::cuda
