// The vectors of the fused update (GCC's vector extension): types, loads and stores, conditions over all
// lanes, and pairs of vectors that fill one of 16-bit elements.
//
// What always holds: every function gives the same bits in every instruction set; nothing reads or writes
// outside the elements that it names. Included by run.inl only, inside namespace jmo::kernels::JMO_ISA.
// Thread contract: pure functions.

// Records may begin at any byte and are seen as several types.
using f32u = float __attribute__((aligned(1), may_alias));
using u16u = uint16_t __attribute__((aligned(1), may_alias));

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kPair = 2 * kLanes;  // elements of 16 bits in a vector
using VFloat = float __attribute__((vector_size(kLanes * 4)));
using VUint = uint32_t __attribute__((vector_size(kLanes * 4)));
using VInt = int32_t __attribute__((vector_size(kLanes * 4)));
using VHalves = uint16_t __attribute__((vector_size(kLanes * 4)));
using VShorts = int16_t __attribute__((vector_size(kLanes * 4)));
using VLong = uint64_t __attribute__((vector_size(kLanes * 4)));

JMO_INLINE VFloat as_float(VUint bits) { return reinterpret_cast<VFloat>(bits); }
JMO_INLINE VUint as_bits(VFloat value) { return reinterpret_cast<VUint>(value); }

// At any address.
JMO_INLINE VFloat load(const f32u* from) {
  VFloat value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
JMO_INLINE VHalves load(const u16u* from) {
  VHalves value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
JMO_INLINE void store(f32u* to, VFloat value) { __builtin_memcpy(to, &value, sizeof value); }
JMO_INLINE void store(u16u* to, VHalves value) { __builtin_memcpy(to, &value, sizeof value); }

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

// ---- conditions on lanes

#if defined(__AVX512F__)
using Lanes = __mmask16;
JMO_INLINE bool all(Lanes lanes) { return lanes == 0xFFFF; }
JMO_INLINE Lanes both_numbers(VFloat a, VFloat b) { return _mm512_cmp_ps_mask(a, b, _CMP_ORD_Q); }
JMO_INLINE Lanes with_same(Lanes lanes, VUint a, VUint b) {
  return _mm512_mask_cmpeq_epi32_mask(lanes, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b));
}
JMO_INLINE Lanes with_any_bit(VUint value, VUint bits) {
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(value), reinterpret_cast<__m512i>(bits));
}
// The smaller one in size; of a NaN and a number, the number.
JMO_INLINE VFloat smaller(VFloat a, VFloat b) { return _mm512_maskz_range_ps(0xFFFF, a, b, 0b1010); }
#else
using Lanes = VInt;
JMO_INLINE bool all(Lanes lanes) {
#if defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(lanes)) == 0xFF;
#elif defined(__SSE2__)
  return _mm_movemask_ps(reinterpret_cast<__m128>(lanes)) == 0xF;
#else
  int32_t every = -1;
  for (int i = 0; i < kLanes; ++i) every &= lanes[i];
  return every != 0;
#endif
}
JMO_INLINE Lanes both_numbers(VFloat a, VFloat b) { return (a == a) & (b == b); }
JMO_INLINE Lanes with_same(Lanes lanes, VUint a, VUint b) { return lanes & (a == b); }
JMO_INLINE Lanes with_any_bit(VUint value, VUint bits) { return (value & bits) != 0; }
JMO_INLINE VFloat smaller(VFloat a, VFloat b) {
  const VInt x = reinterpret_cast<VInt>(as_bits(a) & 0x7FFFFFFFu);
  const VInt y = reinterpret_cast<VInt>(as_bits(b) & 0x7FFFFFFFu);
  return reinterpret_cast<VFloat>(x < y ? x : y);
}
#endif

// A constant that stays in its register: GCC would make it anew at each use, from a general one.
template <typename Vector>
JMO_INLINE Vector kept(Vector value) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(value));
#endif
  return value;
}

// ---- pairs: kPair elements of 16 bits and two vectors of 32

