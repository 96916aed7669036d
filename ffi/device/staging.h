// How an update whose gradients, params and results lie on a device is cut into parts that pass through
// pinned memory.
//
// What always holds: the parts cover every element once; a part begins at a cell of its segment, so that the
// cells' hashes stay whole; within a chunk gradients and params lie at multiples of 64 bytes, and a result
// takes the place of its param. Thread contract: pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/core/kernel_pool.h"
#include "ffi/core/update.h"

namespace jmo {

// A run of elements of one segment, and where in the chunk its operands are.
struct Piece {
  size_t segment = 0;  // of the job
  int64_t begin = 0, count = 0;
  size_t grad_at = 0, param_at = 0;  // bytes from the chunk's start
};

// What passes through one chunk at a time.
using Part = std::vector<Piece>;

// Where the element `index` of an array is.
inline char* at(const void* base, int64_t index, DType type) {
  return static_cast<char*>(const_cast<void*>(base)) + index * static_cast<int64_t>(size_of(type));
}

// The least chunk that a part fits into: one cell of the widest elements.
constexpr size_t kLeastChunkBytes = 2 * kCellElements * 4 + 128;

std::vector<Part> cut(const UpdateJob& job, size_t chunk_bytes);

// The update of a part by the host: its operands are in the chunk, its state where it was.
UpdateJob staged(const UpdateJob& job, const Part& part, char* chunk);

}  // namespace jmo
