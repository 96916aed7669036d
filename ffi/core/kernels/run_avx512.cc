// The fused update for AVX-512 F, BW, DQ and VL (flags.cmake sets the compile flags). Thread contract: as
// update_run.
#if defined(__x86_64__)
#include "ffi/core/kernels/run.h"

#define JMO_ISA avx512
#include "ffi/core/kernels/run.inl"

namespace jmo::kernels {

int64_t run_avx512(const RuleSpec& spec, const float* hyper, const Segment& segment, int64_t begin,
                   int64_t end, bool fresh) {
  return avx512::run(spec, hyper, segment, begin, end, fresh);
}

}  // namespace jmo::kernels
#endif
