// Random worlds for a link under test: what a program hands over in each step, what becomes of it, and what
// must come out, bit for bit, by the host's kernel over whole leaves.
//
// What always holds: everything follows from the seed, so that a program, a driver and the reference agree
// without a word between them. Thread contract: a plan is constant once drawn; a reference is of one thread.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/core/engine.h"
#include "ffi/device/emulated.h"
#include "ffi/tests/check.h"
#include "ffi/tests/kernel_fixture.h"

namespace device_fixture {

using jmo::BucketSpec;
using jmo::DType;
using jmo::EmulatedCall;
using jmo::Rule;
using jmo::Segment;
using jmo::size_of;

constexpr uint32_t kPoison = 0xFFFFFFFFu;

inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
// A number that follows from others.
template <typename... Rest>
uint64_t mix(uint64_t first, Rest... rest) {
  return mix(first ^ (mix(static_cast<uint64_t>(rest)...) * 31));
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(mix(seed, 77)) {}
  int64_t below(int64_t limit) { return static_cast<int64_t>((state_ = mix(state_)) % limit); }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <typename T>
  const T& of(const std::vector<T>& values) {
    return values[below(static_cast<int64_t>(values.size()))];
  }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i)
      std::swap(values[i - 1], values[below(static_cast<int64_t>(i))]);
  }

 private:
  uint64_t state_;
};

// Ordinary numbers of either sign.
inline void fill(DType type, void* to, int64_t count, uint64_t key) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t drawn = mix(key + i);
    const auto single = static_cast<uint32_t>((drawn & 0x807FFFFFu) | ((118 + (drawn >> 32) % 10) << 23));
    const auto half = static_cast<uint16_t>((drawn & 0x83FFu) | ((8 + (drawn >> 32) % 8) << 10));
    char* place = static_cast<char*>(to) + i * static_cast<int64_t>(size_of(type));
    const auto brain = static_cast<uint16_t>(single >> 16);
    if (type == DType::kF32) std::memcpy(place, &single, 4);
    if (type == DType::kBF16) std::memcpy(place, &brain, 2);
    if (type == DType::kF16) std::memcpy(place, &half, 2);
  }
}

// What apply_updates makes of params and results.
inline void apply(DType type, const char* param, const char* out, char* next, int64_t count) {
  if (type != DType::kF32) {
    std::memcpy(next, out, count * size_of(type));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    float old_value, update;
    std::memcpy(&old_value, param + 4 * i, 4);
    std::memcpy(&update, out + 4 * i, 4);
    old_value += update;
    std::memcpy(next + 4 * i, &old_value, 4);
  }
}

struct LeafPlan {
  DType grad = DType::kF32;
  bool aliased = false;  // the result takes the gradient's buffer
};

struct BucketPlan {
  BucketSpec spec;
  std::vector<LeafPlan> leaves;
  size_t bytes(size_t leaf) const { return spec.leaves[leaf].elements * size_of(spec.rule.param); }
  size_t grad_bytes(size_t leaf) const { return spec.leaves[leaf].elements * size_of(leaves[leaf].grad); }
};

// What becomes of a request.
struct Fate {
  enum Kind { kUpdate, kSkip, kRefuse, kNever } kind = kUpdate;
  size_t updated_first = 0;  // kRefuse: subgroups that are updated all the same
};

enum class Ending { kClean, kClosed, kFailed, kRefused };

struct Plan {
  uint64_t seed = 0;
  int devices = 1, steps = 1, kernel_threads = 1;
  Ending ending = Ending::kClean;
  std::vector<BucketPlan> buckets;
  size_t chunks = 1, chunk_bytes = 0, spare_blocks = 0;
  bool waits = false;      // programs run on the link's own stream, and handlers wait for it
  bool meets = false;      // gradients are summed over the devices: no stream gets on alone
  int on_device = 0;       // of 4 updates, how many are given to the device
  int64_t last_event = 0;  // kClosed: after how many events the driver stops
  jmo::EmulatedOptions emulation;

