// The fused update of one element and the hash of a cell, in scalars: what the vector kernels do at their
// ends, and what a device does with every element (ffi/device/cell_update.inl).
//
// What always holds: every function gives the same bits in every instruction set and on a device (NaNs that
// are stored are canonical and positive, so that it does not matter which operand a NaN came from); no
// library function is called (see run.inl on why). Included by run.inl and cell_update.inl only, inside their
// namespaces. Thread contract: pure functions.

#if defined(__CUDACC__)
#define JMO_INLINE __device__ __forceinline__
#define JMO_TABLE __device__ const
#else
#define JMO_INLINE inline __attribute__((always_inline))
#define JMO_TABLE constexpr
#endif

constexpr int kBlock = 512;  // elements whose hash is one sum
constexpr int kGroup = 4;    // of which each makes one product

JMO_INLINE float as_float(uint32_t bits) {
#if defined(__CUDACC__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}
JMO_INLINE uint32_t as_bits(float value) {
#if defined(__CUDACC__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}
JMO_INLINE int32_t as_signed(uint32_t bits) { return static_cast<int32_t>(bits); }

// Signed comparisons, since the older vector units have no others.
JMO_INLINE bool is_nan(uint32_t bits) { return as_signed(bits & 0x7FFFFFFFu) > 0x7F800000; }
JMO_INLINE bool is_number(uint32_t bits) { return as_signed(bits & 0x7FFFFFFFu) <= 0x7F800000; }

// One NaN for all: which operand's payload survives an operation differs between instruction sets.
JMO_INLINE float canonical(float value) { return value == value ? value : as_float(0x7FC00000u); }

JMO_INLINE float root(float value) {
#if defined(__CUDACC__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// ---- bf16

JMO_INLINE float from_bf16(uint16_t half) { return as_float(static_cast<uint32_t>(half) << 16); }

// Round to nearest even.
JMO_INLINE uint32_t bf16_bits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return is_nan(bits) ? 0x7FC0u : rounded;
}
JMO_INLINE uint16_t to_bf16(float value) { return static_cast<uint16_t>(bf16_bits(as_bits(value))); }

// ---- f16: without floating-point operations on subnormals, which are flushed

JMO_INLINE float from_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7F800000u | (magnitude > 0x7C00u ? 0x00400000u : 0u);
  const uint32_t subnormal = as_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t bits = magnitude < 0x0400u ? subnormal : magnitude >= 0x7C00u ? special : normal;
  return as_float(bits | sign);
}

// Round to nearest even.
JMO_INLINE uint16_t to_f16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the addition rounds to multiples of 2^-24, the spacing of f16's subnormals, and leaves them
  // in the low bits. (An f32 subnormal is flushed to 0, which is what it rounds to.)
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;  // 65520 and above round to infinity
  return static_cast<uint16_t>(magnitude > 0x7F800000u ? 0x7E00u : half | sign);
}

// ---- masters and the params that they become

// A split master again (update.h: join_master, split_master).
JMO_INLINE float joined_master(uint16_t param, uint16_t remainder) {
  const uint32_t bits = static_cast<uint32_t>(param) << 16;
  const float joined = as_float(bits + static_cast<uint32_t>(static_cast<int16_t>(remainder)));
  return joined == joined ? joined : as_float(bits);  // if the param is a NaN, either is one
}

// What optax.apply_updates makes of `before` when it is to become `after`: their f32 difference, added in
// f32.
JMO_INLINE float applied(float before, float after) {
  const float difference = after == before ? 0.0f : after - before;
  return before + difference;
}

