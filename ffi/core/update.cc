// Which build of the fused update runs here, the split master for single values, and the flush mode.
//
// What always holds: the choice changes speed, never bits. It is made at load time and is the only mutable
// state; force_isa (tests, benchmarks) may replace it at any time between two calls. Thread contract: all
// functions may be called from any thread; set_flush_denormals acts on the calling thread.
#include "ffi/core/update.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "ffi/core/kernels/run.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jmo {
namespace {

struct Build {
  const char* name;
  kernels::RunFn run;
  bool (*supported)();
};

// Best first. __builtin_cpu_supports also asks whether the operating system saves the registers.
constexpr Build kBuilds[] = {
#if defined(__x86_64__)
    {"avx512", kernels::run_avx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("f16c");
     }},
    {"avx2", kernels::run_avx2,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {"baseline", kernels::run_baseline, [] { return true; }},
};

const Build* best_build() {
  for (const Build& build : kBuilds) {
    if (build.supported()) return &build;
  }
  std::abort();  // the baseline is always supported
}

std::atomic<const Build*>& build_in_use() {
  static std::atomic<const Build*> build{best_build()};
  return build;
}

bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

}  // namespace

int64_t update_run(const RuleSpec& spec, const float* hyper, const Segment& segment, int64_t begin,
                   int64_t end, bool fresh) {
  return build_in_use().load(std::memory_order_relaxed)->run(spec, hyper, segment, begin, end, fresh);
}

const char* isa_in_use() { return build_in_use().load(std::memory_order_relaxed)->name; }

bool force_isa(const char* name) {
  const Build* chosen = *name == '\0' ? best_build() : nullptr;
  for (const Build& build : kBuilds) {
    if (std::strcmp(build.name, name) == 0 && build.supported()) chosen = &build;
  }
  if (chosen != nullptr) build_in_use().store(chosen, std::memory_order_relaxed);
  return chosen != nullptr;
}

SplitMaster split_master(uint32_t master_bits) {
  if (is_nan(master_bits)) return {0x7FC0, 0};
  const uint32_t param = (master_bits + 0x8000u) >> 16;
  return {static_cast<uint16_t>(param), static_cast<int16_t>(master_bits - (param << 16))};
}

uint32_t join_master(uint16_t param, int16_t remainder) {
  const uint32_t upper = static_cast<uint32_t>(param) << 16;
  const uint32_t joined = upper + static_cast<uint32_t>(static_cast<int32_t>(remainder));
  return is_nan(joined) && !is_nan(upper) ? upper : joined;
}

void set_flush_denormals() {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 1u << 15;      // results
  constexpr unsigned kDenormalsAreZero = 1u << 6;  // operands
  _mm_setcsr(_mm_getcsr() | kFlushToZero | kDenormalsAreZero);
#elif defined(__aarch64__)
  uint64_t control;
  __asm__ __volatile__("mrs %0, fpcr" : "=r"(control));
  control |= uint64_t{1} << 24;  // FZ: operands and results
  __asm__ __volatile__("msr fpcr, %0" : : "r"(control));
#endif
}

}  // namespace jmo
