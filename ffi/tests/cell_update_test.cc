// The device's form of the fused update (ffi/device/cell_update.inl, here in loops): bit for bit what
// update_run gives. Every rule and element type, many segments at once, odd sizes and addresses, special
// values, fresh records, foreign params, results in the gradients' place, and sizes at which a flushed
// product or quotient could differ.
#include "ffi/device/cell_update.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "ffi/tests/check.h"
#include "ffi/tests/kernel_fixture.h"

namespace {

using namespace kernel_fixture;

#ifdef JMO_SANITIZED
constexpr int kRounds = 4;
constexpr size_t kEvery = 7;  // of the cases
#else
constexpr int kRounds = 200;
constexpr size_t kEvery = 1;
#endif

std::vector<Case> all_cases() {
  const DType all[] = {DType::kF32, DType::kBF16, DType::kF16};
  std::vector<Case> cases;
  for (DType grad : all) {
    for (DType param : all) {
      for (DType mu : all) {
        for (bool nesterov : {false, true}) {
          for (DType nu : all) {
            const RuleSpec adam{jmo::Rule::kAdam, param, mu, nu, true, nesterov};
            cases.push_back({adam, grad, false});
            cases.push_back({adam, grad, true});
          }
          cases.push_back({{jmo::Rule::kSgd, param, mu, DType::kF32, true, nesterov}, grad, false});
        }
      }
      cases.push_back({{jmo::Rule::kSgd, param, DType::kF32, DType::kF32, false, false}, grad, false});
    }
  }
  return cases;
}

// The segments of one bucket, updated either way.
struct Bucket {
  std::vector<State> states;

