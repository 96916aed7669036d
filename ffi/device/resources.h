// What a link owns of a device: streams, events, pinned memory; given back by their destructors.
//
// Thread contract: made and destroyed on one thread at a time; what they hold may be used from any.
#pragma once

#include <sys/mman.h>

#include <memory>

#include "ffi/core/slots.h"
#include "ffi/core/syscalls.h"
#include "ffi/device/runtime.h"

namespace jmo {

class DeviceStream {
 public:
  DeviceStream(DeviceRuntime& runtime, int device)
      : runtime_(runtime), device_(device), status_(runtime.make_stream(device, &stream_)) {}
  ~DeviceStream() {
    if (status_.ok()) runtime_.free_stream(device_, stream_);
  }
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  const Status& status() const { return status_; }
  DeviceRuntime::Stream get() const { return stream_; }

 private:
  DeviceRuntime& runtime_;
  const int device_;
  DeviceRuntime::Stream stream_ = nullptr;
  Status status_;
};

class DeviceEvent {
 public:
  DeviceEvent(DeviceRuntime& runtime, int device)
      : runtime_(runtime), device_(device), status_(runtime.make_event(device, &event_)) {}
  ~DeviceEvent() {
    if (status_.ok()) runtime_.free_event(device_, event_);
  }
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  const Status& status() const { return status_; }
  Status record(DeviceRuntime::Stream stream) { return runtime_.record(device_, event_, stream); }
  Status wait_on_host() { return runtime_.wait_on_host(device_, event_); }

 private:
  DeviceRuntime& runtime_;
  const int device_;
  DeviceRuntime::Event event_ = nullptr;
  Status status_;
};

inline size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

// Pins memory of others while it lives, if it can be pinned. Forked children do not have it: what a device
// writes there would otherwise go to whichever of them has the page.
class Pin {
 public:
  Pin(DeviceRuntime& runtime, void* memory, size_t bytes)
      : runtime_(runtime), memory_(memory), bytes_(bytes), status_(runtime.pin(memory, bytes)) {
    if (status_.ok()) (void)syscalls().madvise(memory, bytes, MADV_DONTFORK);
  }
  ~Pin() {
    if (!status_.ok()) return;
    runtime_.unpin(memory_);
    (void)syscalls().madvise(memory_, bytes_, MADV_DOFORK);
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  const Status& status() const { return status_; }

 private:
  DeviceRuntime& runtime_;
  void* const memory_;
  const size_t bytes_;
  const Status status_;
};

// Memory that is there (and touched) where status() is ok, and pinned where pinned() is.
class PinnedMemory {
 public:
  PinnedMemory(DeviceRuntime& runtime, int device, size_t bytes)
      : slots_(1, whole_pages(bytes), 1, runtime.numa_node(device)) {
    if (slots_.status().ok()) pin_ = std::make_unique<Pin>(runtime, slots_.slot(0), slots_.slot_size());
  }

  const Status& status() const { return slots_.status(); }
  const Status& pinned() const { return pin_->status(); }
  char* get() const { return slots_.slot(0); }

 private:
  Slots slots_;
  std::unique_ptr<Pin> pin_;
};

}  // namespace jmo
