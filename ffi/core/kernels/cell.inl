// What the fused update does to whole runs of params: the hash of a cell, and stores past the caches.
//
// What always holds: a hash is the same in every instruction set; nothing reads or writes outside the given
// elements. Included by run.inl only, inside namespace jmo::kernels::JMO_ISA. Thread contract: pure
// functions.

// ---- the hash of a cell

using VHalves = uint16_t __attribute__((vector_size(kLanes * 4)));  // as many as fill a vector
using VShorts = int16_t __attribute__((vector_size(kLanes * 4)));

// Every NaN is one value, and all that XLA may flush is +0: neither tells that a param was replaced.
JMO_INLINE VHalves canonical_params(VHalves bits, uint16_t exponent_mask) {
  const VHalves number = (bits & exponent_mask) == 0 ? VHalves{} : bits;
  const VShorts magnitude = reinterpret_cast<VShorts>(bits & 0x7FFF);
  return magnitude > static_cast<int16_t>(exponent_mask) ? VHalves{} + uint16_t{0x7FFF} : number;
}
JMO_INLINE uint32_t canonical_param(uint32_t bits, uint32_t exponent_mask) {
  return (bits & 0x7FFFu) > exponent_mask ? 0x7FFFu : (bits & exponent_mask) == 0 ? 0u : bits;
}

// MurmurHash3's finalizer: a bijection in which each bit moves all others, so that neither one change in a
// cell nor like changes in several (signs, exponents) cancel in the sum.
template <typename Bits>
JMO_INLINE Bits mixed(Bits word) {
  word ^= word >> 16;
  word *= 0x85EBCA6Bu;
  word ^= word >> 13;
  word *= 0xC2B2AE35u;
  return word ^ (word >> 16);
}

// The share of `n` params in the hash of their cell: a sum over pairs of the mixed pair and its place.
// `first` (even) is the place of the first one within the cell; an odd last one is paired with 0.
uint32_t hash_params(const u16u* params, DType type, int first, int n) {
  constexpr uint32_t kPlace = 0x9E3779B1u;
  const uint16_t exponent_mask = type == DType::kBF16 ? 0x7F80 : 0x7C00;
  uint32_t place = static_cast<uint32_t>(first / 2 + 1) * kPlace;
  VUint places{}, sums{};
  for (int lane = 0; lane < kLanes; ++lane) places[lane] = place + static_cast<uint32_t>(lane) * kPlace;
  int i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    VHalves bits;
    __builtin_memcpy(&bits, params + i, sizeof bits);
    sums += mixed(reinterpret_cast<VUint>(canonical_params(bits, exponent_mask)) ^ places);
    places += kPlace * kLanes;
  }
  uint32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  place += static_cast<uint32_t>(i / 2) * kPlace;
  for (; i < n; i += 2, place += kPlace) {
    const uint32_t low = canonical_param(params[i], exponent_mask);
    const uint32_t high = i + 1 < n ? canonical_param(params[i + 1], exponent_mask) : 0u;
    sum += mixed((low | high << 16) ^ place);
  }
  return sum;
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