// The new master, rounded half up, is the new param; the remainder is kept relative to what will be stored.
struct SplitParam {
  uint16_t next, stored, remainder;
};
JMO_INLINE SplitParam split_param(uint16_t param, float master) {
  const uint32_t bits = as_bits(master);
  const uint32_t to = is_nan(bits) ? 0x7FC0u : (bits + 0x8000u) >> 16;
  const uint32_t kept = bf16_bits(as_bits(applied(from_bf16(param), as_float(to << 16))));
  // Outside int16 (the param was a near miss of its master, or -0) the master becomes what is stored.
  const uint32_t rest = bits - (kept << 16);
  const bool fits = (as_signed(rest << 16) >> 16 == as_signed(rest)) & is_number(bits);
  return {static_cast<uint16_t>(to), static_cast<uint16_t>(kept), static_cast<uint16_t>(fits ? rest : 0u)};
}

// f16 keeps a whole f32 master: `exact`, where the param that will be stored is the one it rounds to.
JMO_INLINE float kept_master(float exact, float stored_wide, uint16_t next, uint16_t stored) {
  return next == stored && stored_wide == stored_wide ? exact : canonical(stored_wide);
}

// ---- the hash of a cell

// A block's sum, after NH (Black et al., UMAC, CRYPTO 1999): each param is added to the key of its place, and
// each four make one product, (first two) * (last two), of 32-bit words. So one changed param changes the sum
// unless the other word is 0, and what several changes do to it depends on their places and on their
// neighbours: neither signs, exponents nor exchanged params cancel. Its products are summed modulo 2^64, in
// any order.
struct Keys {
  alignas(64) uint16_t of[kBlock];
  constexpr Keys() : of() {
    uint64_t state = 0;
    for (int i = 0; i < kBlock;) {  // splitmix64
      uint64_t word = state += 0x9E3779B97F4A7C15u;
      word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
      word = (word ^ word >> 27) * 0x94D049BB133111EBu;
      of[i] = static_cast<uint16_t>(word >> 40);
      // Two that differ, or a word of two equal params might be 0.
      if (i % 2 == 0 || of[i] != of[i - 1]) ++i;
    }
  }
};
JMO_TABLE Keys kKeys;

// What is known of params that are summed. All that XLA may flush counts as +0, and every NaN as one: neither
// tells that a param was replaced.
enum class Form { kAny, kNumbers, kCanonical };

template <Form kForm>
JMO_INLINE uint16_t keyed(uint16_t bits, uint16_t exponent_mask, uint16_t key) {
  if (kForm != Form::kCanonical && (bits & exponent_mask) == 0) bits = 0;
  if (kForm == Form::kAny && (bits & 0x7FFF) > exponent_mask) bits = 0x7FFF;
  return static_cast<uint16_t>(bits + key);
}

JMO_INLINE uint16_t exponent_mask_of(DType type) { return type == DType::kBF16 ? 0x7F80 : 0x7C00; }

// Of four that are keyed.
JMO_INLINE uint64_t product_of(const uint16_t (&group)[kGroup]) {
  const uint32_t first = group[0] | static_cast<uint32_t>(group[1]) << 16;
  const uint32_t last = group[2] | static_cast<uint32_t>(group[3]) << 16;
  return uint64_t{first} * last;
}

// What a block adds to the hash of its cell: MurmurHash3's 64-bit finalizer, in which each bit moves all
// others.
JMO_INLINE uint32_t share(uint64_t sum, int block) {
  uint64_t word = sum + static_cast<uint64_t>(block + 1) * 0x9E3779B97F4A7C15u;
  word = (word ^ word >> 33) * 0xFF51AFD7ED558CCDu;
  word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53u;
  return static_cast<uint32_t>(word >> 32);
}

// A hash that has a value of a meaning of its own (update.h) becomes another one.
JMO_INLINE uint32_t settled(uint32_t hash) { return hash >= kCellWithoutMasters ? hash - 2 : hash; }

// ---- division

// A number that stays the same for a whole step (divide.inl).
struct Divisor {
  float value, reciprocal;
};
// With 1/c at least 1, no quotient is tiny unless its dividend is.
JMO_INLINE bool is_divisor(float c) { return c >= 0x1p-30f && c <= 1.0f; }
JMO_INLINE float quotient(float x, const Divisor& c) { return x / c.value; }
