// The fused update, compiled once for each instruction set: run_<isa>.cc names it in JMO_ISA and includes
// this file.
//
// 1. A run is cut into cells and a cell into blocks, whose widened operands and results fit the first-level
//    cache.
// 2. A 16-bit cell is first compared with its hash: on a mismatch its params came from outside, and they are
//    its masters.
// 3. A block: widen gradients, moments (f32 ones are used where they lie) and masters; apply the rule; narrow
//    the moments; form what goes out and what is kept of the masters; sum the params that will be stored, for
//    the hash. The most frequent case does all this in one loop (fused.inl).
//
// What always holds: no weak symbol leaves these files, or the linker might keep the copy of a shared inline
// function that was compiled for a newer processor. So everything here has internal linkage, and no function
// template or inline function of the standard library or of other headers is called (intrinsics are always
// inlined). Thread contract: as update_run.
#include <cstdint>

#include "ffi/core/update.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define JMO_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define JMO_LOOP _Pragma("GCC ivdep")
#endif

namespace jmo::kernels::JMO_ISA {
namespace {

// clang-format off: each uses the ones before it
#include "ffi/core/kernels/scalar.inl"
#include "ffi/core/kernels/vector.inl"
#include "ffi/core/kernels/divide.inl"
#include "ffi/core/kernels/convert.inl"
#include "ffi/core/kernels/cell.inl"
#include "ffi/core/kernels/arithmetic.inl"
#include "ffi/core/kernels/rules.inl"
#include "ffi/core/kernels/fused.inl"
// clang-format on

static_assert(kCellElements % kBlock == 0 && kBlock % 32 == 0, "blocks tile a cell and hold whole vectors");

alignas(64) const float kZeros[kBlock] = {};

struct alignas(64) Scratch {
  float grad[kBlock], mu[kBlock], nu[kBlock], master[kBlock], update[kBlock];
  float before[kBlock], after[kBlock], kept[kBlock];  // f16 only
  uint16_t next[kBlock], stored[kBlock];
};

inline int64_t bytes_of(DType type) { return type == DType::kF32 ? 4 : 2; }

inline const char* at(const void* base, DType type, int64_t index) {
  return static_cast<const char*>(base) + index * bytes_of(type);
}
inline char* at(void* base, DType type, int64_t index) {
  return static_cast<char*>(base) + index * bytes_of(type);
}

inline f32u* as_f32(char* p) { return reinterpret_cast<f32u*>(p); }
inline u16u* as_u16(char* p) { return reinterpret_cast<u16u*>(p); }
inline const f32u* as_f32(const char* p) { return reinterpret_cast<const f32u*>(p); }
inline const u16u* as_u16(const char* p) { return reinterpret_cast<const u16u*>(p); }

// The operand as floats: where it lies, or widened into `buffer`.
const f32u* widened(const char* from, DType type, float* buffer, int n) {
  if (type == DType::kF32) return as_f32(from);
  type == DType::kBF16 ? widen_bf16(as_u16(from), buffer, n) : widen_f16(as_u16(from), buffer, n);
  return buffer;
}

void narrow(const float* from, DType type, u16u* to, int n) {
  type == DType::kBF16 ? narrow_bf16(from, to, n) : narrow_f16(from, to, n);
}

// Whether one loop does it all (fused.inl).
bool is_fused(const RuleSpec& spec, const AdamFactors& factors, DType grad) {
  return spec.rule == Rule::kAdam && spec.param == DType::kBF16 && spec.mu == DType::kF32 &&
         spec.nu == DType::kF32 && grad != DType::kF16 && (factors.divides || !kMultiplies);
}

struct Runner {
  const RuleSpec& spec;
  const float* hyper;
  const AdamFactors& factors;
  const Segment& segment;
  const bool fresh;
  const bool fused;
  Scratch& scratch;

  bool cell_is_ours(int64_t begin, int n) {
    const uint32_t hash = segment.cells[begin / kCellElements];
    return hash == kCellOfAnyParams ||
           (hash != kCellWithoutMasters &&
            has_hash(as_u16(at(segment.param, spec.param, begin)), spec.param, n, hash));
  }

  // Masters of a block; without `trust` they are the params themselves.
  const f32u* masters(int64_t begin, bool trust, int n) {
    const char* param = at(segment.param, spec.param, begin);
    if (trust && spec.param == DType::kBF16) {
      join_masters(as_u16(param), as_u16(at(segment.master, DType::kBF16, begin)), scratch.master, n);
      return scratch.master;
    }
    if (trust && spec.param == DType::kF16) return as_f32(at(segment.master, DType::kF32, begin));
    return widened(param, spec.param, scratch.master, n);
  }

