// See staging.h.
#include "ffi/device/staging.h"

#include <algorithm>

namespace jmo {
namespace {

constexpr size_t kAlign = 64;  // bytes, of operands in a chunk

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

std::vector<Part> cut(const UpdateJob& job, size_t chunk_bytes) {
  std::vector<Part> parts(1);
  size_t used = 0;
  for (size_t index = 0; index < job.segments.size(); ++index) {
    const Segment& segment = job.segments[index];
    const size_t grad_size = size_of(segment.grad_type), param_size = size_of(job.spec.param);
    for (int64_t begin = 0; begin < segment.count;) {
      const size_t left = chunk_bytes - std::min(chunk_bytes, used + 2 * kAlign);
      int64_t count = static_cast<int64_t>(left / (grad_size + param_size));
      count = count >= segment.count - begin ? segment.count - begin : count / kCellElements * kCellElements;
      if (count == 0) {
        parts.emplace_back();
        used = 0;
        continue;
      }
      Piece piece;
      piece.segment = index;
      piece.begin = begin;
      piece.count = count;
      piece.grad_at = used;
      piece.param_at = used + aligned(count * grad_size);
      used = piece.param_at + aligned(count * param_size);
      parts.back().push_back(piece);
      begin += count;
    }
  }
  return parts;
}

UpdateJob staged(const UpdateJob& job, const Part& part, char* chunk) {
  UpdateJob result;
  result.spec = job.spec;
  result.hyper = job.hyper;
  result.fresh = job.fresh;
  for (const Piece& piece : part) {
    const Segment& whole = job.segments[piece.segment];
    Segment segment = whole;
    segment.grad = chunk + piece.grad_at;
    segment.out = chunk + piece.param_at;
    if (whole.param != nullptr) segment.param = segment.out;
    if (whole.mu != nullptr) segment.mu = at(whole.mu, piece.begin, job.spec.mu);
    if (whole.nu != nullptr) segment.nu = at(whole.nu, piece.begin, job.spec.nu);
    if (whole.master != nullptr) segment.master = at(whole.master, piece.begin, master_type(job.spec.param));
    if (whole.cells != nullptr) segment.cells = whole.cells + piece.begin / kCellElements;
    segment.count = piece.count;
    result.segments.push_back(segment);
  }
  return result;
}

}  // namespace jmo
