// The host memory that is pinned for the emulated device.
//
// What always holds: ranges do not overlap, and one that an operation still uses is not let go. Thread
// contract: any thread; looking up orders no two of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "ffi/core/status.h"

namespace jmo::emulated {

// What CUDA leaves undefined.
[[noreturn]] inline void die(const std::string& what) {
  std::fprintf(stderr, "jmo::EmulatedRuntime: %s\n", what.c_str());
  std::abort();
}

struct Pin {
  size_t bytes = 0;
  std::atomic<int64_t> users{0};  // operations that are not over
};

class Pins {
 public:
  Status add(char* memory, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(memory) % 4096 != 0 || bytes % 4096 != 0 || bytes == 0)
      return Status(Code::kInvalid, "memory to pin is not whole pages");
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto next = pins_.lower_bound(memory);
    const bool overlaps =
        (next != pins_.end() && next->first < memory + bytes) ||
        (next != pins_.begin() && std::prev(next)->first + std::prev(next)->second->bytes > memory);
    if (overlaps) return Status(Code::kInvalid, "memory to pin is pinned already");
    auto pin = std::make_unique<Pin>();
    pin->bytes = bytes;
    pins_[memory] = std::move(pin);
    return Status();
  }

  void remove(char* memory) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    const auto found = pins_.find(memory);
    if (found == pins_.end()) die("unpin of memory that is not pinned");
    if (found->second->users.load(std::memory_order_acquire) != 0)
      die("unpin of memory that an operation still uses");
    pins_.erase(found);
  }

  // The pin that holds the first byte, or null; `whole` says whether it holds all of them.
  Pin* find(const void* memory, size_t bytes, bool* whole) const {
    const char* begin = static_cast<const char*>(memory);
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto after = pins_.upper_bound(begin);
    if (after == pins_.begin()) return nullptr;
    const auto& [start, pin] = *std::prev(after);
    if (begin >= start + pin->bytes) return nullptr;
    *whole = begin + bytes <= start + pin->bytes;
    return pin.get();
  }
  bool holds(const void* memory, size_t bytes) const {
    bool whole = false;
    return find(memory, bytes, &whole) != nullptr && whole;
  }
  size_t count() const {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    return pins_.size();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<const char*, std::unique_ptr<Pin>> pins_;
};

}  // namespace jmo::emulated
