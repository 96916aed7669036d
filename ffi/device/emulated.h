// An accelerator made of threads: its memory is ordinary memory, a stream is a thread with a queue. For
// tests of all that is decided above DeviceRuntime, on any machine.
//
// What always holds, as with CUDA:
// - An operation is done on its stream's thread, after the call, in the order of the calls; how long after
//   is drawn from the seed. Arguments are taken at the call, what they point to is read when the operation
//   is done.
// - An event stands for what its stream held at the last record; a wait takes the event as it was last
//   recorded by the call. One that was never recorded is past.
// - A copy from or to host memory that is not pinned ends before its call does, and so does all before it.
// - An operation that fails leaves its result half done and the device failed for good: nothing after it is
//   done, and every call tells that first cause, once nothing is being done there any more. A call that
//   returns a failure otherwise has given the stream nothing.
// - What CUDA leaves undefined ends the process with a message: streams, events, pins and memory that are
//   not there (any more) or of another device, an unpin of memory that an operation still uses, a free of an
//   event that a thread waits for. An update that reaches host memory that is not pinned fails the device.
// - Two threads are ordered by no more than what orders them on a device (call before operation, operation
//   before the next of its stream, record before wait), so that a thread sanitizer finds a missing wait in
//   whatever order things happen to run. Calls on one event, and on one stream, are ordered by the call.
// Thread contract: any thread; destroyed when no other uses it. The destructor waits for what is queued.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ffi/device/runtime.h"

namespace jmo {

enum class EmulatedCall : int {
  kPin = 0,  // counted over all devices, as device 0's
  kMakeMemory,
  kMakeStream,
  kMakeEvent,
  kCopyToHost,
  kCopyToDevice,
  kCopyOnDevice,
  kSetZero,
  kSetU32,
  kUpdate,
  kRecord,
  kWait,
  kWaitOnHost,
  kAny,  // any of those in a step
};

// The nth call of a kind on a device fails (counted from 0; -1: every one): at once, or, with `later`, when
// the stream gets to its operation. A call on an event tells of failures but has none of its own: where it
// is to fail, the device does. Set-up has no later.
struct EmulatedFailure {
  EmulatedCall call = EmulatedCall::kAny;
  int device = 0;
  int64_t nth = 0;
  bool later = false;
};

struct EmulatedOptions {
  int devices = 1;
  int numa_node = -1;
  uint64_t seed = 0;
  // Before and after each operation, and before a wait on the host returns; 0: none. Most delays are far
  // shorter.
  int longest_delay_us = 0;
  std::vector<EmulatedFailure> failures;
};

class EmulatedRuntime final : public DeviceRuntime {
 public:
  explicit EmulatedRuntime(EmulatedOptions options);
  ~EmulatedRuntime() override;
  EmulatedRuntime(const EmulatedRuntime&) = delete;
  EmulatedRuntime& operator=(const EmulatedRuntime&) = delete;

  const char* name() const override { return "emulated"; }
  bool is_emulated() const override { return true; }
  Status devices(int* count) const override;
  int numa_node(int device) const override;
  Status pin(void* memory, size_t bytes) override;
  void unpin(void* memory) override;
  Status make_memory(int device, size_t bytes, void** memory) override;
  void free_memory(int device, void* memory) override;
  Status make_stream(int device, Stream* stream) override;
  void free_stream(int device, Stream stream) override;
  Status make_event(int device, Event* event) override;
  void free_event(int device, Event event) override;

  Status copy_to_host(int device, Stream stream, void* to, const void* from, size_t bytes) override;
  Status copy_to_device(int device, Stream stream, void* to, const void* from, size_t bytes) override;
  Status copy_on_device(int device, Stream stream, void* to, const void* from, size_t bytes) override;
  Status set_zero(int device, Stream stream, void* to, size_t bytes) override;
  Status set_u32(int device, Stream stream, uint32_t* to, uint32_t value) override;
  Status update(int device, Stream stream, const DeviceUpdate& update) override;
  Status record(int device, Event event, Stream stream) override;
  Status wait(int device, Stream stream, Event event) override;
  Status wait_on_host(int device, Event event) override;

  // -- of the emulation only

  // What a program's own kernel would do, in the order of the stream. Not done on a device that has failed.
  Status run(int device, Stream stream, std::function<void()> work);
  // Overwrites memory with 0xFF: what the next user of a released buffer may do to it.
  Status poison(int device, Stream stream, void* memory, size_t bytes);
  // Waits for all that the stream holds; tells what failed on the device before.
  Status synchronize(int device, Stream stream);
  // The device fails now. What is under way ends, nothing else is done.
  void fail(int device, const std::string& message);
  // What has been made and not been freed.
  struct InUse {
    size_t streams = 0, events = 0, pins = 0, memories = 0;
  };
  InUse in_use() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace jmo
