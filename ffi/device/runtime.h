// What the split update asks of an accelerator: a few operations on streams and events. Two implementations:
// CUDA's (ffi/cuda, an extension of its own) and an emulation with threads and random delays (emulated.h), so
// that all that is decided above this line runs, and is tested, on any machine.
//
// What always holds: what is given to one stream happens in the order of the calls. Nothing between `set-up
// only` and the end allocates, frees or waits, but where it says so (and copies of host memory that is not
// pinned, which may wait for what their stream holds). A failure of the device may be told by a later call
// than the one that caused it. Thread contract: any thread; set-up calls of one device come from one thread
// at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/status.h"
#include "ffi/core/update.h"

namespace jmo {

// A fused update on the device itself, over pinned records. All pointers but those to gradients, params and
// results (which are the device's) are to pinned host memory, and must stay until the stream has got past it.
struct DeviceUpdate {
  RuleSpec spec;
  const float* hyper = nullptr;
  const Segment* segments = nullptr;
  const int64_t* first_cell = nullptr;  // of each segment, and the number of all cells at the end
  int64_t* adopted_cells = nullptr;     // [segments], added to: see update_run
  int count = 0;                        // segments
  bool fresh = false;
};

// Of the Python object that carries a runtime from one extension to another.
constexpr char kRuntimeCapsule[] = "jax_mlp_offload.DeviceRuntime";

class DeviceRuntime {
 public:
  // Of this interface and of what goes through it: two extensions must have been built from one.
  static constexpr int kVersion = 2'000'000 + 1'000 * sizeof(DeviceUpdate) + sizeof(Segment);
  using Stream = void*;
  using Event = void*;

  virtual ~DeviceRuntime() = default;
  virtual const char* name() const = 0;  // "cuda", "emulated"
  // Whether its devices' memory is the host's.
  virtual bool is_emulated() const { return false; }

  // -- set-up only

  // How many devices there are; on failure why none can be used.
  virtual Status devices(int* count) const = 0;
  // NUMA node next to the device, -1 where it is not known.
  virtual int numa_node(int device) const = 0;
  // Pins memory, a multiple of 4096 bytes from a page on, so that every device can copy from and to it at
  // full speed and reach it from an update.
  virtual Status pin(void* memory, size_t bytes) = 0;
  virtual void unpin(void* memory) = 0;
  // Memory of the device itself, for measurements.
  virtual Status make_memory(int device, size_t bytes, void** memory) = 0;
  virtual void free_memory(int device, void* memory) = 0;
  virtual Status make_stream(int device, Stream* stream) = 0;
  virtual void free_stream(int device, Stream stream) = 0;  // waits for what it holds
  virtual Status make_event(int device, Event* event) = 0;
  virtual void free_event(int device, Event event) = 0;

  // -- in a step

  virtual Status copy_to_host(int device, Stream stream, void* to, const void* from, size_t bytes) = 0;
  virtual Status copy_to_device(int device, Stream stream, void* to, const void* from, size_t bytes) = 0;
  virtual Status copy_on_device(int device, Stream stream, void* to, const void* from, size_t bytes) = 0;
  virtual Status set_zero(int device, Stream stream, void* to, size_t bytes) = 0;
  virtual Status set_u32(int device, Stream stream, uint32_t* to, uint32_t value) = 0;
  virtual Status update(int device, Stream stream, const DeviceUpdate& update) = 0;
  // The event stands for all that the stream holds by now; an event may be recorded again and again.
  virtual Status record(int device, Event event, Stream stream) = 0;
  // What is given to the stream from now on waits for the event as it was last recorded; one never recorded
  // is past.
  virtual Status wait(int device, Stream stream, Event event) = 0;
  // Waits on this thread; tells what failed on the device before.
  virtual Status wait_on_host(int device, Event event) = 0;
};

}  // namespace jmo