  void apply(int64_t begin, const f32u* master, int n) {
    Operands in{};
    in.grad = widened(at(segment.grad, segment.grad_type, begin), segment.grad_type, scratch.grad, n);
    in.master = master;
    in.update = scratch.update;
    char* mu = nullptr;
    char* nu = nullptr;
    if (spec.has_mu) {
      mu = at(segment.mu, spec.mu, begin);
      in.mu = fresh ? kZeros : widened(mu, spec.mu, scratch.mu, n);
      in.mu_out = spec.mu == DType::kF32 ? as_f32(mu) : scratch.mu;
    }
    if (spec.rule == Rule::kAdam) {
      nu = at(segment.nu, spec.nu, begin);
      in.nu = fresh ? kZeros : widened(nu, spec.nu, scratch.nu, n);
      in.nu_out = spec.nu == DType::kF32 ? as_f32(nu) : scratch.nu;
    }
    spec.rule == Rule::kAdam ? apply_adam(spec, segment.decay, factors, in, n)
                             : apply_sgd(spec, hyper, in, n);
    if (mu != nullptr && spec.mu != DType::kF32) narrow(scratch.mu, spec.mu, as_u16(mu), n);
    if (nu != nullptr && spec.nu != DType::kF32) narrow(scratch.nu, spec.nu, as_u16(nu), n);
  }

  uint64_t block_fused(int64_t begin, int n) {
    Bf16Operands in{};
    in.grad = at(segment.grad, segment.grad_type, begin);
    in.param = as_u16(at(segment.param, DType::kBF16, begin));
    in.mu = as_f32(at(segment.mu, DType::kF32, begin));
    in.nu = as_f32(at(segment.nu, DType::kF32, begin));
    in.remainder = as_u16(at(segment.master, DType::kBF16, begin));
    in.next = scratch.next;
    return apply_adam_bf16(spec, segment.grad_type, segment.decay, factors, in, n);
  }

  void finish_bf16_block(int64_t begin, const f32u* master, int n) {
    finish_bf16(as_u16(at(segment.param, DType::kBF16, begin)), master, scratch.update, scratch.next,
                scratch.stored, as_u16(at(segment.master, DType::kBF16, begin)), n);
  }

  void finish_f16_block(int64_t begin, const f32u* master, int n) {
    add(master, scratch.update, scratch.master, n);
    narrow_f16(scratch.master, scratch.next, n);
    widen_f16(as_u16(at(segment.param, DType::kF16, begin)), scratch.before, n);
    widen_f16(scratch.next, scratch.after, n);
    apply_f16(scratch.before, scratch.after, scratch.kept, n);
    narrow_f16(scratch.kept, scratch.stored, n);
    widen_f16(scratch.stored, scratch.kept, n);
    keep_f16(scratch.master, scratch.kept, scratch.next, scratch.stored,
             as_f32(at(segment.master, DType::kF32, begin)), n);
  }

  // Returns the sum of the params that will be stored.
  uint64_t block(int64_t begin, bool trust, int n) {
    char* out = at(segment.out, spec.param, begin);
    if (spec.param == DType::kF32) {
      apply(begin, segment.decay ? as_f32(at(segment.param, DType::kF32, begin)) : nullptr, n);
      stream_out(out, reinterpret_cast<const char*>(scratch.update), static_cast<size_t>(n) * 4);
      return 0;
    }
    uint64_t sum;
    if (trust && fused) {
      sum = block_fused(begin, n);
    } else {
      const f32u* master = masters(begin, trust, n);
      apply(begin, master, n);
      spec.param == DType::kBF16 ? finish_bf16_block(begin, master, n) : finish_f16_block(begin, master, n);
      sum = sum_params<Form::kAny>(scratch.stored, spec.param, 0, n);
    }
    stream_out(out, reinterpret_cast<const char*>(scratch.next), static_cast<size_t>(n) * 2);
    return sum;
  }

  // Returns whether the params of the cell were replaced from outside.
  bool cell(int64_t begin, int n) {
    const bool guarded = spec.param != DType::kF32;
    const bool trust = !fresh && (!guarded || cell_is_ours(begin, n));
    const bool adopted =
        guarded && !fresh && !trust && segment.cells[begin / kCellElements] != kCellWithoutMasters;
    uint32_t hash = 0;
    for (int done = 0; done < n; done += kBlock) {
      const uint64_t sum = block(begin + done, trust, n - done < kBlock ? n - done : kBlock);
      if (guarded) hash += share(sum, done / kBlock);
    }
    if (guarded) segment.cells[begin / kCellElements] = settled(hash);
    return adopted;
  }
};

int64_t run(const RuleSpec& spec, const float* hyper, const Segment& segment, int64_t begin, int64_t end,
            bool fresh) {
  Scratch scratch;  // left uninitialised: each block fills what it reads
  const AdamFactors factors = spec.rule == Rule::kAdam ? adam_factors(hyper, spec.nesterov) : AdamFactors{};
  const bool fused = is_fused(spec, factors, segment.grad_type);
  Runner runner{spec, hyper, factors, segment, fresh, fused, scratch};
  int64_t adopted = 0;
  for (; begin < end; begin += kCellElements) {
    const int64_t rest = end - begin;
    adopted += runner.cell(begin, static_cast<int>(rest < kCellElements ? rest : kCellElements));
  }
  stream_fence();
  return adopted;
}

}  // namespace
}  // namespace jmo::kernels::JMO_ISA
