// What the fused update does to whole runs of params: the hash of a cell, and stores past the caches.
//
// What always holds: a hash is the same in every instruction set; nothing reads or writes outside the given
// elements. Included by run.inl only, inside namespace jmo::kernels::JMO_ISA. Thread contract: pure
// functions.

// ---- the hash of a cell (scalar.inl)

JMO_INLINE VLong products(VHalves keyed) {
  const VLong words = reinterpret_cast<VLong>(keyed);
#if defined(__AVX512F__)
  return reinterpret_cast<VLong>(
      _mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(words), reinterpret_cast<__m512i>(words >> 32)));
#elif defined(__AVX2__)
  return reinterpret_cast<VLong>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(words), reinterpret_cast<__m256i>(words >> 32)));
#elif defined(__SSE2__)
  return reinterpret_cast<VLong>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(words), reinterpret_cast<__m128i>(words >> 32)));
#else
  return (words & 0xFFFFFFFFu) * (words >> 32);
#endif
}

JMO_INLINE uint64_t total(VLong sums) {
  uint64_t sum = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) sum += sums[lane];
  return sum;
}

template <Form kForm>
JMO_INLINE VHalves keyed(VHalves bits, VHalves exponent_mask, VHalves key) {
  if constexpr (kForm == Form::kCanonical) return bits + key;
  if constexpr (kForm == Form::kAny) {
    const VShorts magnitude = reinterpret_cast<VShorts>(bits & 0x7FFF);
    bits = magnitude > reinterpret_cast<VShorts>(exponent_mask) ? VHalves{} + uint16_t{0x7FFF} : bits;
  }
#if defined(__AVX512F__)
  const __m512i words = reinterpret_cast<__m512i>(bits), key_words = reinterpret_cast<__m512i>(key);
  const __mmask32 normal = _mm512_test_epi16_mask(words, reinterpret_cast<__m512i>(exponent_mask));
  return reinterpret_cast<VHalves>(_mm512_mask_add_epi16(key_words, normal, words, key_words));
#else
  return ((bits & exponent_mask) == 0 ? VHalves{} : bits) + key;
#endif
}

// The sum over `n` params of a block, of which the first has place `at`, a multiple of kGroup.
template <Form kForm>
uint64_t sum_params(const u16u* params, DType type, int at, int n) {
  const uint16_t exponent_mask = exponent_mask_of(type);
  const VHalves masks = VHalves{} + exponent_mask;
  VLong sums{};
  int i = 0;
  for (; i + kPair <= n; i += kPair) {
    sums += products(keyed<kForm>(load(params + i), masks, load(kKeys.of + at + i)));
  }
  uint64_t sum = total(sums);
  for (; i < n; i += kGroup) {  // what is missing in the last group is 0
    uint16_t group[kGroup];
    for (int k = 0; k < kGroup; ++k) {
      const uint16_t bits = i + k < n ? params[i + k] : uint16_t{0};
      group[k] = keyed<kForm>(bits, exponent_mask, kKeys.of[at + i + k]);
    }
    sum += product_of(group);
  }
  return sum;
}

template <Form kForm>
uint32_t hash_params(const u16u* params, DType type, int n) {
  uint32_t hash = 0;
  for (int at = 0; at < n; at += kBlock) {
    hash += share(sum_params<kForm>(params + at, type, 0, n - at < kBlock ? n - at : kBlock), at / kBlock);
  }
  return settled(hash);
}

// Whether a cell holds what its hash says. Nearly always its params are canonical.
bool has_hash(const u16u* params, DType type, int n, uint32_t hash) {
  return hash_params<Form::kCanonical>(params, type, n) == hash ||
         hash_params<Form::kAny>(params, type, n) == hash;
}

// ---- streaming stores

// Copies to memory that this core does not read soon. On x86 whole cache lines go past the caches, which
// spares reading them first; run() ends with a fence.
void stream_out(char* to, const char* from, size_t size) {
#if defined(__SSE2__)
  size_t head = -reinterpret_cast<uintptr_t>(to) & 63u;
  if (head > size) head = size;
  __builtin_memcpy(to, from, head);
  to += head, from += head, size -= head;
  for (; size >= 64; to += 64, from += 64, size -= 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
    const __m128i* source = reinterpret_cast<const __m128i*>(from);
    __m128i* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
#endif
  }
#endif
  __builtin_memcpy(to, from, size);
}

JMO_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
