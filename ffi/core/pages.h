// Advice to the kernel about memory that is about to be written for the first time. Thread contract: pure
// functions.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace jmo {

// Asks for huge pages under the whole pages of [memory, memory + size), where that is worth a call. XLA
// allocates the results of a program anew in every execution; faulting them in 4 KiB at a time costs more
// than the update itself.
inline void advise_huge_pages(void* memory, size_t size) {
  constexpr uintptr_t kPage = 4096;
  constexpr size_t kWorthwhile = 4u << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + size) / kPage * kPage;
#ifdef MADV_HUGEPAGE
  // only advice: where the kernel has no huge pages it says no, and nothing is lost
  if (end > begin && end - begin >= kWorthwhile)
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jmo
