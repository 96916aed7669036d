// The fused update of cell_update.inl in loops. Thread contract: as cell_update.h.
#include "ffi/device/cell_update.h"

#include <cstddef>
#include <cstdint>

namespace jmo {
namespace {

#include "ffi/device/cell_update.inl"

// `quad(index, n)` for the quads of [begin, end); the results are summed up in blocks to a hash.
template <typename OfQuad>
uint32_t hash_over(int64_t begin, int64_t end, const OfQuad& of_quad) {
  uint32_t hash = 0;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t block_end = end - block < kBlock ? end : block + kBlock;
    uint64_t sum = 0;
    for (int64_t index = block; index < block_end; index += kGroup) {
      sum += of_quad(index, static_cast<int>(block_end - index < kGroup ? block_end - index : kGroup));
    }
    hash += share(sum, static_cast<int>((block - begin) / kBlock));
  }
  return settled(hash);
}

// Returns whether the params of the cell were replaced from outside.
bool update_cell(const Rules& rules, const Segment& segment, int64_t begin, int64_t end) {
  const bool guarded = is_guarded(rules.spec);
  uint32_t* const kept = guarded ? segment.cells + begin / kCellElements : nullptr;
  bool trusted = !rules.fresh, adopted = false;
  if (guarded && !rules.fresh) {
    const uint32_t found = hash_over(begin, end, [&](int64_t index, int n) {
      const Quad params = load_quad(segment.param, rules.spec.param, index, n);
      return product_of_params(params, rules.spec.param, index);
    });
    trusted = is_trusted(*kept, found);
    adopted = is_adopted(*kept, found);
  }
  const uint32_t hash = hash_over(begin, end, [&](int64_t index, int n) {
    const Operands in = load_operands(rules, segment, index, n);
    return update_quad(rules, segment, in, trusted, index, n);
  });
  if (guarded) *kept = hash;
  return adopted;
}

}  // namespace

void run_device_update(const DeviceUpdate& update) {
  const Rules rules = rules_of(update);
  for (int i = 0; i < update.count; ++i) {
    const Segment& segment = update.segments[i];
    for (int64_t begin = 0; begin < segment.count; begin += kCellElements) {
      const int64_t end = segment.count - begin < kCellElements ? segment.count : begin + kCellElements;
      update.adopted_cells[i] += update_cell(rules, segment, begin, end);
    }
  }
}

}  // namespace jmo
