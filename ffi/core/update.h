// The fused update of one run of elements: what a rule needs to know, and where its operands lie.
//
// What always holds: a run gives the same bits whatever the number of threads and the vector width. No
// operation is contracted or reassociated, division and square root are correctly rounded, and every
// hyperparameter comes in as an operand. Denormals are flushed on input and output, as XLA's CPU backend does
// (the kernel threads set that mode themselves). Thread contract: update_run may be called from many threads
// at once over disjoint runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/dtype.h"

namespace jmo {

enum class Rule : uint8_t { kAdam = 0, kSgd = 1 };

// Static properties of a rule over one bucket.
struct RuleSpec {
  Rule rule = Rule::kAdam;
  DType param = DType::kF32;  // bf16: split master; f16: whole f32 master in the record
  DType mu = DType::kF32;     // storage of the first moment (Adam) or of the momentum (SGD)
  DType nu = DType::kF32;     // storage of the second moment (Adam)
  bool has_mu = true;         // SGD without momentum: false
  bool nesterov = false;
};

// What a record holds of a 16-bit param's master: its lower half (of the bits of bf16), or all of it.
constexpr DType master_type(DType param) { return param == DType::kF16 ? DType::kF32 : DType::kBF16; }

// Positions of the hyperparameters in the op's `hyper` operand (f32).
enum AdamHyper : int {
  kNegLr = 0,  // -learning_rate
  kB1,         // decay of mu, in the precision that optax multiplies with
  kOneMinusB1,
  kB2,
  kOneMinusB2,
  kEps,
  kEpsRoot,
  kWeightDecay,          // 0 where there is none
  kBiasCorrection1,      // 1 - b1**count
  kBiasCorrection2,      // 1 - b2**count
  kNextBiasCorrection1,  // 1 - b1**(count + 1), read with Nesterov only
  kB1Param,              // b1 as it multiplies the corrected moment with Nesterov
  kAdamHyperCount
};
enum SgdHyper : int { kSgdNegLr = 0, kMomentum, kSgdHyperCount };

// Params of 16 bits are guarded: each cell of this many elements (counted from the start of a segment) has a
// hash of the params that the update left behind, so that params replaced from outside are noticed.
constexpr int64_t kCellElements = 4096;
// What a record that was loaded has in their place: its masters belong to the params that come with the next
// update, or it has none and they are those params. No hash has these values.
constexpr uint32_t kCellOfAnyParams = 0xFFFFFFFF;
constexpr uint32_t kCellWithoutMasters = 0xFFFFFFFE;
constexpr int64_t cells_of(int64_t elements) { return (elements + kCellElements - 1) / kCellElements; }

// One contiguous run of elements of one leaf. Pointers are at its first element and may be unaligned to the
// vector.
struct Segment {
  const void* grad = nullptr;
  DType grad_type = DType::kF32;
  const void* param = nullptr;  // f32: may be null where the rule reads no params (no decay)
  void* out = nullptr;          // f32: optax's update; bf16/f16: the new params
  void* mu = nullptr;
  void* nu = nullptr;
  void* master = nullptr;     // bf16: int16 remainders; f16: f32 masters; f32: null
  uint32_t* cells = nullptr;  // cells_of(count) hashes; null for f32 params
  int64_t count = 0;
  bool decay = false;  // whether weight decay applies to this leaf
};

// Updates elements [begin, end) of `segment`; begin is a multiple of kCellElements. With `fresh` the record
// holds nothing yet: moments and remainders are taken as zero and cells are not compared. Returns how many
// cells were found to hold other params than the last update left (their remainder is dropped: the params
// from outside are adopted).
int64_t update_run(const RuleSpec& spec, const float* hyper, const Segment& segment, int64_t begin,
                   int64_t end, bool fresh);

// The instruction sets that update_run can use here, best first, and the one in use ("avx512", "avx2",
// "baseline"). force_isa("") goes back to the best; an unknown or unsupported name returns false. For tests
// and benchmarks.
const char* isa_in_use();
bool force_isa(const char* name);

// Rounds half up to bf16 and returns the remainder master_bits - (param_bits << 16), which fits int16.
// NaN becomes 0x7FC0 with remainder 0.
struct SplitMaster {
  uint16_t param;
  int16_t remainder;
};
SplitMaster split_master(uint32_t master_bits);
// The master again. A rebuilt NaN whose param is no NaN takes remainder 0.
uint32_t join_master(uint16_t param, int16_t remainder);

// Denormals to zero, both ways, for this thread: what XLA's CPU backend does.
void set_flush_denormals();

}  // namespace jmo
