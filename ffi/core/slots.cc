// See slots.h. How the arena is made:
//
// 1. It is mapped with room to begin at a multiple of a huge page, and huge pages are asked for: the first
//    touch of fresh memory is slow (0.5 GB/s a thread with 4-KiB pages here, about 4 times that with huge
//    ones), and O_DIRECT pins fewer.
// 2. `touch_threads` threads populate one stretch each, by MADV_POPULATE_WRITE, which reports a failure
//    where a plain store would end the process; kernels before 5.14 do not know it, and there each page is
//    stored to.
// What always holds: after the constructor either status() is ok and all pages are there, or nothing is
// mapped.
// Thread contract: as in slots.h; the populating threads end within the constructor.
#include "ffi/core/slots.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

#include "ffi/core/syscalls.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace jmo {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = 2u << 20;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Returns 0 or the errno of what failed.
int populate(char* begin, size_t size) {
  while (syscalls().madvise(begin, size, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    for (size_t offset = 0; offset < size; offset += kPage) static_cast<volatile char*>(begin)[offset] = 0;
    break;
  }
  return 0;
}

int populate_in_parallel(char* base, size_t size, int threads) {
  const size_t parts = static_cast<size_t>(std::max(threads, 1));
  const size_t part = round_up((size + parts - 1) / parts, kHugePage);
  std::vector<int> errors(parts, 0);
  std::vector<std::thread> running;
  for (size_t index = 0; index < parts && index * part < size; ++index) {
    const auto work = [&errors, base, size, part, index] {
      errors[index] = populate(base + index * part, std::min(part, size - index * part));
    };
    if (index == 0) continue;  // the calling thread's own part
    try {
      running.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads to be had: slower, but right
      work();
    }
  }
  errors[0] = populate(base, std::min(part, size));
  for (std::thread& thread : running) thread.join();
  for (int error : errors)
    if (error != 0) return error;
  return 0;
}

std::string describe(size_t count, size_t slot_size) {
  return std::to_string(count) + " slots of " + std::to_string(slot_size) + " bytes";
}

}  // namespace

Slots::Slots(size_t count, size_t slot_size, int touch_threads, int numa_node) {
  if (count == 0) {
    slot_size_ = slot_size;
    return;
  }
  if (slot_size == 0 || slot_size % kPage != 0) {
    status_ =
        Status(Code::kInvalid, describe(count, slot_size) + ": the size must be a positive multiple of 4096");
    return;
  }
  if (count > (std::numeric_limits<size_t>::max() - kHugePage) / slot_size) {
    status_ = Status(Code::kInvalid, describe(count, slot_size) + ": more bytes than there are addresses");
    return;
  }
  const size_t size = count * slot_size;
  const std::string what =
      "map " + std::to_string(size) + " bytes of memory for " + describe(count, slot_size);
  void* mapping = syscalls().mmap(size + kHugePage);
  if (mapping == MAP_FAILED) {
    status_ = errno_status(what, errno);
    return;
  }
  char* raw = static_cast<char*>(mapping);
  const size_t head =
      round_up(reinterpret_cast<uintptr_t>(raw), kHugePage) - reinterpret_cast<uintptr_t>(raw);
  // Address space only, so that failing to give it back harms nothing.
  if (head > 0) (void)syscalls().munmap(raw, head);
  if (head < kHugePage) (void)syscalls().munmap(raw + head + size, kHugePage - head);
  char* base = raw + head;
  (void)syscalls().madvise(base, size, MADV_HUGEPAGE);  // advice: refused where the kernel has none
  if (numa_node >= 0) (void)syscalls().prefer_node(base, size, numa_node);  // likewise
  if (const int error = populate_in_parallel(base, size, touch_threads); error != 0) {
    (void)syscalls().munmap(base, size);
    status_ = errno_status(what, error);
    return;
  }
  base_ = base;
  mapped_ = size;
  count_ = count;
  slot_size_ = slot_size;
}

Slots::~Slots() {
  if (base_ != nullptr) (void)syscalls().munmap(base_, mapped_);
}

char* Slots::slot(size_t index) const { return index < count_ ? base_ + index * slot_size_ : nullptr; }

}  // namespace jmo
