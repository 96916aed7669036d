// The builds of the fused update, one an instruction set. update.cc picks one; nothing else calls them.
// Thread contract: as update_run.
#pragma once

#include "ffi/core/update.h"

namespace jmo::kernels {

using RunFn = int64_t (*)(const RuleSpec& spec, const float* hyper, const Segment& segment, int64_t begin,
                          int64_t end, bool fresh);

int64_t run_baseline(const RuleSpec&, const float*, const Segment&, int64_t, int64_t, bool);
#if defined(__x86_64__)
int64_t run_avx2(const RuleSpec&, const float*, const Segment&, int64_t, int64_t,
                 bool);  // needs AVX2, FMA and F16C
int64_t run_avx512(const RuleSpec&, const float*, const Segment&, int64_t, int64_t,
                   bool);  // needs F, BW, DQ and VL
#endif

}  // namespace jmo::kernels
