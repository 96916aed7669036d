// Element conversions of the fused update: widening, rounding, the split master.
//
// What always holds: every function gives the same bits in every instruction set (NaNs that are stored in 16
// bits are canonical and positive, so that it does not matter which operand a NaN came from); nothing reads
// or writes outside its n elements; no library function but memcpy is called (see run.inl on why). Included
// by run.inl only, inside namespace jmo::kernels::JMO_ISA. Thread contract: pure functions.

// Signed comparisons, since the older vector units have no others.
JMO_INLINE bool is_nan(uint32_t bits) { return as_signed(bits & 0x7FFFFFFFu) > 0x7F800000; }
JMO_INLINE bool is_number(uint32_t bits) { return as_signed(bits & 0x7FFFFFFFu) <= 0x7F800000; }

// One NaN for all: which operand's payload survives an operation differs between instruction sets.
JMO_INLINE float canonical(float value) { return value == value ? value : as_float(0x7FC00000u); }

// ---- bf16

JMO_INLINE float from_bf16(uint16_t half) { return as_float(static_cast<uint32_t>(half) << 16); }

// Round to nearest even.
JMO_INLINE uint32_t bf16_bits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return is_nan(bits) ? 0x7FC0u : rounded;
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

void join_masters(const u16u* param, const u16u* remainder, float* master, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(param[i]) << 16;
    const float joined = as_float(bits + static_cast<uint32_t>(static_cast<int16_t>(remainder[i])));
    master[i] = joined == joined ? joined : as_float(bits);  // if the param is a NaN, either is one
  }
}

// What optax.apply_updates makes of `before` when it is to become `after`: their f32 difference, added in
// f32.
JMO_INLINE float applied(float before, float after) {
  const float difference = after == before ? 0.0f : after - before;
  return before + difference;
}

// master + update, rounded half up, is the new param; the remainder is kept relative to what will be stored.
void finish_bf16(const u16u* param, const f32u* master, const float* update, uint16_t* next, uint16_t* stored,
                 u16u* remainder, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = as_bits(master[i] + update[i]);
    const uint32_t to = is_nan(bits) ? 0x7FC0u : (bits + 0x8000u) >> 16;
    const uint32_t kept = bf16_bits(as_bits(applied(from_bf16(param[i]), as_float(to << 16))));
    // Outside int16 (the param was a near miss of its master, or -0) the master becomes what is stored.
    const uint32_t rest = bits - (kept << 16);
    const bool fits = (as_signed(rest << 16) >> 16 == as_signed(rest)) & is_number(bits);
    next[i] = static_cast<uint16_t>(to);
    stored[i] = static_cast<uint16_t>(kept);
    remainder[i] = static_cast<uint16_t>(fits ? rest : 0u);
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
