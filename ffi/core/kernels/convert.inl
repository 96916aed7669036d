// Element conversions of the fused update: widening, rounding, the split master; the vectors they work on.
//
// What always holds: every function gives the same bits in every instruction set (NaNs that are stored in 16
// bits are canonical and positive, so that it does not matter which operand a NaN came from); nothing reads
// or writes outside its n elements; no library function but memcpy is called (see run.inl on why). Included
// by run.inl only, inside namespace jmo::kernels::JMO_ISA. Thread contract: pure functions.

// Records may begin at any byte and are seen as several types.
using f32u = float __attribute__((aligned(1), may_alias));
using u16u = uint16_t __attribute__((aligned(1), may_alias));

// Vectors of this instruction set (GCC's vector extension). What the fused loop needs is written once, for a
// vector or for one element; loops over elements of one width are left to the compiler.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using VFloat = float __attribute__((vector_size(kLanes * 4)));
using VUint = uint32_t __attribute__((vector_size(kLanes * 4)));
using VInt = int32_t __attribute__((vector_size(kLanes * 4)));
using VHalf = uint16_t __attribute__((vector_size(kLanes * 2)));

JMO_INLINE float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
JMO_INLINE uint32_t as_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
JMO_INLINE int32_t as_signed(uint32_t bits) { return static_cast<int32_t>(bits); }
JMO_INLINE VFloat as_float(VUint bits) { return reinterpret_cast<VFloat>(bits); }
JMO_INLINE VUint as_bits(VFloat value) { return reinterpret_cast<VUint>(value); }
JMO_INLINE VInt as_signed(VUint bits) { return reinterpret_cast<VInt>(bits); }

// Signed comparisons, since the older vector units have no others.
template <typename Bits>
JMO_INLINE auto is_nan(Bits bits) {
  return as_signed(bits & 0x7FFFFFFFu) > 0x7F800000;
}
template <typename Bits>
JMO_INLINE auto is_number(Bits bits) {
  return as_signed(bits & 0x7FFFFFFFu) <= 0x7F800000;
}

// One NaN for all: which operand's payload survives an operation differs between instruction sets.
JMO_INLINE float canonical(float value) { return value == value ? value : as_float(0x7FC00000u); }
JMO_INLINE VFloat canonical(VFloat value) { return value == value ? value : as_float(VUint{} + 0x7FC00000u); }

JMO_INLINE float root(float value) { return __builtin_sqrtf(value); }
JMO_INLINE VFloat root(VFloat value) {
#if defined(__AVX512F__)
  return _mm512_maskz_sqrt_ps(0xFFFF, value);  // unmasked, GCC 12 warns of an uninitialised operand
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(value);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(value);
#else
  for (int i = 0; i < kLanes; ++i) value[i] = __builtin_sqrtf(value[i]);
  return value;
#endif
}

// Loads and stores of a vector or of one element at any address.
JMO_INLINE void load(const f32u* from, float& value) { value = *from; }
JMO_INLINE void load(const f32u* from, VFloat& value) { __builtin_memcpy(&value, from, sizeof value); }
JMO_INLINE void load(const u16u* from, uint32_t& value) { value = *from; }
JMO_INLINE void load(const u16u* from, VUint& value) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from));
  value = reinterpret_cast<VUint>(_mm512_maskz_cvtepu16_epi32(0xFFFF, halves));
#elif defined(__AVX2__)
  value = reinterpret_cast<VUint>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from))));
#elif defined(__SSE2__)
  const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(from));
  value = reinterpret_cast<VUint>(_mm_unpacklo_epi16(halves, _mm_setzero_si128()));
#else
  VHalf halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  value = __builtin_convertvector(halves, VUint);
#endif
}
JMO_INLINE void load_signed(const u16u* from, uint32_t& value) {
  value = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(*from)));
}
JMO_INLINE void load_signed(const u16u* from, VUint& value) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from));
  value = reinterpret_cast<VUint>(_mm512_maskz_cvtepi16_epi32(0xFFFF, halves));
#elif defined(__AVX2__)
  value = reinterpret_cast<VUint>(
      _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from))));
#else
  load(from, value);
  value = (value ^ 0x8000u) - 0x8000u;
#endif
}
JMO_INLINE void store(f32u* to, float value) { *to = value; }
JMO_INLINE void store(f32u* to, VFloat value) { __builtin_memcpy(to, &value, sizeof value); }
JMO_INLINE void store(u16u* to, uint32_t value) { *to = static_cast<uint16_t>(value); }
// `value` is below 2^16. Spelt out because GCC 12 does not find these instructions for
// __builtin_convertvector.
JMO_INLINE void store(u16u* to, VUint value) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtepi32_epi16(0xFFFF, reinterpret_cast<__m512i>(value));
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), halves);
#elif defined(__AVX2__)
  const __m256i words = reinterpret_cast<__m256i>(value);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), halves);
#elif defined(__SSE2__)
  // The pack saturates signed values: extend the sign first, so that all 16 bits pass.
  const __m128i words = _mm_srai_epi32(_mm_slli_epi32(reinterpret_cast<__m128i>(value), 16), 16);
  _mm_storel_epi64(reinterpret_cast<__m128i_u*>(to), _mm_packs_epi32(words, words));
#else
  const VHalf halves = __builtin_convertvector(value, VHalf);
  __builtin_memcpy(to, &halves, sizeof halves);
#endif
}

// ---- bf16

JMO_INLINE float from_bf16(uint16_t half) { return as_float(static_cast<uint32_t>(half) << 16); }

