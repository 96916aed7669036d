// The fused update for whatever every processor of this architecture has (flags.cmake sets the compile
// flags). Thread contract: as update_run.
#include "ffi/core/kernels/run.h"

#define JMO_ISA baseline
#include "ffi/core/kernels/run.inl"

namespace jmo::kernels {

int64_t run_baseline(const RuleSpec& spec, const float* hyper, const Segment& segment, int64_t begin,
                     int64_t end, bool fresh) {
  return baseline::run(spec, hyper, segment, begin, end, fresh);
}

}  // namespace jmo::kernels
