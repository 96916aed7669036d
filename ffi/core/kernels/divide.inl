// Division by a number that stays the same for a whole step, without the divider: the same bits as a
// division.
//
// With r = 1/c correctly rounded and q = x*r rounded, a fused multiply-add finds the remainder q*c - x, and
// another q - (q*c - x)*r, which is x/c correctly rounded (Markstein, IBM J. Res. Dev. 34(1), 1990,
// theorem 7.1). The theorem asks for q within one ulp of x/c. This q may be 3/2 ulp off, but where x/c lies
// within 2^-22 ulp of the middle of two floats, so that anything depends on the remainder's last bits, it is
// one of these two. (Let 1 <= x, c < 2. For x >= c, |x*r - x/c| <= x * 2^-25 is below half an ulp of the
// quotient. For x < c it is below x/2 ulp, and q could be the float beyond only with x >= 2 - 2^-21; but then
// c is as near to 2, and x/c near a float.) kernel_divide_test.cc tries it.
//
// What always holds, where is_divisor(c) and every lane of x is 0 or at least 2^-95 in size: the quotient is
// that of the division, or a NaN where x is infinite or so large that x*r overflows. (Of a smaller x the
// remainder might be flushed to 0 though it counts. Zeros keep their sign.) Callers look for NaNs and tiny
// dividends, and divide where they find any. The multiply-adds are asked for by name: the compiler contracts
// nothing (flags.cmake). Included by run.inl only, inside namespace jmo::kernels::JMO_ISA. Thread contract:
// pure functions.

#if defined(__AVX512F__) || defined(__FMA__)
constexpr bool kMultiplies = true;
JMO_INLINE VFloat quotient(VFloat x, const Divisor& c) {
  const VFloat q = x * c.reciprocal;
#if defined(__AVX512F__)
  const VFloat excess = _mm512_fmsub_ps(q, VFloat{} + c.value, x);
  return _mm512_fnmadd_ps(excess, VFloat{} + c.reciprocal, q);
#else
  const VFloat excess = _mm256_fmsub_ps(q, VFloat{} + c.value, x);
  return _mm256_fnmadd_ps(excess, VFloat{} + c.reciprocal, q);
#endif
}
#else
constexpr bool kMultiplies = false;
JMO_INLINE VFloat quotient(VFloat x, const Divisor& c) { return x / c.value; }
#endif

// Of dividends, or of the smallest of several: the lanes of at least 2^-95, and NaNs.
JMO_INLINE VUint large_bits() { return kept(VUint{} + 0x70000000u); }
JMO_INLINE Lanes are_dividends(VFloat x, VUint large_bits) { return with_any_bit(as_bits(x), large_bits); }

// Whether all lanes are, or zeros.
JMO_INLINE bool has_dividends(VFloat x) {
  return !kMultiplies || all(are_dividends(x == VFloat{} ? VFloat{} + 1.0f : x, VUint{} + 0x70000000u));
}
