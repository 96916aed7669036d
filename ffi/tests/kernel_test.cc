// The fused update: bit for bit against the reference of kernel_reference.h. Every rule and element type,
// every instruction set, odd sizes and addresses, special values, fresh records, adopted params.
#include <algorithm>
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
  test_small_steps_add_up();
  test_all_types();
  std::printf("kernel_test: ok (best instruction set: %s)\n", jmo::isa_in_use());
  return 0;
}