// Round to nearest even.
template <typename Bits>
JMO_INLINE Bits bf16_bits(Bits bits) {
  const Bits rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return is_nan(bits) ? Bits{} + 0x7FC0u : rounded;
}
JMO_INLINE uint16_t to_bf16(float value) { return static_cast<uint16_t>(bf16_bits(as_bits(value))); }

// ---- f16: without floating-point operations on subnormals, which this thread flushes

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

// ---- whole blocks

void widen_bf16(const u16u* from, float* to, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) to[i] = from_bf16(from[i]);
}

void narrow_bf16(const float* from, u16u* to, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) to[i] = to_bf16(from[i]);
}

#if defined(__F16C__)
// F16C ignores the flush modes, like the code above.
void widen_f16(const u16u* from, float* to, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < n; ++i) to[i] = from_f16(from[i]);
}

void narrow_f16(const float* from, u16u* to, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    const __m128i magnitude = _mm_and_si128(halves, _mm_set1_epi16(0x7FFF));
    const __m128i nan = _mm_cmpgt_epi16(magnitude, _mm_set1_epi16(0x7C00));
    const __m128i stored = _mm_blendv_epi8(halves, _mm_set1_epi16(0x7E00), nan);
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to + i), stored);
  }
  for (; i < n; ++i) to[i] = to_f16(from[i]);
}
#else
void widen_f16(const u16u* from, float* to, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) to[i] = from_f16(from[i]);
}

void narrow_f16(const float* from, u16u* to, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) to[i] = to_f16(from[i]);
}
#endif

// ---- the split master (update.h: join_master, split_master)

// `param` zero-extended, `remainder` sign-extended.
template <typename Float, typename Bits>
JMO_INLINE Float joined_master(Bits param, Bits remainder) {
  const Float upper = as_float(param << 16);
  const Float joined = as_float((param << 16) + remainder);
  return joined == joined ? joined : upper;  // if the param is a NaN, either is one
}

void join_masters(const u16u* param, const u16u* remainder, float* master, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) {
    uint32_t rest;
    load_signed(remainder + i, rest);
    master[i] = joined_master<float, uint32_t>(param[i], rest);
  }
}

// What optax.apply_updates makes of `before` when it is to become `after`: their f32 difference, added in
// f32.
template <typename Float>
JMO_INLINE Float applied(Float before, Float after) {
  const Float difference = after == before ? Float{} : after - before;
  return before + difference;
}

template <typename Bits>
struct Bf16Element {
  Bits next, stored, remainder;
};

JMO_INLINE bool all(bool condition) { return condition; }
JMO_INLINE bool all(VInt condition) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(condition)) == 0xFFFF;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(condition)) == 0xFF;
#elif defined(__SSE2__)
  return _mm_movemask_ps(reinterpret_cast<__m128>(condition)) == 0xF;
#else
  int32_t every = -1;
  for (int i = 0; i < kLanes; ++i) every &= condition[i];
  return every != 0;
#endif
}

// master + update, rounded half up, is the new param; the remainder is kept relative to what will be stored.
template <typename Float, typename Bits>
JMO_INLINE Bf16Element<Bits> finished_bf16(Bits param, Float master, Float update) {
  const Bits bits = as_bits(master + update);
  const Bits next = is_nan(bits) ? Bits{} + 0x7FC0u : (bits + 0x8000u) >> 16;
  const Bits stored = bf16_bits(as_bits(applied(as_float(param << 16), as_float(next << 16))));
  // Outside int16 (the param was a near miss of its master, or -0) the master becomes what is stored.
  const Bits rest = bits - (stored << 16);
  const auto fits = (as_signed(rest << 16) >> 16 == as_signed(rest)) & is_number(bits);
  return {next, stored, fits ? rest & 0xFFFFu : Bits{}};
}

// The same for what nearly always holds: apply_updates stores the new param exactly, and no lane is a NaN.
// Then the remainder fits by construction. (`after - before` is right for equal ones but infinities, whose
// NaN fails the test; so does -0, which apply_updates makes +0.) Returns whether all of that holds.
template <typename Float, typename Bits>
JMO_INLINE bool finished_bf16_exactly(Bits param, Float master, Float update, Bf16Element<Bits>& result) {
  const Float sum = master + update;
  const Bits bits = as_bits(sum);
  const Bits next = (bits + 0x8000u) >> 16;
  const Float before = as_float(param << 16);
  const Float after = as_float(next << 16);
  const Float stored = before + (after - before);
  result = {next, next, (bits - (next << 16)) & 0xFFFFu};
  return all((sum == sum) & (as_bits(stored) == as_bits(after)));
}

void finish_bf16(const u16u* param, const f32u* master, const float* update, uint16_t* next, uint16_t* stored,
                 u16u* remainder, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) {
    const float before = master[i];
    const Bf16Element<uint32_t> result = finished_bf16<float, uint32_t>(param[i], before, update[i]);
    store(next + i, result.next);
    store(stored + i, result.stored);
    store(remainder + i, result.remainder);
  }
}

void add(const f32u* a, const float* b, float* sum, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) sum[i] = a[i] + b[i];
}

// f16 keeps a whole f32 master. before: the old params, widened; after: the new ones; exact: the new masters.
void apply_f16(const float* before, const float* after, float* sum, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) sum[i] = applied(before[i], after[i]);
}

void keep_f16(const float* exact, const float* stored_wide, const uint16_t* next, const uint16_t* stored,
              f32u* master, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) {
    master[i] =
        next[i] == stored[i] && stored_wide[i] == stored_wide[i] ? exact[i] : canonical(stored_wide[i]);
  }
}
