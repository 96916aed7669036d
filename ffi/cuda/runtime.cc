// DeviceRuntime by the CUDA runtime API: each method is one call, on the device it names.
//
// What always holds: streams do not wait for the legacy default stream, nor it for them; events have no time
// stamps, and a thread that waits for one sleeps. Kernels are loaded with a device's first stream, so that a
// launch in a step loads nothing. XLA uses the same (primary) context of a device, so its streams and
// pointers are valid here. Thread contract: as DeviceRuntime.
#include "ffi/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <cctype>
#include <cstdio>
#include <string>

#include "ffi/cuda/context.h"
#include "ffi/cuda/kernels.h"

namespace jmo::cuda {
namespace {

cudaStream_t as_stream(DeviceRuntime::Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(DeviceRuntime::Event event) { return static_cast<cudaEvent_t>(event); }

// `call`, by name in what is told of it, with the device in use.
template <typename Call>
Status on_device(int device, const char* name, const Call& call) {
  const DeviceInUse in_use(device);
  return in_use.status().ok() ? told(call(), name, device) : in_use.status();
}

// Pinned memory is used at its host address everywhere, in records and in kernels.
Status check_addresses(int device) {
  int value = 0;
  const Status status =
      told(cudaDeviceGetAttribute(&value, cudaDevAttrCanUseHostPointerForRegisteredMem, device),
           "cudaDeviceGetAttribute(CanUseHostPointerForRegisteredMem)", device);
  if (!status.ok() || value != 0) return status;
  return {Code::kIo, "device " + std::to_string(device) +
                         " cannot use pinned memory at its host address, which offloading relies on"};
}

class Runtime final : public DeviceRuntime {
 public:
  const char* name() const override { return "cuda"; }

  Status devices(int* count) const override {
    *count = 0;
    Status status = check_driver();
    if (!status.ok()) return status;
    const cudaError_t error = cudaGetDeviceCount(count);
    status = told(error, "cudaGetDeviceCount", -1);
    if (error == cudaErrorNoDevice || (status.ok() && *count == 0)) {
      *count = 0;
      return {Code::kIo, "the NVIDIA driver finds no device: look at nvidia-smi and CUDA_VISIBLE_DEVICES"};
    }
    for (int device = 0; status.ok() && device < *count; ++device) status = check_addresses(device);
    return status;
  }

  int numa_node(int device) const override {
    char bus_id[32] = {};
    if (!told(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device), "cudaDeviceGetPCIBusId", device).ok())
      return -1;
    std::string path = "/sys/bus/pci/devices/";
    for (const char* c = bus_id; *c != '\0'; ++c) path += static_cast<char>(std::tolower(*c));
    std::FILE* const file = std::fopen((path + "/numa_node").c_str(), "re");
    if (file == nullptr) return -1;  // not known, as in a container without it
    int node = -1;
    if (std::fscanf(file, "%d", &node) != 1) node = -1;
    std::fclose(file);
    return node;
  }

  // For all devices, through one that XLA uses: a context on another would cost memory there.
  Status pin(void* memory, size_t bytes) override {
    return on_device(device_with_context(), "cudaHostRegister", [&] {
      return cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    });
  }
  void unpin(void* memory) override {
    (void)on_device(device_with_context(), "cudaHostUnregister", [&] { return cudaHostUnregister(memory); });
  }

  Status make_memory(int device, size_t bytes, void** memory) override {
    *memory = nullptr;
    return on_device(device, "cudaMalloc", [&] { return cudaMalloc(memory, bytes); });
  }
  void free_memory(int device, void* memory) override {
    (void)on_device(device, "cudaFree", [&] { return cudaFree(memory); });
  }

  Status make_stream(int device, Stream* stream) override {
    cudaStream_t made = nullptr;
    const DeviceInUse in_use(device);
    Status status = in_use.status();
    if (status.ok()) status = told(load_kernels(), "cudaFuncGetAttributes", device);
    if (status.ok()) {
      status =
          told(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", device);
    }
    *stream = made;
    return status;
  }
  void free_stream(int device, Stream stream) override {
    (void)on_device(device, "cudaStreamSynchronize",
                    [&] { return cudaStreamSynchronize(as_stream(stream)); });
    (void)on_device(device, "cudaStreamDestroy", [&] { return cudaStreamDestroy(as_stream(stream)); });
  }
  Status make_event(int device, Event* event) override {
    cudaEvent_t made = nullptr;
    const Status status = on_device(device, "cudaEventCreateWithFlags", [&] {
      return cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventBlockingSync);
    });
    *event = made;
    return status;
  }
  void free_event(int device, Event event) override {
    (void)on_device(device, "cudaEventDestroy", [&] { return cudaEventDestroy(as_event(event)); });
  }

  Status copy_to_host(int device, Stream stream, void* to, const void* from, size_t bytes) override {
    return copy(device, stream, to, from, bytes, cudaMemcpyDeviceToHost, "cudaMemcpyAsync(DeviceToHost)");
  }
  Status copy_to_device(int device, Stream stream, void* to, const void* from, size_t bytes) override {
    return copy(device, stream, to, from, bytes, cudaMemcpyHostToDevice, "cudaMemcpyAsync(HostToDevice)");
  }
  Status copy_on_device(int device, Stream stream, void* to, const void* from, size_t bytes) override {
    return copy(device, stream, to, from, bytes, cudaMemcpyDeviceToDevice, "cudaMemcpyAsync(DeviceToDevice)");
  }
  Status set_zero(int device, Stream stream, void* to, size_t bytes) override {
    return on_device(device, "cudaMemsetAsync",
                     [&] { return cudaMemsetAsync(to, 0, bytes, as_stream(stream)); });
  }
  Status set_u32(int device, Stream stream, uint32_t* to, uint32_t value) override {
    return on_device(device, "launch of set_u32",
                     [&] { return launch_set_u32(to, value, as_stream(stream)); });
  }
  Status update(int device, Stream stream, const DeviceUpdate& update) override {
    const int64_t cells = update.count > 0 ? update.first_cell[update.count] : 0;
    if (cells == 0) return {};
    return on_device(device, "launch of update",
                     [&] { return launch_update(update, cells, as_stream(stream)); });
  }
  Status record(int device, Event event, Stream stream) override {
    return on_device(device, "cudaEventRecord",
                     [&] { return cudaEventRecord(as_event(event), as_stream(stream)); });
  }
  Status wait(int device, Stream stream, Event event) override {
    return on_device(device, "cudaStreamWaitEvent", [&] {
      return cudaStreamWaitEvent(as_stream(stream), as_event(event), cudaEventWaitDefault);
    });
  }
  Status wait_on_host(int device, Event event) override {
    return on_device(device, "cudaEventSynchronize", [&] { return cudaEventSynchronize(as_event(event)); });
  }

 private:
  static Status copy(int device, Stream stream, void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                     const char* name) {
    return on_device(device, name, [&] { return cudaMemcpyAsync(to, from, bytes, kind, as_stream(stream)); });
  }
};

}  // namespace

DeviceRuntime* runtime() {
  static Runtime* const only = new Runtime;  // NOLINT: see runtime.h
  return only;
}

}  // namespace jmo::cuda