  Fate fate(int64_t step, int device, size_t bucket) const {
    const uint64_t drawn = mix(seed, step, device, bucket);
    Fate fate;
    if (skips(step)) fate.kind = Fate::kSkip;
    const bool may_refuse = ending == Ending::kClean || ending == Ending::kClosed;
    if (fate.kind == Fate::kUpdate && may_refuse && drawn % 16 == 0) {
      fate.kind = Fate::kRefuse;
      fate.updated_first = drawn / 16 % (buckets[bucket].spec.subgroups.size() + 1);
    }
    if (fate.kind == Fate::kUpdate && ending == Ending::kClosed && drawn % 16 == 1) fate.kind = Fate::kNever;
    return fate;
  }
  bool skips(int64_t step) const { return mix(seed, step, 5) % 16 == 0; }
  bool agrees(int64_t step) const { return mix(seed, step, 6) % 4 == 0; }
  // Whether a leaf's params are replaced from outside before a step.
  bool replaces(int64_t step, int device, size_t bucket, size_t leaf) const {
    return mix(seed, step, device, bucket, leaf, 7) % 32 == 0;
  }
  uint64_t key(int64_t step, int device, size_t bucket, size_t leaf) const {
    return mix(seed, step, device, bucket, leaf, 8);
  }
  // What the driver ends a request with that was given `ticket`.
  static uint32_t ticket_after(const Fate& fate, uint32_t ticket, int64_t step) {
    if (fate.kind == Fate::kSkip) return ticket;
    return fate.kind == Fate::kRefuse ? kPoison : static_cast<uint32_t>(step + 1);
  }
  // The ticket that the ops of a step get: the largest of the last step's.
  uint32_t ticket(int64_t step, int device) const {
    if (step == 0) return 0;
    uint32_t largest = 0;
    for (size_t bucket = 0; bucket < buckets.size(); ++bucket)
      largest =
          std::max(largest, ticket_after(fate(step - 1, device, bucket), ticket(step - 1, device), step - 1));
    return largest;
  }
  std::vector<float> hyper(size_t bucket, int64_t step) const {
    std::vector<float> values = kernel_fixture::hyper_for(buckets[bucket].spec.rule, static_cast<int>(step));
    values.push_back(skips(step) ? 1.0f : 0.0f);
    return values;
  }
  // The order in which a step hands over its buckets, the same on all devices.
  std::vector<size_t> order(int64_t step, bool pull) const {
    std::vector<size_t> order(buckets.size());
    std::iota(order.begin(), order.end(), size_t{0});
    Draw draw(mix(seed, step, pull ? 9 : 10));
    if (!draw.one_in(3)) draw.shuffle(order);
    return order;
  }
};

// ---- drawing a plan

inline int64_t draw_elements(Draw& draw, bool large) {
  switch (draw.below(6)) {
    case 0:
      return draw.between(1, 40);
    case 1:
      return jmo::kCellElements + draw.between(-1, 1);
    case 2:
      return draw.between(1, 30000) * (large ? 10 : 1);
    default:
      return draw.between(1, 6000);
  }
}

// Sections at multiples of 64 bytes, large enough for any subgroup.
inline void lay_out(BucketSpec& spec) {
  int64_t most = 0, cells = 0;
  for (const jmo::SubgroupSpec& subgroup : spec.subgroups) most = std::max(most, subgroup.count);
  cells = most / jmo::kCellElements + 2 * static_cast<int64_t>(spec.leaves.size());
  int64_t at = 0;
  const auto section = [&at](int64_t bytes) { return std::exchange(at, (at + bytes + 63) / 64 * 64); };
  spec.mu_offset = section(spec.rule.has_mu ? most * size_of(spec.rule.mu) : 0);
  spec.nu_offset = section(spec.rule.rule == Rule::kAdam ? most * size_of(spec.rule.nu) : 0);
  const bool guarded = spec.rule.param != DType::kF32;
  spec.master_offset = section(guarded ? most * (spec.rule.param == DType::kF16 ? 4 : 2) : 0);
  spec.cells_offset = section(guarded ? cells * 4 : 0);
  spec.record_bytes = (at + 4095) / 4096 * 4096;
}

inline BucketPlan draw_bucket(Draw& draw, bool large) {
  BucketPlan bucket;
  BucketSpec& spec = bucket.spec;
  spec.rule.rule = draw.one_in(4) ? Rule::kSgd : Rule::kAdam;
  spec.rule.param = draw.of<DType>({DType::kF32, DType::kBF16, DType::kBF16, DType::kF16});
  spec.rule.mu = draw.one_in(5) ? DType::kBF16 : DType::kF32;
  spec.rule.nu = draw.one_in(8) ? DType::kBF16 : DType::kF32;
  spec.rule.has_mu = spec.rule.rule == Rule::kAdam || !draw.one_in(3);
  spec.rule.nesterov = spec.rule.has_mu && draw.one_in(4);
  spec.hyper_count = spec.rule.rule == Rule::kAdam ? int{jmo::kAdamHyperCount} : int{jmo::kSgdHyperCount};
  spec.reads_params = spec.rule.param != DType::kF32;
  int64_t elements = 0;
  for (int64_t left = draw.one_in(6) ? draw.between(20, 60) : draw.between(1, 4); left > 0; --left) {
    const int64_t count = left > 8 ? draw.between(1, 300) : draw_elements(draw, large);
    spec.leaves.push_back({count, spec.rule.rule == Rule::kAdam && draw.one_in(2)});
    elements += count;
    spec.reads_params |= spec.leaves.back().decay;
    LeafPlan leaf;
    leaf.grad = draw.one_in(3) ? draw.of<DType>({DType::kF32, DType::kBF16, DType::kF16}) : spec.rule.param;
    leaf.aliased = leaf.grad == spec.rule.param && !draw.one_in(6);
    bucket.leaves.push_back(leaf);
  }
  const int64_t share = (elements + draw.below(5)) / draw.between(1, std::min<int64_t>(4, elements)) + 1;
  for (int64_t begin = 0; begin < elements; begin += share)
    spec.subgroups.push_back({begin, std::min(share, elements - begin)});
  lay_out(spec);
  return bucket;
}

