// The update of one element, written for the test only: in double, rounded to float after every operation.
//
// A sum, product, quotient or root of floats, computed in double and then rounded, is the correctly rounded
// float one (53 >= 2 * 24 + 2 bits), so nothing here depends on contraction, on vector code or on the
// processor's flush mode: subnormals are flushed by hand. Thread contract: pure functions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ffi/core/update.h"

namespace reference {

using jmo::DType;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline bool nan_bits(uint32_t bits) { return (bits << 1) > 0xFF000000u; }

// Operands: subnormals count as zeros of their sign.
inline double in(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7F800000u) == 0) return (bits >> 31) != 0 ? -0.0 : 0.0;
  return value;
}

// Results: flushed if they are tiny after rounding to 24 bits, and one NaN for all.
inline float out(double value) {
  if (std::isnan(value)) return float_of(0x7FC00000u);
  const double smallest = std::ldexp(1.0, -126) * (1.0 - std::ldexp(1.0, -25));
  if (std::fabs(value) < smallest) return std::signbit(value) ? -0.0f : 0.0f;
  if (std::fabs(value) < std::ldexp(1.0, -126)) return std::signbit(value) ? -0x1p-126f : 0x1p-126f;
  return static_cast<float>(value);
}

inline float add(float a, float b) { return out(in(a) + in(b)); }
inline float sub(float a, float b) { return out(in(a) - in(b)); }
inline float mul(float a, float b) { return out(in(a) * in(b)); }
inline float div(float a, float b) { return out(in(a) / in(b)); }
inline float root(float a) { return out(std::sqrt(in(a))); }

// Formats of 16 bits: bits of the fraction, and the exponent of the smallest normal number.
struct Format {
  int fraction, lowest;
  uint16_t infinity, nan;
};
constexpr Format kBF16{7, -126, 0x7F80, 0x7FC0};
constexpr Format kF16{10, -14, 0x7C00, 0x7E00};
inline const Format& format_of(DType type) { return type == DType::kBF16 ? kBF16 : kF16; }

inline float widen(uint16_t bits, const Format& format) {
  const int exponent = (bits & 0x7FFF) >> format.fraction;
  const int fraction = bits & ((1 << format.fraction) - 1);
  const bool special = (bits & format.infinity) == format.infinity;
  double value = special         ? std::numeric_limits<double>::infinity()
                 : exponent == 0 ? std::ldexp(fraction, format.lowest - format.fraction)
                                 : std::ldexp(fraction + (1 << format.fraction),
                                              format.lowest - format.fraction + exponent - 1);
  if (special && fraction != 0) return float_of(0x7FC00000u);
  // In bits, so that a subnormal survives a thread that flushes.
  if (&format == &kBF16) return float_of(static_cast<uint32_t>(bits) << 16);
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

// Round to nearest even.
inline uint16_t narrow(float value, const Format& format) {
  if (std::isnan(value)) return format.nan;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(in(value));
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | format.infinity;
  int exponent = std::ilogb(magnitude);
  if (exponent < format.lowest) exponent = format.lowest;
  const double units = std::nearbyint(std::ldexp(magnitude, format.fraction - exponent));
  // units reaches 2 << fraction where rounding carries: the sum then carries into the exponent as it should.
  const int64_t encoded = ((exponent - format.lowest) << format.fraction) + static_cast<int64_t>(units);
  return static_cast<uint16_t>(sign | (encoded >= format.infinity ? format.infinity : encoded));
}

struct Element {
  float mu = 0, nu = 0;
  uint16_t param = 0;  // of 16 bits; f32 params are in `master`
  float master = 0;    // what decay multiplies
  float update = 0;    // f32 params
  uint16_t next = 0, stored = 0;
  uint32_t kept = 0;  // f16: master bits; bf16: remainder
};

inline float adam_update(const jmo::RuleSpec& spec, const float* h, float g, bool decay, Element& e) {
  using namespace jmo;
  e.mu = add(mul(h[kOneMinusB1], g), mul(h[kB1], e.mu));
  e.nu = add(mul(h[kOneMinusB2], mul(g, g)), mul(h[kB2], e.nu));
  const float mu_hat = spec.nesterov ? add(mul(h[kB1Param], div(e.mu, h[kNextBiasCorrection1])),
                                           mul(h[kOneMinusB1], div(g, h[kBiasCorrection1])))
                                     : div(e.mu, h[kBiasCorrection1]);
  const float nu_hat = div(e.nu, h[kBiasCorrection2]);
  float u = div(mu_hat, add(root(add(nu_hat, h[kEpsRoot])), h[kEps]));
  if (decay) u = add(u, mul(h[kWeightDecay], e.master));
  return mul(h[kNegLr], u);
}

inline float sgd_update(const jmo::RuleSpec& spec, const float* h, float g, Element& e) {
  using namespace jmo;
  if (!spec.has_mu) return mul(h[kSgdNegLr], g);
  e.mu = add(g, mul(h[kMomentum], e.mu));
  return mul(h[kSgdNegLr], spec.nesterov ? add(g, mul(h[kMomentum], e.mu)) : e.mu);
}

// What apply_updates stores for `next`, and what is kept of the master.
inline void finish(DType param, Element& e) {
  const Format& format = format_of(param);
  const float master = add(e.master, e.update);
  e.next = param == DType::kBF16 ? jmo::split_master(bits_of(master)).param : narrow(master, format);
  const float before = widen(e.param, format);
  const float after = widen(e.next, format);
  const bool equal = in(before) == in(after);
  e.stored = narrow(add(before, equal ? 0.0f : sub(after, before)), format);
  if (param == DType::kF16) {
    const bool same = narrow(master, format) == e.stored && !std::isnan(master);
    e.kept = bits_of(same ? master : widen(e.stored, format));
    return;
  }
  const int64_t rest = int64_t{bits_of(master)} - (int64_t{e.stored} << 16);
  const bool fits = rest >= -0x8000 && rest <= 0x7FFF && !std::isnan(master);
  e.kept = static_cast<uint16_t>(fits ? rest : 0);
}

// All of it: e.mu, e.nu, e.master and e.param are inputs and outputs.
inline void update(const jmo::RuleSpec& spec, const float* hyper, float grad, bool decay, Element& e) {
  e.update = spec.rule == jmo::Rule::kAdam ? adam_update(spec, hyper, grad, decay, e)
                                           : sgd_update(spec, hyper, grad, e);
  if (spec.param != DType::kF32) finish(spec.param, e);
}

}  // namespace reference
