// The fused update of one cell, four elements (a quad) at a time, for the threads of a device and for a loop
// on the host.
//
// 1. A quad's operands are loaded, all before anything is computed, so that they are on their way at once.
// 2. Params of 16 bits make a product of the cell's hash, which says whether the masters belong to them.
// 3. The quad is updated and stored, and makes its product of the cell's new hash.
//
// What always holds: the bits are those of update_run (ffi/core/update.h) on x86. A product or quotient near
// the smallest normal number is found in double (Number), so nothing depends on how a device flushes;
// everything else is rounded alike everywhere, if nothing is contracted (flags.cmake,
// ffi/cuda/CMakeLists.txt). A quad is stored after all of it has been loaded, and nothing outside it is read
// or written. Included by cell_update.cc and ffi/cuda/kernels.cu only, in an unnamed namespace inside jmo.
// Thread contract: pure functions, but for what is stored.

#include "ffi/core/kernels/scalar.inl"

#if defined(__CUDACC__)
#define JMO_UNROLL _Pragma("unroll")
#else
#define JMO_UNROLL _Pragma("GCC unroll 4")
#endif

// ---- f32 as x86 rounds it, with denormals flushed both ways

// x86 flushes what is tiny once it is rounded to 24 bits; others may look before, or round to fewer bits
// first. That makes a difference only where the rounded result is 2^-126 or less. `rounded` has the sign in
// any case.
JMO_INLINE bool may_be_tiny(float rounded) { return (as_bits(rounded) & 0x7FFFFFFFu) <= 0x00800000u; }
JMO_INLINE float settle_tiny(float rounded, double magnitude) {
  return as_float((as_bits(rounded) & 0x80000000u) | (magnitude < 0x1.ffffffp-127 ? 0u : 0x00800000u));
}
JMO_INLINE double magnitude_of(float value) {
  const uint32_t bits = as_bits(value) & 0x7FFFFFFFu;
  return bits < 0x00800000u ? 0.0 : as_float(bits);
}

struct Number {
  float value;
  JMO_INLINE Number(float from) : value(from) {}
};
JMO_INLINE Number operator+(Number a, Number b) { return a.value + b.value; }  // exact where it is tiny
JMO_INLINE Number operator*(Number a, Number b) {
  const float rounded = a.value * b.value;
  return may_be_tiny(rounded) ? settle_tiny(rounded, magnitude_of(a.value) * magnitude_of(b.value)) : rounded;
}
JMO_INLINE Number operator/(Number a, Number b) {
  const float rounded = a.value / b.value;
  return may_be_tiny(rounded) ? settle_tiny(rounded, magnitude_of(a.value) / magnitude_of(b.value)) : rounded;
}
JMO_INLINE Number quotient(Number x, const Divisor& c) { return x / c.value; }
JMO_INLINE Number root(Number x) { return root(x.value); }

#include "ffi/core/kernels/arithmetic.inl"

// ---- four elements in memory

// As they lie there: of 32 bits, or of 16, which take the first two words.
struct Quad {
  uint32_t word[kGroup];
};

JMO_INLINE uint32_t bits_at(const Quad& quad, DType type, int k) {
  return type == DType::kF32 ? quad.word[k] : quad.word[k / 2] >> (16 * (k % 2)) & 0xFFFFu;
}
JMO_INLINE void put(Quad& quad, DType type, int k, uint32_t bits) {
  if (type == DType::kF32) {
    quad.word[k] = bits;
  } else {
    quad.word[k / 2] |= bits << (16 * (k % 2));
  }
}

JMO_INLINE float widened(uint32_t bits, DType type) {
  if (type == DType::kF32) return as_float(bits);
  return type == DType::kBF16 ? from_bf16(static_cast<uint16_t>(bits))
                              : from_f16(static_cast<uint16_t>(bits));
}
JMO_INLINE float value_at(const Quad& quad, DType type, int k) {
  return widened(bits_at(quad, type, k), type);
}
JMO_INLINE uint32_t narrowed(float value, DType type) {
  return type == DType::kF32 ? as_bits(value) : type == DType::kBF16 ? to_bf16(value) : to_f16(value);
}

template <int kCount>
struct alignas(4 * kCount) Words {
  uint32_t word[kCount];
};
// Whether a T can be loaded and stored there at once.
template <typename T>
JMO_INLINE bool is_aligned([[maybe_unused]] const char* at) {
#if defined(__CUDACC__)
  return reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0;
#else
  return true;
#endif
}
template <typename T>
JMO_INLINE T loaded(const char* from) {
#if defined(__CUDACC__)
  return *reinterpret_cast<const T*>(from);
#else
  T value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
#endif
}
template <typename T>
JMO_INLINE void store(char* to, const T& value) {
#if defined(__CUDACC__)
  *reinterpret_cast<T*>(to) = value;
#else
  __builtin_memcpy(to, &value, sizeof value);
#endif
}