// The orders in which words are picked, in registers for the length of a loop.
struct Orders {
#if defined(__AVX512F__)
  VHalves first, second;  // of two vectors' words: the first or second halves of each, in turns
  VHalves lower, upper;   // the lower or upper halves of two vectors' lanes
  __mmask32 odd;
#endif
};
JMO_INLINE Orders orders() {
  Orders result;
#if defined(__AVX512F__)
  VHalves first{}, second{}, lower{}, upper{};
  for (int i = 0; i < kLanes; ++i) {
    first[2 * i] = static_cast<uint16_t>(i), second[2 * i] = static_cast<uint16_t>(i + kLanes);
    first[2 * i + 1] = static_cast<uint16_t>(i + kPair),
                  second[2 * i + 1] = static_cast<uint16_t>(i + kLanes + kPair);
  }
  for (int i = 0; i < kPair; ++i) {
    lower[i] = static_cast<uint16_t>(2 * i), upper[i] = static_cast<uint16_t>(2 * i + 1);
  }
  result = {kept(first), kept(second), kept(lower), kept(upper), 0xAAAAAAAA};
  __asm__("" : "+Yk"(result.odd));
#endif
  return result;
}

// Lanes from the elements of the first or the second half: `low` below `high`.
template <int kHalf>
JMO_INLINE VUint joined([[maybe_unused]] const Orders& orders, VHalves low, VHalves high) {
#if defined(__AVX512F__)
  const VHalves order = kHalf == 0 ? orders.first : orders.second;
  return reinterpret_cast<VUint>(_mm512_permutex2var_epi16(
      reinterpret_cast<__m512i>(low), reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(high)));
#elif defined(__AVX2__)
  const __m256i a = _mm256_permute4x64_epi64(reinterpret_cast<__m256i>(low), 0xD8);
  const __m256i b = _mm256_permute4x64_epi64(reinterpret_cast<__m256i>(high), 0xD8);
  return reinterpret_cast<VUint>(kHalf == 0 ? _mm256_unpacklo_epi16(a, b) : _mm256_unpackhi_epi16(a, b));
#elif defined(__SSE2__)
  const __m128i a = reinterpret_cast<__m128i>(low), b = reinterpret_cast<__m128i>(high);
  return reinterpret_cast<VUint>(kHalf == 0 ? _mm_unpacklo_epi16(a, b) : _mm_unpackhi_epi16(a, b));
#else
  VUint result;
  for (int i = 0; i < kLanes; ++i) {
    result[i] = static_cast<uint32_t>(high[i + kHalf * kLanes]) << 16 | low[i + kHalf * kLanes];
  }
  return result;
#endif
}

// The same with zeros below.
template <int kHalf>
JMO_INLINE VUint raised(const Orders& orders, VHalves high) {
#if defined(__AVX512F__)
  // Of one vector's words an order takes its last five bits.
  const VHalves order = kHalf == 0 ? orders.first : orders.second;
  return reinterpret_cast<VUint>(_mm512_maskz_permutexvar_epi16(orders.odd, reinterpret_cast<__m512i>(order),
                                                                reinterpret_cast<__m512i>(high)));
#else
  return joined<kHalf>(orders, VHalves{}, high);
#endif
}

// The upper or the lower 16 bits of two vectors.
template <bool kUpper>
JMO_INLINE VHalves packed([[maybe_unused]] const Orders& orders, VUint first, VUint second) {
#if defined(__AVX512F__)
  const VHalves order = kUpper ? orders.upper : orders.lower;
  return reinterpret_cast<VHalves>(_mm512_permutex2var_epi16(
      reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(second)));
#elif defined(__AVX2__)
  const VUint a = kUpper ? first >> 16 : first & 0xFFFFu;
  const VUint b = kUpper ? second >> 16 : second & 0xFFFFu;
  const __m256i mixed = _mm256_packus_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b));
  return reinterpret_cast<VHalves>(_mm256_permute4x64_epi64(mixed, 0xD8));
#elif defined(__SSE2__)
  // The pack saturates signed values: extend the sign first, so that all 16 bits pass.
  const VInt a = reinterpret_cast<VInt>(kUpper ? first : first << 16) >> 16;
  const VInt b = reinterpret_cast<VInt>(kUpper ? second : second << 16) >> 16;
  return reinterpret_cast<VHalves>(
      _mm_packs_epi32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  VHalves result;
  for (int i = 0; i < kLanes; ++i) {
    result[i] = static_cast<uint16_t>(kUpper ? first[i] >> 16 : first[i]);
    result[i + kLanes] = static_cast<uint16_t>(kUpper ? second[i] >> 16 : second[i]);
  }
  return result;
#endif
}
