// Whole blocks of what scalar.inl does to an element: widening, rounding, the split master.
//
// What always holds: every function gives the same bits in every instruction set; nothing reads or writes
// outside its n elements; no library function but memcpy is called (see run.inl on why). Included by run.inl
// only, inside namespace jmo::kernels::JMO_ISA. Thread contract: pure functions.

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
  for (int i = 0; i < n; ++i) master[i] = joined_master(param[i], remainder[i]);
}

// master + update becomes the new param, the one that will be stored, and the remainder.
void finish_bf16(const u16u* param, const f32u* master, const float* update, uint16_t* next, uint16_t* stored,
                 u16u* remainder, int n) {
  JMO_LOOP
  for (int i = 0; i < n; ++i) {
    const SplitParam split = split_param(param[i], master[i] + update[i]);
    next[i] = split.next;
    stored[i] = split.stored;
    remainder[i] = split.remainder;
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
  for (int i = 0; i < n; ++i) master[i] = kept_master(exact[i], stored_wide[i], next[i], stored[i]);
}