inline void draw_failure(Draw& draw, Plan& plan) {
  jmo::EmulatedFailure failure;
  failure.later = plan.ending == Ending::kFailed;
  failure.call =
      draw.of<EmulatedCall>({EmulatedCall::kCopyToHost, EmulatedCall::kCopyToDevice, EmulatedCall::kUpdate,
                             EmulatedCall::kRecord, EmulatedCall::kAny, EmulatedCall::kAny});
  if (failure.later && draw.one_in(6)) failure.call = EmulatedCall::kWaitOnHost;
  failure.device = static_cast<int>(draw.below(plan.devices));
  for (int64_t left = failure.later ? 1 : draw.between(1, 4); left > 0; --left) {
    failure.nth = draw.below(draw.of<int64_t>({4, 20, 100}));
    plan.emulation.failures.push_back(failure);
  }
}

inline Plan draw_plan(uint64_t seed) {
  Draw draw(seed);
  Plan plan;
  plan.seed = seed;
  const bool large = seed % 50 == 49;
  plan.devices = static_cast<int>(draw.between(1, 4));
  plan.steps = static_cast<int>(draw.between(1, 4));
  plan.kernel_threads = static_cast<int>(draw.between(1, 3));
  plan.ending = draw.of<Ending>({Ending::kClean, Ending::kClean, Ending::kClean, Ending::kClean,
                                 Ending::kClosed, Ending::kFailed, Ending::kFailed, Ending::kRefused});
  for (int64_t left = draw.between(1, 8); left > 0; --left) plan.buckets.push_back(draw_bucket(draw, large));
  plan.chunks = draw.of<size_t>({1, 1, 2, 2, 3, 5});
  plan.chunk_bytes = draw.of<size_t>({33000, 33000, 40000, 90000});
  plan.spare_blocks = draw.below(3);
  plan.waits = draw.one_in(4);
  plan.meets = plan.ending == Ending::kClean && draw.one_in(3);
  plan.on_device = draw.of<int>({0, 0, 2, 4});
  plan.last_event = draw.below(60);
  plan.emulation.devices = plan.devices;
  plan.emulation.seed = seed;
  plan.emulation.longest_delay_us = draw.of<int>({0, 50, 200, 200, 1500});
  if (plan.ending == Ending::kFailed || plan.ending == Ending::kRefused) draw_failure(draw, plan);
  // the records are pinned first, then what the links need
  if (draw.one_in(8))
    plan.emulation.failures.push_back({EmulatedCall::kPin, 0, 1 + draw.below(2 * plan.devices), false});
  return plan;
}

