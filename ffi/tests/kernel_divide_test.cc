// Division by the bias corrections (kernels/divide.inl): the same bits as the processor's division, for the
// corrections of training, random and awkward ones, all mantissas of the dividend, and its edges.
//
// With gradients of 0, b1 = 1 and eps = 1, Adam's update of f32 params is mu over the first correction. Under
// a sanitizer, fewer corrections and dividends.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "ffi/core/update.h"
#include "ffi/tests/check.h"
#include "ffi/tests/kernel_fixture.h"

namespace {

#ifdef JMO_SANITIZED
constexpr uint32_t kStride = 8191;
constexpr size_t kEvery = 256;
#else
constexpr uint32_t kStride = 1021;  // odd: its multiples meet every pattern of the low bits
constexpr size_t kEvery = 1;
#endif
constexpr uint32_t kMantissas = 1u << 23;
const char* kSets[] = {"avx512", "avx2", "baseline"};

using reference::bits_of;
using reference::float_of;

class Divider {
 public:
  // Divides all of `dividends` by c and compares.
  void check(const std::vector<float>& dividends, float c) {
    const size_t n = dividends.size();
    if (quotients_.size() < n) quotients_.resize(n), zeros_.resize(n), nu_.resize(n);
    mu_ = dividends;
    const float hyper[] = {1.0f, 1.0f, 0.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f, c, 1.0f, c, 0.0f};
    static_assert(sizeof hyper / sizeof *hyper == jmo::kAdamHyperCount, "all of them");
    jmo::Segment segment;
    segment.grad = zeros_.data();
    segment.out = quotients_.data();
    segment.mu = mu_.data();
    segment.nu = nu_.data();
    segment.count = static_cast<int64_t>(n);
    jmo::update_run({}, hyper, segment, 0, segment.count, false);
    uint32_t differing = 0;
    for (size_t i = 0; i < n; ++i) differing |= bits_of((dividends[i] + 0.0f) / c) ^ bits_of(quotients_[i]);
    if (differing != 0) report(dividends, c);
  }

 private:
  void report(const std::vector<float>& dividends, float c) {
    for (size_t i = 0; i < dividends.size(); ++i) {
      const float x = dividends[i] + 0.0f;  // mu is a sum, which makes +0 of -0
      const float expected = std::isnan(x / c) ? float_of(0x7FC00000u) : x / c;
      if (bits_of(expected) == bits_of(quotients_[i])) continue;
      std::fprintf(stderr, "%s: %a / %a is %a, not %a\n", jmo::isa_in_use(), x, c, quotients_[i], expected);
      CHECK(false);
    }
  }

  std::vector<float> quotients_, zeros_, mu_, nu_;
};

std::vector<float> corrections() {
  std::vector<float> all;
  for (const double decay : {0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999}) {
    float power = 1.0f;  // both ways to form it
    for (int step = 1; step <= 20000; ++step) {
      power *= static_cast<float>(decay);
      all.push_back(1.0f - power);
      all.push_back(1.0f - static_cast<float>(std::pow(decay, step)));
    }
  }
  kernel_fixture::Random random(7);
  for (int i = 0; i < 4000; ++i) {
    const uint32_t exponent = 97u + random.bits() % 30u;  // from 2^-30 on
    const uint32_t mantissa = random.bits() % kMantissas;
    all.push_back(float_of(exponent << 23 | mantissa));
    all.push_back(float_of(exponent << 23 | mantissa % 16u));
    all.push_back(float_of(exponent << 23 | (kMantissas - 1u - mantissa % 16u)));
  }
  // out of range as well: these are divided by
  for (float c :
       {1.0f, 0.5f, 2.0f, 3.0f, 0x1p-30f, 0x1.fffffep-31f, 0x1p-100f, 0x1p-126f, 1e30f, 0.0f, -0.3f}) {
    all.push_back(c);
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

// Dividends with every `stride`-th mantissa, in random order of sign and of some exponents.
std::vector<float> dividends(uint32_t stride, uint64_t seed) {
  static const uint32_t kExponents[] = {127, 127, 126, 120, 97, 64, 33, 32, 140, 188};
  kernel_fixture::Random random(seed);
  std::vector<float> all;
  for (uint32_t mantissa = static_cast<uint32_t>(seed) % stride; mantissa < kMantissas; mantissa += stride) {
    const uint32_t choice = random.bits();
    const uint32_t exponent = kExponents[(choice >> 1) % (sizeof kExponents / sizeof *kExponents)];
    all.push_back(float_of((choice & 1u) << 31 | exponent << 23 | mantissa));
  }
  return all;
}

// Every exponent, with mantissas at both ends and between: what must be left to true division too.
std::vector<float> edges() {
  std::vector<float> all;
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (uint32_t mantissa : {0u, 1u, 2u, 0x2AAAAAu, 0x3FFFFFu, 0x400000u, 0x555555u, 0x7FFFFEu, 0x7FFFFFu}) {
      for (uint32_t sign : {0u, 1u}) all.push_back(float_of(sign << 31 | exponent << 23 | mantissa));
    }
  }
  // The kernel looks at whole vectors: each value also in one of zeros, and among ordinary ones.
  const size_t count = all.size();
  for (size_t i = 0; i < count; ++i) {
    const float value = all[i];
    for (int lane = 0; lane < 16; ++lane)
      all.push_back(lane == int(i % 16) ? value : i % 32 < 16 ? 0.0f : 0.7f);
  }
  return all;
}

void check_share(size_t share, size_t shares, const std::vector<float>& all, const std::vector<float>& odd) {
  jmo::set_flush_denormals();
  Divider divider;
  for (size_t i = share * kEvery; i < all.size(); i += shares * kEvery) {
    divider.check(dividends(kStride, i), all[i]);
    if (i % 16 == 0) divider.check(odd, all[i]);
  }
}

}  // namespace

int main() {
  jmo::set_flush_denormals();
  const std::vector<float> all = corrections();
  const std::vector<float> odd = edges();
  for (const char* set : kSets) {
    if (!jmo::force_isa(set)) continue;
    std::thread other(check_share, 1, 2, all, odd);
    check_share(0, 2, all, odd);
    other.join();
    Divider divider;
    const std::vector<float> every = dividends(kStride == 1021 ? 1 : kStride, 0);
    for (float c : {0x1.fffffep-1f, 0x1.fffffcp-1f, 0x1.000002p-1f, 0.1f, 0.001f, 0.19f,
                    1.0f - 0.999f * 0.999f, 0.7f, 0x1.6a09e6p-1f, 0x1.fffffep-30f}) {
      divider.check(every, c);
    }
    for (float c : all) {
      if (!(c > 1.0f || c < 0x1p-30f)) continue;
      divider.check(odd, c);
    }
  }
  std::printf("kernel_divide_test: ok (%zu divisors)\n", all.size());
  return 0;
}
