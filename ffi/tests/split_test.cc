// The split master over all 2^32 floats: what comes back is what was split, and the param is the float
// rounded half up. Under a sanitizer, which is ten times slower, a strided subset that still meets every
// upper half.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>

#include "ffi/core/update.h"
#include "ffi/tests/check.h"

namespace {

#ifdef JMO_SANITIZED
constexpr uint64_t kStride = 127;  // odd and below 2^16: every upper half, many lower ones
constexpr int32_t kForeignStride = 509;
#else
constexpr uint64_t kStride = 1;
constexpr int32_t kForeignStride = 17;
#endif

bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

void check_range(uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; i += kStride) {
    const uint32_t master = static_cast<uint32_t>(i);
    const jmo::SplitMaster split = jmo::split_master(master);
    const uint32_t joined = jmo::join_master(split.param, split.remainder);
    if (is_nan(master)) {
      CHECK(split.param == 0x7FC0 && split.remainder == 0 && joined == 0x7FC00000u);
    } else {
      const uint32_t lower = master & 0xFFFFu;
      CHECK(joined == master);
      CHECK(split.param == (master >> 16) + (lower >= 0x8000u ? 1u : 0u));
    }
  }
}

// Any param from outside with any remainder: never a NaN that the param is not.
void check_foreign_params(uint32_t begin, uint32_t end) {
  for (uint32_t param = begin; param < end; ++param) {
    const uint32_t upper = param << 16;
    for (int32_t remainder = -0x8000; remainder <= 0x7FFF; remainder += kForeignStride) {
      const uint32_t joined = jmo::join_master(static_cast<uint16_t>(param), static_cast<int16_t>(remainder));
      CHECK(joined == upper + static_cast<uint32_t>(remainder) || joined == upper);
      CHECK(!is_nan(joined) || is_nan(upper));
      if (is_nan(upper)) CHECK(is_nan(joined));
    }
  }
}

}  // namespace

int main() {
  constexpr uint64_t kAll = uint64_t{1} << 32;
  std::thread upper([] {
    check_range(kAll / 2, kAll);
    check_foreign_params(0x8000, 0x10000);
  });
  check_range(0, kAll / 2);
  check_foreign_params(0, 0x8000);
  upper.join();
  std::printf("split_test: ok\n");
  return 0;
}
