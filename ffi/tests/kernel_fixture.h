// What the tests of the fused update share: random operands, the arrays of one segment, the reference's step.
// Thread contract: none of it is shared between threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ffi/core/update.h"
#include "ffi/tests/kernel_reference.h"

namespace kernel_fixture {

using jmo::DType;
using jmo::RuleSpec;
using jmo::Segment;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}
  uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 20);
  }
  // Mostly of ordinary size; now and then any bit pattern, or one from the edges.
  float value() {
    static const uint32_t kEdges[] = {
        0x00000000u, 0x80000000u, 0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFC00001u, 0x7F800001u,
        0x00000001u, 0x807FFFFFu, 0x00800000u, 0x7F7F0000u, 0x7F7FFFFFu, 0xFF7F8000u, 0x3F808000u,
        0x3F818000u, 0x33000000u, 0x38800000u, 0x387FE000u, 0x477FE000u, 0x477FF000u, 0x477FEFFFu,
        0x33000001u, 0xFFFFFFFFu, 0x7FFFFFFFu, 0x3F800000u, 0xBF7FFFFFu};
    const uint32_t choice = bits() % 64;
    if (choice < 3) return reference::float_of(kEdges[bits() % (sizeof kEdges / sizeof *kEdges)]);
    if (choice == 3) return reference::float_of(bits());
    const float mantissa = static_cast<float>(static_cast<int32_t>(bits())) * 0x1p-31f;
    return mantissa * (choice < 16 ? 1.0f : choice < 40 ? 0.02f : 1e-4f);
  }

 private:
  uint64_t state_;
};

// An array of `count` elements at an address that is `shift` bytes off any alignment.
struct Array {
  DType type = DType::kF32;
  size_t shift = 0;
  std::vector<char> bytes;

  Array() = default;
  Array(DType type_, size_t count, size_t shift_) : type(type_), shift(shift_) {
    bytes.assign(shift + count * jmo::size_of(type) + 8, '\x5A');
  }
  char* data() { return bytes.data() + shift; }
  void set_bits(size_t i, uint32_t value) {
    std::memcpy(data() + i * jmo::size_of(type), &value, jmo::size_of(type));
  }
  uint32_t get_bits(size_t i) {
    uint32_t value = 0;
    std::memcpy(&value, data() + i * jmo::size_of(type), jmo::size_of(type));
    return value;
  }
  void set(size_t i, float value) {
    set_bits(i, type == DType::kF32 ? reference::bits_of(value)
                                    : reference::narrow(value, reference::format_of(type)));
  }
  float get(size_t i) {
    const uint32_t value = get_bits(i);
    return type == DType::kF32 ? reference::float_of(value)
                               : reference::widen(static_cast<uint16_t>(value), reference::format_of(type));
  }
};

struct Case {
  RuleSpec spec;
  DType grad = DType::kF32;
  bool decay = false;
};

inline std::vector<float> hyper_for(const RuleSpec& spec, int step) {
  if (spec.rule == jmo::Rule::kSgd) return {-0.03f, 0.9f};
  const float b1 = 0.9f, b2 = 0.999f;
  const float c1 = 1.0f - std::pow(b1, static_cast<float>(step + 1));
  const float c2 = 1.0f - std::pow(b2, static_cast<float>(step + 1));
  const float next = 1.0f - std::pow(b1, static_cast<float>(step + 2));
  return {-0.01f, b1, 1.0f - b1, b2, 1.0f - b2, 1e-8f, step % 2 == 0 ? 0.0f : 1e-12f, 0.1f, c1, c2, next, b1};
}

// Everything a segment points to.
struct State {
  Case what;
  int64_t count = 0;
  Array grad, param, out, mu, nu, master;
  std::vector<uint32_t> cells;

  State() = default;
  State(const Case& what_, int64_t count_, size_t odd) : what(what_), count(count_) {
    const RuleSpec& spec = what.spec;
    const size_t n = static_cast<size_t>(count);
    grad = Array(what.grad, n, odd * jmo::size_of(what.grad));
    param = Array(spec.param, n, odd * jmo::size_of(spec.param));
    out = Array(spec.param, n, odd * jmo::size_of(spec.param));
    mu = Array(spec.mu, n, odd * 2);
    nu = Array(spec.nu, n, odd * 2);
    master = Array(spec.param == DType::kF16 ? DType::kF32 : DType::kBF16, n, odd * 2);
    if (spec.param != DType::kF32) cells.assign(static_cast<size_t>(jmo::cells_of(count)), 0x5A5A5A5Au);
  }

  Segment segment() {
    const RuleSpec& spec = what.spec;
    Segment s;
    s.grad = grad.data();
    s.grad_type = what.grad;
    s.param = spec.param == DType::kF32 && !what.decay ? nullptr : param.data();
    s.out = out.data();
    s.mu = spec.has_mu ? mu.data() : nullptr;
    s.nu = spec.rule == jmo::Rule::kAdam ? nu.data() : nullptr;
    s.master = spec.param == DType::kF32 ? nullptr : master.data();
    s.cells = cells.empty() ? nullptr : cells.data();
    s.count = count;
    s.decay = what.decay;
    return s;
  }

  bool operator==(const State& other) const {
    return out.bytes == other.out.bytes && mu.bytes == other.mu.bytes && nu.bytes == other.nu.bytes &&
           master.bytes == other.master.bytes && grad.bytes == other.grad.bytes &&
           param.bytes == other.param.bytes;
  }
};

// The reference's step over a whole state; `adopted` says of each cell whether its params count as foreign.
// Returns what apply_updates stores.
inline std::vector<uint16_t> reference_step(State& s, const float* hyper, bool fresh,
                                            const std::vector<bool>& adopted) {
  const RuleSpec& spec = s.what.spec;
  std::vector<uint16_t> stored(static_cast<size_t>(s.count));
  for (size_t i = 0; i < stored.size(); ++i) {
    reference::Element e;
    if (!fresh && spec.has_mu) e.mu = s.mu.get(i);
    if (!fresh && spec.rule == jmo::Rule::kAdam) e.nu = s.nu.get(i);
    e.param = static_cast<uint16_t>(s.param.get_bits(i));
    e.master = s.param.get(i);
    if (spec.param != DType::kF32 && !fresh && !adopted[i / jmo::kCellElements]) {
      const uint32_t kept = s.master.get_bits(i);
      e.master = reference::float_of(
          spec.param == DType::kF16 ? kept : jmo::join_master(e.param, static_cast<int16_t>(kept)));
    }
    reference::update(spec, hyper, s.grad.get(i), s.what.decay, e);
    if (spec.has_mu) s.mu.set(i, e.mu);
    if (spec.rule == jmo::Rule::kAdam) s.nu.set(i, e.nu);
    if (spec.param == DType::kF32) {
      s.out.set(i, e.update);
    } else {
      s.out.set_bits(i, e.next);
      s.master.set_bits(i, e.kept);
      stored[i] = e.stored;
    }
  }
  return stored;
}

inline void fill(Array& array, Random& random, int64_t count) {
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) array.set(i, random.value());
}

}  // namespace kernel_fixture
