// The memory that records live in: one page-aligned arena cut into equal slots, allocated and touched once.
// Thread contract: construct and destroy on one thread; slot addresses may be used from any.
#pragma once

#include <cstddef>

#include "ffi/core/status.h"

namespace jmo {

class Slots {
 public:
  // `slot_size` is a multiple of 4096. On failure the object is empty and status() says why (with the bytes
  // asked for).
  // The pages come from `numa_node` while it has any (-1, or where the kernel knows no nodes: from any).
  Slots(size_t count, size_t slot_size, int touch_threads, int numa_node = -1);
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  const Status& status() const { return status_; }
  size_t count() const { return count_; }
  size_t slot_size() const { return slot_size_; }
  char* slot(size_t index) const;  // index < count()

 private:
  char* base_ = nullptr;
  size_t mapped_ = 0;
  size_t count_ = 0;
  size_t slot_size_ = 0;
  Status status_;
};

}  // namespace jmo
