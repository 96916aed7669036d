// A program of XLA's on an emulated device: what a jitted step does with the ops of a bucket, over and over.
//
// 1. Per bucket: compute gradients, push; then, per bucket: pull, use the results, overwrite and release all
//    that is dead. Only the pulls wait.
// 2. Memory comes from a pool that is reused in the order of the stream, and holds 0xFF while it is free.
//
// What always holds: a check that fails names the seed. Thread contract: a program is its thread's until
// that has been joined; programs meet in the engine, the links and the runtime only, but for what says so.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/engine.h"
#include "ffi/core/slots.h"
#include "ffi/device/link.h"
#include "ffi/tests/check.h"
#include "ffi/tests/device_fixture.h"

namespace device_fixture {

using jmo::DeviceLink;
using jmo::DeviceRuntime;
using jmo::EmulatedRuntime;
using jmo::Engine;
using jmo::Status;

constexpr int64_t kFirstOrdinal = 100;  // the engine's names of devices are not the runtime's

// Checks that say which seed.
inline std::atomic<uint64_t> seed_in_work{0};
[[noreturn]] inline void fail_seed(const char* file, int line, const std::string& what) {
  jmo_test::fail(file, line, "seed " + std::to_string(seed_in_work.load()) + ": " + what);
}
inline void succeeds(const char* file, int line, const char* what, const Status& status) {
  if (!status.ok()) fail_seed(file, line, std::string(what) + ": " + status.message());
}
#define HOLDS(cond)                                                      \
  do {                                                                   \
    if (!(cond)) ::device_fixture::fail_seed(__FILE__, __LINE__, #cond); \
  } while (0)
#define SUCCEEDS(status) ::device_fixture::succeeds(__FILE__, __LINE__, #status, status)

// A device's memory as XLA's allocator deals it out: what is released is taken again at once, in the
// stream's order.
class Pool {
 public:
  explicit Pool(size_t bytes) : memory_(bytes, '\xFF') { free_[0] = bytes; }
  char* take(size_t bytes) {
    const size_t size = rounded(bytes);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [at, room] = *it;
      if (room < size) continue;
      free_.erase(it);
      if (room > size) free_[at + size] = room - size;
      return memory_.data() + at;
    }
    fail_seed(__FILE__, __LINE__, "the pool is too small");
  }
  void give(const void* memory, size_t bytes) {
    size_t at = static_cast<const char*>(memory) - memory_.data(), size = rounded(bytes);
    const auto next = free_.lower_bound(at);
    if (next != free_.end() && next->first == at + size) {
      size += next->second;
      free_.erase(next);
    }
    const auto after = free_.lower_bound(at);
    if (after != free_.begin() && std::prev(after)->first + std::prev(after)->second == at) {
      std::prev(after)->second += size;
    } else {
      free_[at] = size;
    }
  }
  // Whether nobody has written to free memory.
  bool untouched() const {
    for (const auto& [at, size] : free_)
      for (size_t i = at; i < at + size; ++i)
        if (memory_[i] != '\xFF') return false;
    return true;
  }
  static size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

 private:
  std::vector<char> memory_;
  std::map<size_t, size_t> free_;  // begin: bytes
};

// What one seed sets up. Destroyed in the reverse order: the engine with its links before the runtime.
struct World {
  explicit World(const Plan& given) : plan(given), runtime(plan.emulation), meeting(plan.devices) {
    pin_records();
    engine = std::make_unique<Engine>(plan.kernel_threads);
    for (size_t bucket = 0; bucket < plan.buckets.size(); ++bucket)
      SUCCEEDS(engine->add_bucket(0, static_cast<int64_t>(bucket), plan.buckets[bucket].spec));
    for (int device = 0; device < plan.devices; ++device) {
      jmo::LinkOptions options;
      options.ordinal = kFirstOrdinal + device;
      options.copier.device = device;
      options.copier.chunks = plan.chunks;
      options.copier.chunk_bytes = plan.chunk_bytes;
      options.blocks = plan.buckets.size() + 2 + plan.spare_blocks;  // a step's agreement may be late
      links.push_back(std::make_shared<DeviceLink>(*engine, runtime, options));
      SUCCEEDS(links.back()->status());
      engine->add_device(options.ordinal, links.back());
    }
  }
  ~World() {
    HOLDS(engine == nullptr);
    runtime.unpin(records->slot(0));
    const EmulatedRuntime::InUse left = runtime.in_use();
    HOLDS(left.pins == 0 && left.events == 0 && left.streams == 0);
  }
  // As a store is closed: what programs have given to their streams may not have been done yet.
  void close() {
    engine->close();
    links.clear();
    engine.reset();
  }
  char* record(int device, size_t bucket, size_t subgroup) const {
    return record_bytes == 0 ? nullptr
                             : records->slot(0) + first_record[device][bucket] +
                                   subgroup * plan.buckets[bucket].spec.record_bytes;
  }