// Elements [index, index + n) of an array; n is kGroup but at a segment's end. What is not there is 0.
JMO_INLINE Quad load_quad(const void* array, DType type, int64_t index, int n) {
  const char* from =
      static_cast<const char*>(array) + index * static_cast<int64_t>(type == DType::kF32 ? 4 : 2);
  Quad quad{};
  if (type == DType::kF32) {
    if (n == kGroup && is_aligned<Words<4>>(from)) {
      const Words<4> words = loaded<Words<4>>(from);
      JMO_UNROLL
      for (int k = 0; k < kGroup; ++k) quad.word[k] = words.word[k];
    } else {
      JMO_UNROLL
      for (int k = 0; k < kGroup; ++k) quad.word[k] = k < n ? loaded<uint32_t>(from + 4 * k) : 0u;
    }
  } else if (n == kGroup && is_aligned<Words<2>>(from)) {
    const Words<2> words = loaded<Words<2>>(from);
    quad.word[0] = words.word[0], quad.word[1] = words.word[1];
  } else {
    JMO_UNROLL
    for (int k = 0; k < kGroup; ++k) put(quad, type, k, k < n ? loaded<uint16_t>(from + 2 * k) : 0u);
  }
  return quad;
}

JMO_INLINE void store_quad(void* array, DType type, int64_t index, int n, const Quad& quad) {
  char* to = static_cast<char*>(array) + index * static_cast<int64_t>(type == DType::kF32 ? 4 : 2);
  if (type == DType::kF32) {
    if (n == kGroup && is_aligned<Words<4>>(to)) {
      store(to, Words<4>{{quad.word[0], quad.word[1], quad.word[2], quad.word[3]}});
    } else {
      JMO_UNROLL
      for (int k = 0; k < kGroup; ++k) {
        if (k < n) store(to + 4 * k, quad.word[k]);
      }
    }
  } else if (n == kGroup && is_aligned<Words<2>>(to)) {
    store(to, Words<2>{{quad.word[0], quad.word[1]}});
  } else {
    JMO_UNROLL
    for (int k = 0; k < kGroup; ++k) {
      if (k < n) store(to + 2 * k, static_cast<uint16_t>(bits_at(quad, type, k)));
    }
  }
}

// ---- one quad of a cell

// What all quads have in common.
struct Rules {
  RuleSpec spec;
  bool fresh;
  AdamFactors adam;
  float sgd_neg_lr, momentum;
};
JMO_INLINE Rules rules_of(const DeviceUpdate& update) {
  const float* hyper = update.hyper;
  Rules rules{update.spec, update.fresh, AdamFactors{}, 0.0f, 0.0f};
  if (rules.spec.rule == Rule::kAdam) {
    rules.adam = adam_factors(hyper, rules.spec.nesterov);
  } else {
    rules.sgd_neg_lr = hyper[kSgdNegLr];
    rules.momentum = rules.spec.has_mu ? hyper[kMomentum] : 0.0f;
  }
  return rules;
}

JMO_INLINE bool is_guarded(const RuleSpec& spec) { return spec.param != DType::kF32; }
// What is kept of a master: a remainder of 16 bits, or all of it.
JMO_INLINE DType kept_type(const RuleSpec& spec) {
  return spec.param == DType::kF16 ? DType::kF32 : DType::kBF16;
}

struct Operands {
  Quad grad, param, mu, nu, kept;
};
JMO_INLINE Operands load_operands(const Rules& rules, const Segment& segment, int64_t index, int n) {
  const RuleSpec& spec = rules.spec;
  Operands in{};
  in.grad = load_quad(segment.grad, segment.grad_type, index, n);
  if (is_guarded(spec) || segment.decay) in.param = load_quad(segment.param, spec.param, index, n);
  if (rules.fresh) return in;
  if (spec.has_mu) in.mu = load_quad(segment.mu, spec.mu, index, n);
  if (spec.rule == Rule::kAdam) in.nu = load_quad(segment.nu, spec.nu, index, n);
  if (is_guarded(spec)) in.kept = load_quad(segment.master, kept_type(spec), index, n);
  return in;
}

// What params add to the sum of their block. (What is missing in a quad counts as 0.)
JMO_INLINE uint64_t product_of_params(const Quad& params, DType type, int64_t index) {
  const Quad keys = load_quad(kKeys.of, DType::kBF16, index % kBlock, kGroup);
  uint16_t group[kGroup];
  JMO_UNROLL
  for (int k = 0; k < kGroup; ++k) {
    group[k] = keyed<Form::kAny>(static_cast<uint16_t>(bits_at(params, type, k)), exponent_mask_of(type),
                                 static_cast<uint16_t>(bits_at(keys, DType::kBF16, k)));
  }
  return product_of(group);
}