// Where the streams of all devices wait for each other.
class Meeting {
 public:
  explicit Meeting(int parties) : parties_(parties) {}
  void meet(uint64_t which) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (++there_[which] == parties_) all_there_.notify_all();
    all_there_.wait(lock, [&] { return there_[which] == parties_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_there_;
  const int parties_;
  std::map<uint64_t, int> there_;
};

// ---- what must come out

// One device's params and records, updated leaf by leaf by the host's kernel.
class Reference {
 public:
  Reference(const Plan& plan, int device) : plan_(plan), device_(device) {
    for (size_t bucket = 0; bucket < plan.buckets.size(); ++bucket) {
      const BucketPlan& what = plan.buckets[bucket];
      params_.emplace_back();
      for (size_t leaf = 0; leaf < what.leaves.size(); ++leaf) {
        params_.back().emplace_back(what.bytes(leaf));
        fill(what.spec.rule.param, params_.back().back().data(), what.spec.leaves[leaf].elements,
             plan.key(-1, device, bucket, leaf));
      }
      records_.emplace_back(what.spec.subgroups.size(), std::vector<char>(what.spec.record_bytes));
    }
  }

  // The results of one bucket, leaf after leaf. A request that failed midway leaves no record to compare.
  std::vector<std::vector<char>> step(int64_t step, size_t bucket, bool failed) {
    const BucketPlan& what = plan_.buckets[bucket];
    const Fate fate = plan_.fate(step, device_, bucket);
    std::vector<std::vector<char>> outs;
    for (size_t leaf = 0; leaf < what.leaves.size(); ++leaf) {
      replace(step, bucket, leaf);
      outs.emplace_back(what.bytes(leaf));
    }
    size_t updates = what.spec.subgroups.size();
    if (fate.kind == Fate::kSkip || failed) updates = 0;
    if (fate.kind == Fate::kRefuse) updates = std::min(updates, fate.updated_first);
    for (size_t subgroup = 0; subgroup < updates; ++subgroup) update(step, bucket, subgroup, outs);
    const bool handed_back = fate.kind != Fate::kUpdate || failed;
    for (size_t leaf = 0; leaf < what.leaves.size(); ++leaf) {
      std::vector<char>& param = params_[bucket][leaf];
      if (handed_back)
        outs[leaf] = what.spec.rule.param == DType::kF32 ? std::vector<char>(param.size()) : param;
      apply(what.spec.rule.param, param.data(), outs[leaf].data(), param.data(),
            what.spec.leaves[leaf].elements);
    }
    return outs;
  }

  const std::vector<char>& param(size_t bucket, size_t leaf) const { return params_[bucket][leaf]; }
  const std::vector<char>& record(size_t bucket, size_t subgroup) const { return records_[bucket][subgroup]; }
  // Of the subgroup's last update.
  std::vector<int64_t> adopted(int64_t step, size_t bucket, size_t subgroup) const {
    const auto found = adopted_.find({step, bucket, subgroup});
    return found == adopted_.end() ? std::vector<int64_t>() : found->second;
  }

 private:
  void replace(int64_t step, size_t bucket, size_t leaf) {
    std::vector<char>& param = params_[bucket][leaf];
    if (plan_.replaces(step, device_, bucket, leaf)) param[param.size() / 2] ^= 0x11;
  }

  void update(int64_t step, size_t bucket, size_t subgroup, std::vector<std::vector<char>>& outs) {
    const BucketSpec& spec = plan_.buckets[bucket].spec;
    const std::vector<float> hyper = plan_.hyper(bucket, step);
    std::vector<char>& record = records_[bucket][subgroup];
    const int64_t begin = spec.subgroups[subgroup].begin, end = begin + spec.subgroups[subgroup].count;
    const int64_t param_size = size_of(spec.rule.param), master_size = spec.rule.param == DType::kF16 ? 4 : 2;
    int64_t first = 0, cells = 0;  // of the leaf in the bucket; of the segment in the record
    for (size_t leaf = 0; leaf < spec.leaves.size(); first += spec.leaves[leaf++].elements) {
      const int64_t from = std::max(begin, first), to = std::min(end, first + spec.leaves[leaf].elements);
      if (from >= to) continue;
      const DType grad_type = plan_.buckets[bucket].leaves[leaf].grad;
      std::vector<char> grad(plan_.buckets[bucket].grad_bytes(leaf));
      fill(grad_type, grad.data(), spec.leaves[leaf].elements, plan_.key(step, device_, bucket, leaf));
      Segment segment;
      segment.grad = grad.data() + (from - first) * static_cast<int64_t>(size_of(grad_type));
      segment.grad_type = grad_type;
      if (spec.reads_params) segment.param = params_[bucket][leaf].data() + (from - first) * param_size;
      segment.out = outs[leaf].data() + (from - first) * param_size;
      const auto at = [&](int64_t offset, int64_t size) {
        return record.data() + offset + (from - begin) * size;
      };
      if (spec.rule.has_mu) segment.mu = at(spec.mu_offset, size_of(spec.rule.mu));
      if (spec.rule.rule == Rule::kAdam) segment.nu = at(spec.nu_offset, size_of(spec.rule.nu));
      if (spec.rule.param != DType::kF32) {
        segment.master = at(spec.master_offset, master_size);
        segment.cells = reinterpret_cast<uint32_t*>(record.data() + spec.cells_offset) + cells;
      }
      segment.count = to - from;
      segment.decay = spec.leaves[leaf].decay;
      cells += jmo::cells_of(segment.count);
      if (jmo::update_run(spec.rule, hyper.data(), segment, 0, segment.count, step == 0) != 0)
        adopted_[{step, bucket, subgroup}].push_back(static_cast<int64_t>(leaf));
    }
  }

  const Plan& plan_;
  const int device_;
  std::vector<std::vector<std::vector<char>>> params_,
      records_;  // of a bucket's leaf, of a bucket's subgroup
  std::map<std::tuple<int64_t, size_t, size_t>, std::vector<int64_t>> adopted_;
};

}  // namespace device_fixture