  const Plan& plan;
  EmulatedRuntime runtime;
  Meeting meeting;
  std::unique_ptr<jmo::Slots> records;
  size_t record_bytes = 0;
  std::vector<std::vector<size_t>> first_record;
  std::unique_ptr<Engine> engine;
  std::vector<std::shared_ptr<DeviceLink>> links;
  // By the driver, before it ends the request; by the program after the pull.
  std::atomic<bool> broken[4] = {};

 private:
  void pin_records() {
    for (int device = 0; device < plan.devices; ++device) {
      first_record.emplace_back();
      for (const BucketPlan& bucket : plan.buckets) {
        first_record.back().push_back(record_bytes);
        record_bytes += bucket.spec.subgroups.size() * bucket.spec.record_bytes;
      }
    }
    records = std::make_unique<jmo::Slots>(1, std::max<size_t>(record_bytes, 4096), 1);
    SUCCEEDS(records->status());
    SUCCEEDS(runtime.pin(records->slot(0), records->slot_size()));
  }
};

// One device's share of the user's jitted step, over and over.
class Program {
 public:
  Program(World& world, int device)
      : world_(world), plan_(world.plan), device_(device), pool_(pool_bytes(plan_)) {
    link_ = world.links[device].get();
    if (plan_.waits) {
      stream_ = link_->own_stream();
    } else {
      SUCCEEDS(world.runtime.make_stream(device, &stream_));
    }
    for (size_t bucket = 0; bucket < plan_.buckets.size(); ++bucket) {
      params_.emplace_back();
      for (size_t leaf = 0; leaf < plan_.buckets[bucket].leaves.size(); ++leaf)
        params_.back().push_back(pool_.take(plan_.buckets[bucket].bytes(leaf)));
    }
    results_.resize(plan_.steps);
    for (auto& step : results_) step.resize(plan_.buckets.size());
  }

