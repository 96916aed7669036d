// The fused update for AVX2, FMA and F16C (flags.cmake sets the compile flags). Thread contract: as
// update_run.
#if defined(__x86_64__)
#include "ffi/core/kernels/run.h"

#define JMO_ISA avx2
#include "ffi/core/kernels/run.inl"

namespace jmo::kernels {

int64_t run_avx2(const RuleSpec& spec, const float* hyper, const Segment& segment, int64_t begin, int64_t end,
                 bool fresh) {
  return avx2::run(spec, hyper, segment, begin, end, fresh);
}

}  // namespace jmo::kernels
#endif
