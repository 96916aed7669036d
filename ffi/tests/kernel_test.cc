// The fused update: bit for bit against the reference of kernel_reference.h. Every rule and element type,
// every instruction set, odd sizes and addresses, special values, fresh records, adopted params.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "ffi/core/update.h"
#include "ffi/tests/check.h"
#include "ffi/tests/kernel_fixture.h"
#include "ffi/tests/kernel_reference.h"

namespace {

using namespace kernel_fixture;

std::vector<Case> all_cases() {
  const DType all[] = {DType::kF32, DType::kBF16, DType::kF16};
  const DType moments[] = {DType::kF32, DType::kBF16};
  std::vector<Case> cases;
  for (DType grad : all) {
    for (DType param : all) {
      for (int variant = 0; variant < 16; ++variant) {  // Adam: decay, Nesterov, types of mu and nu
        const RuleSpec spec{jmo::Rule::kAdam,          param, moments[variant & 1],
                            moments[variant >> 1 & 1], true,  (variant & 4) != 0};
        cases.push_back({spec, grad, (variant & 8) != 0});
      }
      for (DType mu : moments) {
        for (bool nesterov : {false, true}) {
          cases.push_back({{jmo::Rule::kSgd, param, mu, DType::kF32, true, nesterov}, grad, false});
        }
      }
      cases.push_back({{jmo::Rule::kSgd, param, DType::kF32, DType::kF32, false, false}, grad, false});
    }
  }
  return cases;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kRounds = 60;
#else
constexpr int kRounds = 3000;
#endif
const char* kSets[] = {"avx512", "avx2", "baseline"};

void report(const State& expected, const State& got, const char* set, int step) {
  const RuleSpec& spec = expected.what.spec;
  std::fprintf(
      stderr, "rule %d grad %d param %d mu %d nu %d has_mu %d nesterov %d decay %d count %lld, %s, step %d: ",
      int(spec.rule), int(expected.what.grad), int(spec.param), int(spec.mu), int(spec.nu), spec.has_mu,
      spec.nesterov, expected.what.decay, static_cast<long long>(expected.count), set, step);
  State a = expected, b = got;
  for (size_t i = 0; i < static_cast<size_t>(a.count); ++i) {
    Array* left[] = {&a.out, &a.mu, &a.nu, &a.master};
    Array* right[] = {&b.out, &b.mu, &b.nu, &b.master};
    const char* names[] = {"out", "mu", "nu", "master"};
    for (int k = 0; k < 4; ++k) {
      if (left[k]->get_bits(i) == right[k]->get_bits(i)) continue;
      std::fprintf(stderr, "%s[%zu] is %08x, not %08x (param %08x, grad %08x)\n", names[k], i,
                   right[k]->get_bits(i), left[k]->get_bits(i), a.param.get_bits(i), a.grad.get_bits(i));
      return;
    }
  }
  std::fprintf(stderr, "bytes outside the arrays were written\n");
}

// Four steps of one state: fresh, ordinary, with foreign params in every second cell, ordinary again.
void run_case(const Case& what, int64_t count, size_t odd, uint64_t seed) {
  Random random(seed);
  State state(what, count, odd);
  fill(state.param, random, count);
  for (int step = 0; step < 4; ++step) {
    const std::vector<float> hyper = hyper_for(what.spec, step);
    fill(state.grad, random, count);
    std::vector<bool> adopted(static_cast<size_t>(jmo::cells_of(count)), false);
    int64_t adopted_count = 0;
    if (step == 2 && what.spec.param != DType::kF32) {
      for (size_t cell = 0; cell < adopted.size(); cell += 2) {
        const size_t last = std::min<size_t>((cell + 1) * jmo::kCellElements, static_cast<size_t>(count)) - 1;
        const uint32_t old = state.param.get_bits(last);
        state.param.set_bits(last, old == 0x3F80u ? 0x4000u : 0x3F80u);
        adopted[cell] = true;
        ++adopted_count;
      }
    }
    State expected = state;
    const std::vector<uint16_t> stored = reference_step(expected, hyper.data(), step == 0, adopted);
    std::vector<uint32_t> cells;
    for (const char* set : kSets) {
      if (!jmo::force_isa(set)) continue;
      State got = state;
      const int64_t found = jmo::update_run(what.spec, hyper.data(), got.segment(), 0, count, step == 0);
      if (!(got == expected)) report(expected, got, set, step);
      CHECK(got == expected);
      CHECK_EQ(found, adopted_count);
      if (cells.empty()) cells = got.cells;
      CHECK(got.cells == cells);
    }
    expected.cells = cells;
    state = expected;
    if (what.spec.param != DType::kF32) {
      for (size_t i = 0; i < stored.size(); ++i) state.param.set_bits(i, stored[i]);
    }
  }
  jmo::force_isa("");
}

void test_all_types() {
  uint64_t seed = 1;
  for (const Case& what : all_cases()) {
    run_case(what, jmo::kCellElements + 777, 1, ++seed);
    for (int64_t count : {1, 2, 15, 513}) run_case(what, count, static_cast<size_t>(count % 2), ++seed);
  }
}

// Zeros, NaNs and subnormals hash alike; nothing else does. A cell of zeros is as guarded as any other.
void test_hash() {
  for (DType type : {DType::kBF16, DType::kF16}) {
    const Case what{{jmo::Rule::kSgd, type, DType::kF32, DType::kF32, false, false}, DType::kF32, false};
    const std::vector<float> hyper = {-0.0f, 0.0f};
    State zeros(what, jmo::kCellElements, 0);
    for (size_t i = 0; i < jmo::kCellElements; ++i) zeros.param.set_bits(i, 0), zeros.grad.set(i, 0);
    jmo::update_run(what.spec, hyper.data(), zeros.segment(), 0, zeros.count, true);
    const uint16_t inf = reference::format_of(type).infinity;
    const auto found = [&](size_t at, uint32_t bits) {
      State changed = zeros;
      changed.param.set_bits(at, bits);
      return jmo::update_run(what.spec, hyper.data(), changed.segment(), 0, changed.count, false);
    };
    for (size_t at : {size_t{0}, size_t{1}, size_t{511}, size_t{4095}}) {
      CHECK_EQ(found(at, 0x0000u), 0);
      CHECK_EQ(found(at, 0x8000u), 0);
      CHECK_EQ(found(at, 0x8001u), 0);
      CHECK_EQ(found(at, inf), 1);
      CHECK_EQ(found(at, inf + 1u), 1);
      CHECK_EQ(found(at, 0x3C00u), 1);
      CHECK_EQ(found(at, 0xBC00u), 1);
    }
    State nan = zeros;
    nan.param.set_bits(7, inf + 1u);
    jmo::update_run(what.spec, hyper.data(), nan.segment(), 0, nan.count, true);
    nan.param.set_bits(7, 0xFFFFu);
    CHECK_EQ(jmo::update_run(what.spec, hyper.data(), nan.segment(), 0, nan.count, false), 0);
    // The order counts.
    State swapped = zeros;
    swapped.param.set_bits(3, 0x3C00u);
    jmo::update_run(what.spec, hyper.data(), swapped.segment(), 0, swapped.count, true);
    swapped.param.set_bits(3, 0), swapped.param.set_bits(2, 0x3C00u);
    CHECK_EQ(jmo::update_run(what.spec, hyper.data(), swapped.segment(), 0, swapped.count, false), 1);
  }
}

// What changes many params of a cell is noticed as what changes one: nothing cancels.
void test_hash_of_many_changes() {
  Random random(5);
  for (DType type : {DType::kBF16, DType::kF16}) {
    const Case what{{jmo::Rule::kSgd, type, DType::kF32, DType::kF32, false, false}, DType::kF32, false};
    const float hyper[jmo::kAdamHyperCount] = {-0.0f};
    const uint32_t exponent_step = type == DType::kBF16 ? 0x80u : 0x400u;
    for (const bool constant : {false, true}) {
      State state(what, jmo::kCellElements, 0);
      for (size_t i = 0; i < jmo::kCellElements; ++i) {
        state.param.set(i, constant ? 1.0f : 0.25f + static_cast<float>(random.bits() % 512u) * 0.001f);
        state.grad.set(i, 0.0f);
      }
      jmo::update_run(what.spec, hyper, state.segment(), 0, state.count, true);
      const State before = state;
      const auto check_noticed = [&](auto change) {
        change(state.param);
        const bool same = state.param.bytes == before.param.bytes;
        CHECK_EQ(jmo::update_run(what.spec, hyper, state.segment(), 0, state.count, false), same ? 0 : 1);
        state.param.bytes = before.param.bytes;
        state.cells = before.cells;
      };
      const auto flip = [](Array& params, size_t at, uint32_t bits) {
        params.set_bits(at, params.get_bits(at) ^ bits);
      };
      for (int round = 0; round < kRounds; ++round) {
        const size_t a = random.bits() % jmo::kCellElements;
        const size_t b = (a + 1 + random.bits() % (round % 2 == 0 ? 8u : 4095u)) % jmo::kCellElements;
        const size_t few = 2 + random.bits() % 6;
        check_noticed([&](Array& p) { flip(p, a, 1u << round % 15); });
        check_noticed([&](Array& p) { flip(p, a, 0x8000u), flip(p, b, 0x8000u); });
        check_noticed([&](Array& p) {
          const uint32_t kept = p.get_bits(a);
          p.set_bits(a, p.get_bits(b)), p.set_bits(b, kept);
        });
        check_noticed([&](Array& p) {
          for (size_t k = 0; k < few; ++k) flip(p, (a + k * (b - a)) % jmo::kCellElements, 0x8000u);
        });
      }
      for (size_t length : {size_t{2}, size_t{64}, size_t{512}, size_t{2048}, size_t{4096}}) {
        for (size_t from = 0; from + length <= jmo::kCellElements; from += std::max(length, size_t{62})) {
          const auto change_all = [&](auto change) {
            check_noticed([&](Array& p) {
              for (size_t k = from; k < from + length; ++k) p.set_bits(k, change(p.get_bits(k)));
            });
          };
          change_all([](uint32_t) { return 0u; });
          change_all([](uint32_t bits) { return bits ^ 0x8000u; });
          change_all([&](uint32_t bits) { return bits - exponent_step; });
        }
      }
    }
  }
}

// A master must come back exactly through many small steps that do not move its param.
void test_small_steps_add_up() {
  const Case what{
      {jmo::Rule::kSgd, DType::kBF16, DType::kF32, DType::kF32, false, false}, DType::kF32, false};
  const std::vector<float> hyper = {-1.0f, 0.0f};
  State state(what, 1000, 0);
  for (size_t i = 0; i < 1000; ++i) state.param.set(i, 1.0f), state.grad.set(i, -0x1p-13f);
  for (int step = 0; step < 256; ++step) {
    CHECK_EQ(jmo::update_run(what.spec, hyper.data(), state.segment(), 0, 1000, step == 0), 0);
    for (size_t i = 0; i < 1000; ++i) state.param.set_bits(i, state.out.get_bits(i));
  }
  for (size_t i = 0; i < 1000; ++i) {
    const auto remainder = static_cast<int16_t>(state.master.get_bits(i));
    CHECK_EQ(reference::float_of(jmo::join_master(static_cast<uint16_t>(state.param.get_bits(i)), remainder)),
             1.0f + 256 * 0x1p-13f);
  }
}

// Sums 0 + x with plain SGD, for every x around the values of a 16-bit format: each is widened from the
// gradient's type, and rounded to the param's and to the momentum's.
void test_conversions() {
  for (DType type : {DType::kBF16, DType::kF16}) {
    const reference::Format& format = reference::format_of(type);
    std::vector<float> values;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float here = reference::widen(static_cast<uint16_t>(bits), format);
      const float next = reference::widen(static_cast<uint16_t>(bits + 1), format);
      const uint32_t middle = reference::bits_of(here + (next - here) / 2);
      values.push_back(here);
      for (uint32_t near : {middle - 1, middle, middle + 1}) values.push_back(reference::float_of(near));
    }
    for (float edge : {65519.996f, 65520.0f, 65520.004f, 0x1p-25f, 0x1.000002p-25f, 0x1.8p-24f, 3.4e38f}) {
      values.push_back(edge);
      values.push_back(-edge);
    }
    const auto count = static_cast<int64_t>(values.size());
    for (DType grad : {DType::kF32, type}) {
      const Case what{{jmo::Rule::kSgd, type, DType::kBF16, DType::kF32, true, false}, grad, false};
      State state(what, count, 0);
      for (size_t i = 0; i < values.size(); ++i) state.param.set_bits(i, 0), state.grad.set(i, values[i]);
      const float hyper[jmo::kAdamHyperCount] = {1.0f};
      State expected = state;
      reference_step(expected, hyper, true, {});
      for (const char* set : kSets) {
        if (!jmo::force_isa(set)) continue;
        State got = state;
        jmo::update_run(what.spec, hyper, got.segment(), 0, count, true);
        if (!(got == expected)) report(expected, got, set, 0);
        CHECK(got == expected);
      }
    }
  }
  jmo::force_isa("");
}

// A float of any exponent, more often a zero or near the limits of divide.inl.
float any_size(Random& random, uint32_t kind) {
  static const uint32_t kExponents[] = {0, 1, 2, 5, 8, 11, 22, 31, 32, 33, 127, 220, 253, 254, 255};
  if (kind == 0) return 0.0f;
  const uint32_t exponent = kind < 4   ? kExponents[random.bits() % (sizeof kExponents / sizeof *kExponents)]
                            : kind < 8 ? random.bits() % 256u
                                       : 100u + random.bits() % 28u;
  return reference::float_of((random.bits() & 0x807FFFFFu) | exponent << 23);
}

// Moments, gradients and corrections of all sizes: in some vectors one lane is odd, in some all are, in most
// none.
void test_sizes() {
  const int64_t count = 3 * jmo::kCellElements + 100;
  Random random(11);
  for (int variant = 0; variant < 16; ++variant) {
    const DType param = (variant & 1) != 0 ? DType::kBF16 : DType::kF32;
    const DType grad = (variant & 2) != 0 ? DType::kBF16 : DType::kF32;
    const RuleSpec spec{jmo::Rule::kAdam, param, DType::kF32, DType::kF32, true, (variant & 4) != 0};
    State state({spec, grad, (variant & 8) != 0}, count, 0);
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {  // a param of 0 shows all bits of its update
      const float tiny = reference::float_of(0x00800000u + (random.bits() & 0x817F0000u));
      state.param.set(i, i % 3 == 0 ? 0.0f : i % 3 == 1 && i / 64 % 4 < 2 ? tiny : any_size(random, 9));
      state.grad.set(i, 0.0f);
    }
    std::vector<float> hyper = hyper_for(spec, 3);
    State first = state;
    const std::vector<uint16_t> stored = reference_step(first, hyper.data(), true, {});
    jmo::update_run(spec, hyper.data(), state.segment(), 0, count, true);
    const std::vector<bool> adopted(static_cast<size_t>(jmo::cells_of(count)), false);
    for (size_t i = 0; param != DType::kF32 && i < stored.size(); ++i) state.param.set_bits(i, stored[i]);
    for (float c1 : {0.1f, 1.0f, 0x1.fffffep-1f, 0.3439f, 0x1p-30f, 0x1p-31f, 1.5f, 0.0f}) {
      hyper[jmo::kBiasCorrection1] = c1;
      hyper[jmo::kBiasCorrection2] = c1 == 0.1f ? 0.001f : 0.75f * c1;
      hyper[jmo::kEps] = c1 == 0.3439f ? 1.0f : c1 == 0x1.fffffep-1f ? 0.0f : 1e-8f;
      hyper[jmo::kEpsRoot] = c1 == 1.0f ? 1e-20f : 0.0f;
      for (size_t i = 0, lane = 0; i < static_cast<size_t>(count); ++i) {
        if (i % 64 == 0) lane = random.bits() % 64;
        const bool odd = i / 64 % 4 == 0 || i % 64 == lane;
        const auto size = [&] { return any_size(random, odd ? random.bits() % 12 : 9); };
        state.mu.set_bits(i, reference::bits_of(size()));
        state.nu.set_bits(i, reference::bits_of(size()) & (random.bits() % 16 == 0 ? ~0u : 0x7FFFFFFFu));
        state.grad.set(i, size() * 1e-3f);
      }
      State expected = state;
      reference_step(expected, hyper.data(), false, adopted);
      for (const char* set : kSets) {
        if (!jmo::force_isa(set)) continue;
        State got = state;
        CHECK_EQ(jmo::update_run(spec, hyper.data(), got.segment(), 0, count, false), 0);
        if (!(got == expected)) report(expected, got, set, variant);
        CHECK(got == expected);
      }
      jmo::force_isa("");
    }
  }
}

// Where the difference of two params is too small for a float, apply_updates stores the old one.
void test_lost_difference() {
  const RuleSpec spec{jmo::Rule::kAdam, DType::kBF16, DType::kF32, DType::kF32, true, false};
  const float hyper[] = {-0x1p-31f, 1.0f, 0.0f, 1.0f, 0.0f, 1.0f, 0.0f, 0.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  for (size_t odd = 0; odd < 64; ++odd) {
    State state({spec, DType::kBF16, false}, 64, 0);
    for (size_t i = 0; i < 64; ++i) state.param.set_bits(i, 0x0100u), state.grad.set_bits(i, 0);
    jmo::update_run(spec, hyper, state.segment(), 0, 64, true);
    state.master.set_bits(odd, 0x7FFFu);
    state.mu.set(odd, 0x1p-95f);  // an update of -2^-126
    State expected = state;
    CHECK_EQ(reference_step(expected, hyper, false, {false})[odd], 0x0100);
    CHECK_EQ(expected.out.get_bits(odd), 0x0081u);
    for (const char* set : kSets) {
      if (!jmo::force_isa(set)) continue;
      State got = state;
      CHECK_EQ(jmo::update_run(spec, hyper, got.segment(), 0, 64, false), 0);
      CHECK(got == expected && got.cells == state.cells);  // what is stored has not changed
    }
  }
  jmo::force_isa("");
}

void test_isa_names() {
  CHECK(!jmo::force_isa("mmx"));
  CHECK(jmo::force_isa("baseline"));
  CHECK_EQ(std::string(jmo::isa_in_use()), "baseline");
  CHECK(jmo::force_isa(""));
}

}  // namespace

int main() {
  jmo::set_flush_denormals();
  test_isa_names();
  test_conversions();
  test_hash();
  test_hash_of_many_changes();
  test_small_steps_add_up();
  test_all_types();
  test_sizes();
  test_lost_difference();
  std::printf("kernel_test: ok (best instruction set: %s)\n", jmo::isa_in_use());
  return 0;
}