  ~Program() {
    if (stream_ != nullptr) world_.runtime.free_stream(device_, stream_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // On a thread of its own: until the end, or what failed.
  void run() {
    begin();
    for (step_ = 0; step_ < plan_.steps && !over(); ++step_) step();
    if (!failure_.ok()) return;
    take(world_.runtime.synchronize(device_, stream_));
  }

  // -- after it has ended

  const Status& failure() const { return failure_; }
  bool device_failed() const { return device_failed_; }  // whatever the program was told first
  bool has_result(int64_t step, size_t bucket) const { return !results_[step][bucket].outs.empty(); }
  const std::vector<std::vector<char>>& result(int64_t step, size_t bucket) const {
    return results_[step][bucket].outs;
  }
  const char* param(size_t bucket, size_t leaf) const { return params_[bucket][leaf]; }
  int64_t agreed() const { return agreed_; }
  // All that the stream holds is done, whatever failed. The link's own stream has been drained with the link.
  void drain() {
    if (!plan_.waits) device_failed_ = !world_.runtime.synchronize(device_, stream_).ok();
    if (plan_.waits) stream_ = nullptr;
  }
  bool free_memory_untouched() const { return pool_.untouched(); }

 private:
  struct Result {
    std::vector<std::vector<char>> outs;
  };
  struct Op {
    std::vector<jmo::LeafBuffers> leaves;
    std::vector<char*> grads;
    bool live = false;  // its buffers have not been released
  };

  static size_t pool_bytes(const Plan& plan) {
    size_t bytes = 65536;
    for (const BucketPlan& bucket : plan.buckets)
      for (size_t leaf = 0; leaf < bucket.leaves.size(); ++leaf)
        bytes += 3 * Pool::rounded(bucket.bytes(leaf)) + Pool::rounded(bucket.grad_bytes(leaf));
    return bytes * 2;
  }

  bool over() const { return !failure_.ok() || lost_ || world_.broken[device_]; }
  bool take(const Status& status) {
    if (failure_.ok()) failure_ = status;
    return status.ok();
  }
  // Where handlers wait, all that is the program's own is done at once, on its thread.
  void enqueue(std::function<void()> work) {
    if (plan_.waits) return work();
    take(world_.runtime.run(device_, stream_, std::move(work)));
  }
  char* take_memory(size_t bytes) { return pool_.take(bytes); }
  void release(void* memory, size_t bytes) {
    enqueue([memory, bytes] { std::memset(memory, 0xFF, bytes); });
    pool_.give(memory, bytes);
  }

  void begin() {
    for (size_t bucket = 0; bucket < params_.size(); ++bucket)
      for (size_t leaf = 0; leaf < params_[bucket].size(); ++leaf)
        enqueue([type = plan_.buckets[bucket].spec.rule.param, to = params_[bucket][leaf],
                 count = plan_.buckets[bucket].spec.leaves[leaf].elements,
                 key = plan_.key(-1, device_, bucket, leaf)] { fill(type, to, count, key); });
    ticket_ = reinterpret_cast<uint32_t*>(take_memory(4));
    enqueue([to = ticket_] { *to = 0; });
  }

  void step() {
    std::vector<Op> ops(plan_.buckets.size());
    for (const size_t bucket : plan_.order(step_, false)) {
      if (failure_.ok()) push(bucket, ops[bucket]);
    }
    if (failure_.ok() && plan_.agrees(step_)) agree();
    std::vector<uint32_t*> tickets;
    for (const size_t bucket : plan_.order(step_, true)) {
      if (failure_.ok()) pull(bucket, ops[bucket], tickets);
    }
    if (!failure_.ok()) return give_up(ops);
    auto* next = reinterpret_cast<uint32_t*>(take_memory(4));
    enqueue([next, tickets] {
      *next = 0;
      for (const uint32_t* ticket : tickets) *next = std::max(*next, *ticket);
    });
    for (uint32_t* ticket : tickets) release(ticket, 4);
    release(std::exchange(ticket_, next), 4);
  }

  // What a handler does before it tells XLA of an error, and XLA then: all buffers of the run go.
  void give_up(std::vector<Op>& ops) {
    HOLDS(link_->settle_run(step_ + 1, 60));
    if (plan_.waits && plan_.ending == Ending::kRefused) return;  // the link's stream may still be at them
    for (size_t bucket = 0; bucket < ops.size(); ++bucket)
      for (size_t leaf = 0; ops[bucket].live && leaf < ops[bucket].grads.size(); ++leaf)
        release_operands(bucket, leaf, ops[bucket]);
  }

  // Gradients come out of a kernel that runs some time; the stream of another device may have to be waited
  // for.
  void compute_gradients(size_t bucket, Op& op) {
    const BucketPlan& what = plan_.buckets[bucket];
    op.live = true;
    for (size_t leaf = 0; leaf < what.leaves.size(); ++leaf) {
      char* grad = take_memory(what.grad_bytes(leaf));
      char* param = params_[bucket][leaf];
      if (plan_.replaces(step_, device_, bucket, leaf))
        enqueue([byte = param + what.bytes(leaf) / 2] { *byte ^= 0x11; });
      enqueue([type = what.leaves[leaf].grad, grad, count = what.spec.leaves[leaf].elements,
               key = plan_.key(step_, device_, bucket, leaf)] { fill(type, grad, count, key); });
      op.grads.push_back(grad);
      jmo::LeafBuffers buffers;
      buffers.grad = grad;
      buffers.grad_type = what.leaves[leaf].grad;
      buffers.param = what.spec.reads_params || what.spec.rule.param != DType::kF32 ? param : nullptr;
      buffers.out = what.leaves[leaf].aliased ? grad : take_memory(what.bytes(leaf));
      op.leaves.push_back(buffers);
    }
    if (plan_.meets) enqueue([this, which = mix(step_, bucket)] { world_.meeting.meet(which); });
  }

  void push(size_t bucket, Op& op) {
    compute_gradients(bucket, op);
    const std::vector<float> values = plan_.hyper(bucket, step_);
    const size_t bytes = values.size() * sizeof(float);
    auto* hyper = reinterpret_cast<float*>(take_memory(bytes));
    enqueue([hyper, values, bytes] { std::memcpy(hyper, values.data(), bytes); });
    jmo::Request request;
    request.bucket = static_cast<int64_t>(bucket);
    request.device = kFirstOrdinal + device_;
    request.run_id = step_ + 1;
    request.leaves = op.leaves;
    take(link_->push(std::move(request), ticket_, hyper, static_cast<int>(values.size()), stream_,
                     plan_.waits));
    release(hyper, bytes);
  }

  void pull(size_t bucket, Op& op, std::vector<uint32_t*>& tickets) {
    Status status;
    const auto pushed = link_->find(0, static_cast<int64_t>(bucket), step_ + 1, op.leaves, &status);
    if (pushed == nullptr) fail_seed(__FILE__, __LINE__, status.message());
    if (mix(plan_.seed, step_, bucket, 11) % 3 == 0) {
      std::promise<void> ended;
      link_->when_ended(pushed, [&ended] { ended.set_value(); });
      ended.get_future().wait();
    } else {
      link_->wait(pushed);
    }
    tickets.push_back(reinterpret_cast<uint32_t*>(take_memory(4)));
    const Fate fate = plan_.fate(step_, device_, bucket);
    lost_ |= pushed->ticket != Plan::ticket_after(fate, plan_.ticket(step_, device_), step_);
    if (take(link_->finish(pushed, plan_.buckets[bucket].spec, tickets.back(), stream_, plan_.waits)))
      use_results(bucket, op);
  }

  void use_results(size_t bucket, Op& op) {
    op.live = false;
    const BucketPlan& what = plan_.buckets[bucket];
    std::vector<std::vector<char>>& outs = results_[step_][bucket].outs;
    for (size_t leaf = 0; leaf < what.leaves.size(); ++leaf) outs.emplace_back(what.bytes(leaf));
    for (size_t leaf = 0; leaf < what.leaves.size(); ++leaf) {
      auto* out = static_cast<char*>(op.leaves[leaf].out);
      char* next = take_memory(what.bytes(leaf));
      enqueue([type = what.spec.rule.param, param = params_[bucket][leaf], out, next, seen = &outs[leaf],
               count = what.spec.leaves[leaf].elements] {
        std::memcpy(seen->data(), out, seen->size());
        apply(type, param, out, next, count);
      });
      release(std::exchange(params_[bucket][leaf], next), what.bytes(leaf));
      release_operands(bucket, leaf, op);
    }
  }

  // Whatever came of the op, nobody may use them any more.
  void release_operands(size_t bucket, size_t leaf, const Op& op) {
    const BucketPlan& what = plan_.buckets[bucket];
    release(op.grads[leaf], what.grad_bytes(leaf));
    if (!what.leaves[leaf].aliased) release(op.leaves[leaf].out, what.bytes(leaf));
  }

  void agree() {
    auto* numbers = reinterpret_cast<uint32_t*>(take_memory(8));
    enqueue([numbers, step = step_] {
      numbers[0] = static_cast<uint32_t>(step);
      numbers[1] = static_cast<uint32_t>(step + 1000);
    });
    if (!take(link_->agree(0, numbers, numbers + 1, stream_, plan_.waits))) return;
    release(numbers, 8);
    ++agreed_;
  }

  World& world_;
  const Plan& plan_;
  const int device_;
  Pool pool_;
  DeviceLink* link_ = nullptr;
  DeviceRuntime::Stream stream_ = nullptr;
  std::vector<std::vector<char*>> params_;
  std::vector<std::vector<Result>> results_;
  uint32_t* ticket_ = nullptr;
  int64_t step_ = 0, agreed_ = 0;
  bool lost_ = false;  // an op was, by its ticket: the next step would only be told so
  bool device_failed_ = false;
  Status failure_;
};

}  // namespace device_fixture
