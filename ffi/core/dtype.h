// Element types of gradients, params and moments. Thread contract: constants only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jmo {

enum class DType : uint8_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

constexpr size_t size_of(DType type) { return type == DType::kF32 ? 4 : 2; }

}  // namespace jmo