  std::vector<jmo::Segment> segments(bool in_place) {
    std::vector<jmo::Segment> all;
    for (State& state : states) {
      all.push_back(state.segment());
      if (in_place) all.back().out = state.grad.data();
    }
    return all;
  }
  std::vector<int64_t> update_on_host(const float* hyper, bool fresh, bool in_place) {
    std::vector<int64_t> adopted;
    for (const jmo::Segment& segment : segments(in_place)) {
      adopted.push_back(jmo::update_run(states[0].what.spec, hyper, segment, 0, segment.count, fresh));
    }
    return adopted;
  }
  // What is counted is added to what was there.
  std::vector<int64_t> update_as_device(const float* hyper, bool fresh, bool in_place) {
    const std::vector<jmo::Segment> all = segments(in_place);
    std::vector<int64_t> adopted(all.size(), 100), first_cell = {0};
    for (const jmo::Segment& segment : all)
      first_cell.push_back(first_cell.back() + jmo::cells_of(segment.count));
    jmo::run_device_update({states[0].what.spec, hyper, all.data(), first_cell.data(), adopted.data(),
                            static_cast<int>(all.size()), fresh});
    for (int64_t& count : adopted) count -= 100;
    return adopted;
  }
};

void check_same(Bucket& expected, Bucket& got, int step) {
  const char* names[] = {"out", "mu", "nu", "master", "grad"};
  for (size_t s = 0; s < expected.states.size(); ++s) {
    State &a = expected.states[s], &b = got.states[s];
    if (a == b && a.cells == b.cells) continue;
    const RuleSpec& spec = a.what.spec;
    std::fprintf(stderr,
                 "rule %d grad %d param %d mu %d nu %d has_mu %d nesterov %d decay %d count %lld, step %d\n",
                 int(spec.rule), int(a.what.grad), int(spec.param), int(spec.mu), int(spec.nu), spec.has_mu,
                 spec.nesterov, a.what.decay, static_cast<long long>(a.count), step);
    Array* left[] = {&a.out, &a.mu, &a.nu, &a.master, &a.grad};
    Array* right[] = {&b.out, &b.mu, &b.nu, &b.master, &b.grad};
    for (size_t i = 0; i < static_cast<size_t>(a.count); ++i) {
      for (int k = 0; k < 5; ++k) {
        if (left[k]->get_bits(i) == right[k]->get_bits(i)) continue;
        std::fprintf(stderr, "%s[%zu] is %08x, not %08x\n", names[k], i, right[k]->get_bits(i),
                     left[k]->get_bits(i));
        CHECK(false);
      }
    }
    CHECK(a.cells == b.cells);
    CHECK(a == b);
  }
}

// What a cell may have in its hash's place, and params from outside.
void disturb(State& state, Random& random) {
  if (state.cells.empty()) return;
  for (size_t cell = 0; cell < state.cells.size(); ++cell) {
    const uint32_t choice = random.bits() % 8;
    if (choice == 0) state.cells[cell] = jmo::kCellOfAnyParams;
    if (choice == 1) state.cells[cell] = jmo::kCellWithoutMasters;
    if (choice > 3) continue;
    const auto from = cell * static_cast<size_t>(jmo::kCellElements);
    const size_t left = std::min<size_t>(jmo::kCellElements, static_cast<size_t>(state.count) - from);
    state.param.set(from + random.bits() % left, random.value());
  }
}

// Four steps: fresh, ordinary, two disturbed.
void run_case(const Case& what, uint64_t seed) {
  Random random(seed);
  Bucket bucket;
  for (int64_t count : {1, 2, 3, 5, 15, 509, 513, 4095, 4096, 4096 + 777}) {
    bucket.states.emplace_back(what, count, random.bits() % 3);
    fill(bucket.states.back().param, random, count);
  }
  const bool may_share = jmo::size_of(what.grad) == jmo::size_of(what.spec.param);
  for (int step = 0; step < 4; ++step) {
    const std::vector<float> hyper = hyper_for(what.spec, step);
    for (State& state : bucket.states) {
      fill(state.grad, random, state.count);
      if (step >= 2) disturb(state, random);
    }
    const bool in_place = may_share && step % 2 == 1;
    Bucket expected = bucket, got = bucket;
    const std::vector<int64_t> adopted = expected.update_on_host(hyper.data(), step == 0, in_place);
    CHECK(got.update_as_device(hyper.data(), step == 0, in_place) == adopted);
    check_same(expected, got, step);
    bucket = expected;
    for (State& state : bucket.states) {
      for (size_t i = 0; what.spec.param != DType::kF32 && i < static_cast<size_t>(state.count); ++i) {
        state.param.set_bits(i, (in_place ? state.grad : state.out).get_bits(i));
      }
    }
  }
}

void test_all_types() {
  const std::vector<Case> cases = all_cases();
  for (size_t i = 0; i < cases.size(); i += kEvery) run_case(cases[i], i + 1);
}

float any_size(Random& random) {
  static const uint32_t kExponents[] = {0, 1, 2, 31, 32, 62, 63, 64, 65, 127, 190, 253, 254, 255};
  const uint32_t choice = random.bits();
  const uint32_t exponent = choice % 4 == 0
                                ? kExponents[random.bits() % (sizeof kExponents / sizeof *kExponents)]
                            : choice % 4 == 1 ? random.bits() % 256u
                                              : 90u + random.bits() % 40u;
  return reference::float_of((random.bits() & 0x807FFFFFu) | exponent << 23);
}

// Operands and hyperparameters of all sizes.
void test_sizes() {
  Random random(3);
  for (int round = 0; round < kRounds; ++round) {
    const DType param = round % 3 == 0 ? DType::kF32 : round % 3 == 1 ? DType::kBF16 : DType::kF16;
    const bool is_adam = round % 4 != 3;
    const RuleSpec spec{is_adam ? jmo::Rule::kAdam : jmo::Rule::kSgd,
                        param,
                        DType::kF32,
                        DType::kF32,
                        true,
                        (random.bits() & 1u) != 0};
    Bucket bucket;
    bucket.states.emplace_back(Case{spec, DType::kF32, (random.bits() & 1u) != 0}, 5000, 0);
    State& state = bucket.states[0];
    for (size_t i = 0; i < static_cast<size_t>(state.count); ++i) {
      state.param.set(i, any_size(random));
      for (Array* array : {&state.grad, &state.mu, &state.nu}) array->set(i, any_size(random));
      state.master.set_bits(i, random.bits() ^ random.bits() << 16);
    }
    std::fill(state.cells.begin(), state.cells.end(), jmo::kCellOfAnyParams);
    std::vector<float> hyper = hyper_for(spec, round % 50);
    for (float& value : hyper) {
      if (random.bits() % 8 == 0) value = any_size(random);
    }
    Bucket got = bucket;
    bucket.update_on_host(hyper.data(), false, false);
    got.update_as_device(hyper.data(), false, false);
    check_same(bucket, got, round);
  }
}

// Products and quotients around the smallest normal number, above all those that only rounding to 24 bits
// makes one.
void test_flushed() {
  Random random(4);
  const Case sgd{{jmo::Rule::kSgd, DType::kF32, DType::kF32, DType::kF32, false, false}, DType::kF32, false};
  const Case adam{{jmo::Rule::kAdam, DType::kF32, DType::kF32, DType::kF32, true, false}, DType::kF32, false};
  int64_t rounded_up = 0;
  for (int round = 0; round < kRounds; ++round) {
    const float factor = std::ldexp(1.0f + static_cast<float>(random.bits() % (1u << 23)) * 0x1p-23f, -60);
    Bucket product, division;
    product.states.emplace_back(sgd, 64, 0);
    division.states.emplace_back(adam, 64, 0);
    for (size_t i = 0; i < 64; ++i) {
      // g = 2^-126 / factor, and its neighbours; with decay rates of 1, corrections of 1 and a root of 0,
      // Adam's update is mu / eps.
      const double ulps = (static_cast<int>(i) - 32) * 0x1p-24;
      product.states[0].grad.set(i, static_cast<float>(0x1p-126 / factor * (1.0 + ulps)));
      division.states[0].grad.set(i, 0.0f);
      division.states[0].nu.set(i, 0.0f);
      division.states[0].mu.set(i, static_cast<float>(std::ldexp(factor, 60) * 0x1p-66 * (1.0 + ulps)));
      const double exact = double{product.states[0].grad.get(i)} * factor;
      rounded_up += exact < 0x1p-126 && exact >= 0x1.ffffffp-127;
    }
    const float rates[] = {factor, 0.0f};
    const float eps = std::ldexp(factor, 120);
    const float hyper[] = {1.0f, 1.0f, 0.0f, 1.0f, 0.0f, eps, 0.0f, 0.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    for (auto& [bucket, values] : {std::pair<Bucket&, const float*>{product, rates}, {division, hyper}}) {
      Bucket got = bucket;
      bucket.update_on_host(values, false, false);
      got.update_as_device(values, false, false);
      check_same(bucket, got, round);
    }
  }
  CHECK(rounded_up > kRounds / 4);
}

}  // namespace

int main() {
  jmo::set_flush_denormals();
  test_all_types();
  test_sizes();
  test_flushed();
  std::printf("cell_update_test: ok (against %s)\n", jmo::isa_in_use());
  return 0;
}