// Whether a cell's masters belong to the params of which `found` is the hash, and whether to say so if not.
JMO_INLINE bool is_trusted(uint32_t hash, uint32_t found) {
  return hash == kCellOfAnyParams || (hash != kCellWithoutMasters && hash == found);
}
JMO_INLINE bool is_adopted(uint32_t hash, uint32_t found) {
  return !is_trusted(hash, found) && hash != kCellWithoutMasters;
}

JMO_INLINE float master_at(const Rules& rules, const Operands& in, bool trusted, int k) {
  const DType type = rules.spec.param;
  const uint32_t param = bits_at(in.param, type, k);
  if (type == DType::kF32 || !trusted) return widened(param, type);
  if (type == DType::kF16) return as_float(in.kept.word[k]);
  return joined_master(static_cast<uint16_t>(param),
                       static_cast<uint16_t>(bits_at(in.kept, DType::kBF16, k)));
}

struct Updated {
  float mu, nu, update;
};
JMO_INLINE Updated apply_adam(const Rules& rules, bool decay, Number g, Number mu, Number nu, Number master) {
  const AdamFactors& h = rules.adam;
  const Moments<Number> next = moved(h, g, mu, nu);
  const Number mu_hat =
      rules.spec.nesterov ? corrected_mu<true>(h, g, next.mu) : corrected_mu<false>(h, g, next.mu);
  const Number nu_root = corrected_root(h, next.nu);
  const Number update =
      decay ? update_of<true>(h, mu_hat, nu_root, master) : update_of<false>(h, mu_hat, nu_root, master);
  return {canonical(next.mu.value), canonical(next.nu.value), canonical(update.value)};
}
JMO_INLINE Updated apply_sgd(const Rules& rules, Number g, Number mu) {
  Number trace = g, u = g;
  if (rules.spec.has_mu) {
    u = trace = traced(rules.momentum, g, mu);
    if (rules.spec.nesterov) u = traced(rules.momentum, g, trace);
  }
  return {canonical(trace.value), 0.0f, canonical((rules.sgd_neg_lr * u).value)};
}

// A new param of 16 bits, the one that will be stored, and what is kept of the master.
struct Finished {
  uint32_t next, stored, kept;
};
JMO_INLINE Finished finish(DType type, uint16_t param, float master) {
  if (type == DType::kBF16) {
    const SplitParam split = split_param(param, master);
    return {split.next, split.stored, split.remainder};
  }
  const uint16_t next = to_f16(master);
  const uint16_t stored = to_f16(applied(from_f16(param), from_f16(next)));
  return {next, stored, as_bits(kept_master(master, from_f16(stored), next, stored))};
}

// Returns what the params that will be stored add to the sum of their block; 0 for f32 params.
JMO_INLINE uint64_t update_quad(const Rules& rules, const Segment& segment, const Operands& in, bool trusted,
                                int64_t index, int n) {
  const RuleSpec& spec = rules.spec;
  Quad out{}, stored{}, mu{}, nu{}, kept{};
  JMO_UNROLL
  for (int k = 0; k < kGroup; ++k) {
    const float g = value_at(in.grad, segment.grad_type, k), old_mu = value_at(in.mu, spec.mu, k);
    const float master = master_at(rules, in, trusted, k);
    const Updated to = spec.rule == Rule::kAdam
                           ? apply_adam(rules, segment.decay, g, old_mu, value_at(in.nu, spec.nu, k), master)
                           : apply_sgd(rules, g, old_mu);
    put(mu, spec.mu, k, narrowed(to.mu, spec.mu));
    put(nu, spec.nu, k, narrowed(to.nu, spec.nu));
    if (!is_guarded(spec)) {
      out.word[k] = as_bits(to.update);
    } else if (k < n) {
      const uint16_t param = static_cast<uint16_t>(bits_at(in.param, spec.param, k));
      const Finished finished = finish(spec.param, param, master + to.update);
      put(out, spec.param, k, finished.next);
      put(stored, spec.param, k, finished.stored);
      put(kept, kept_type(spec), k, finished.kept);
    }
  }
  store_quad(segment.out, spec.param, index, n, out);
  if (spec.has_mu) store_quad(segment.mu, spec.mu, index, n, mu);
  if (spec.rule == Rule::kAdam) store_quad(segment.nu, spec.nu, index, n, nu);
  if (!is_guarded(spec)) return 0;
  store_quad(segment.master, kept_type(spec), index, n, kept);
  return product_of_params(stored, spec.param, index);
}
