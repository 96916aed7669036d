// A device's link and the engine in random worlds: programs on emulated devices hand over gradients that are not there
// yet and reuse every buffer the moment they may, a small driver updates, refuses, forgets and closes, devices fail.
// Results, params and records must be those of the host's kernel, bit for bit, and everything must end.
//
//   device_link_test [first seed [seeds]]
//
// 1. A program (one thread a device) is what XLA does with an optimizer's step: per bucket, compute gradients, push;
//    then per bucket, pull, use the results, overwrite and release all that is dead. Memory comes from a pool that is
//    reused in the order of the stream, and is overwritten with 0xFF while it is free.
// 2. The driver ends each request as the plan says.
// 3. The reference takes the same steps one after the other.
//
// What always holds: a seed that fails or hangs is named. Thread contract: the test's own threads meet in the engine,
// the link and the runtime only, but for what says so.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/core/engine.h"
#include "ffi/core/slots.h"
#include "ffi/device/link.h"
#include "ffi/tests/check.h"
#include "ffi/tests/device_fixture.h"

namespace {

using namespace device_fixture;
using jmo::DeviceLink;
using jmo::DeviceRuntime;
using jmo::EmulatedRuntime;
using jmo::Engine;
using jmo::Status;

constexpr int64_t kFirstOrdinal = 100;  // the engine's names of devices are not the runtime's

// Checks that say which seed.
std::atomic<uint64_t> seed_in_work{0};
[[noreturn]] void fail_seed(int line, const std::string& what) {
  jmo_test::fail(__FILE__, line, "seed " + std::to_string(seed_in_work.load()) + ": " + what);
}
#define HOLDS(cond)                                   \
  do {                                                \
    if (!(cond)) fail_seed(__LINE__, #cond);          \
  } while (0)
#define SUCCEEDS(status)                                                            \
  do {                                                                              \
    const Status status_ = (status);                                                \
    if (!status_.ok()) fail_seed(__LINE__, #status ": " + status_.message());       \
  } while (0)

// Ends the process if one seed takes too long.
class Watchdog {
 public:
  explicit Watchdog(double limit_s) : thread_([this, limit_s] { watch(limit_s); }) {}
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  void begins(uint64_t seed) {
    std::lock_guard<std::mutex> lock(mutex_);
    seed_in_work = seed;
    since_ = std::chrono::steady_clock::now();
  }

 private:
  void watch(double limit_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!over_) {
      changed_.wait_for(lock, std::chrono::milliseconds(200));
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - since_;
      if (taken.count() > limit_s) fail_seed(__LINE__, "it hangs");
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  bool over_ = false;
  std::thread thread_;
};

// A device's memory as XLA's allocator deals it out: what is released is taken again at once, in the stream's order.
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
    fail_seed(__LINE__, "the pool is too small");
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
      options.blocks = plan.buckets.size() + 1 + plan.spare_blocks;
      links.push_back(std::make_shared<DeviceLink>(*engine, runtime, options));
      SUCCEEDS(links.back()->status());
      engine->add_device(options.ordinal, links.back());
    }
  }
  ~World() {
    engine->close();
    links.clear();
    engine.reset();
    runtime.unpin(records->slot(0));
    const EmulatedRuntime::InUse left = runtime.in_use();
    HOLDS(left.pins == 0 && left.events == 0 && left.streams <= static_cast<size_t>(plan.devices));
  }
  char* record(int device, size_t bucket, size_t subgroup) const {
    return record_bytes == 0 ? nullptr : records->slot(0) + first_record[device][bucket] +
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
  Program(World& world, int device) : world_(world), plan_(world.plan), device_(device), pool_(pool_bytes(plan_)) {
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

  // On a thread of its own: until the end, or what failed.
  void run() {
    begin();
    for (step_ = 0; step_ < plan_.steps && !over(); ++step_) step();
    if (!failure_.ok()) return;
    take(world_.runtime.synchronize(device_, stream_));
  }

  // -- after it has ended

  const Status& failure() const { return failure_; }
  bool has_result(int64_t step, size_t bucket) const { return !results_[step][bucket].outs.empty(); }
  const std::vector<std::vector<char>>& result(int64_t step, size_t bucket) const {
    return results_[step][bucket].outs;
  }
  const char* param(size_t bucket, size_t leaf) const { return params_[bucket][leaf]; }
  int64_t agreed() const { return agreed_; }
  // All that the stream holds is done, whatever failed.
  void drain() { (void)world_.runtime.synchronize(device_, stream_); }
  bool free_memory_untouched() const { return pool_.untouched(); }

 private:
  struct Result {
    std::vector<std::vector<char>> outs;
  };
  struct Op {
    std::vector<jmo::LeafBuffers> leaves;
    std::vector<char*> grads;
  };

  static size_t pool_bytes(const Plan& plan) {
    size_t bytes = 65536;
    for (const BucketPlan& bucket : plan.buckets)
      for (size_t leaf = 0; leaf < bucket.leaves.size(); ++leaf)
        bytes += 3 * Pool::rounded(bucket.bytes(leaf)) + Pool::rounded(bucket.grad_bytes(leaf));
    return bytes * 2;
  }

  bool over() const { return !failure_.ok() || world_.broken[device_]; }
  bool take(const Status& status) {
    if (failure_.ok()) failure_ = status;
    return status.ok();
  }
  void enqueue(std::function<void()> work) { take(world_.runtime.run(device_, stream_, std::move(work))); }
  char* take_memory(size_t bytes) { return pool_.take(bytes); }
  void release(void* memory, size_t bytes) {
    take(world_.runtime.poison(device_, stream_, memory, bytes));
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
    if (!failure_.ok()) return;
    auto* next = reinterpret_cast<uint32_t*>(take_memory(4));
    enqueue([next, tickets] {
      *next = 0;
      for (const uint32_t* ticket : tickets) *next = std::max(*next, *ticket);
    });
    for (uint32_t* ticket : tickets) release(ticket, 4);
    release(std::exchange(ticket_, next), 4);
  }

  // Gradients come out of a kernel that runs some time; the stream of another device may have to be waited for.
  void compute_gradients(size_t bucket, Op& op) {
    const BucketPlan& what = plan_.buckets[bucket];
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
    take(link_->push(std::move(request), ticket_, hyper, static_cast<int>(values.size()), stream_, plan_.waits));
    release(hyper, bytes);
  }

  void pull(size_t bucket, Op& op, std::vector<uint32_t*>& tickets) {
    Status status;
    const auto pushed = link_->find(0, static_cast<int64_t>(bucket), step_ + 1, op.leaves, &status);
    if (pushed == nullptr) fail_seed(__LINE__, status.message());
    if (mix(plan_.seed, step_, bucket, 11) % 3 == 0) {
      std::promise<void> ended;
      link_->when_ended(pushed, [&ended] { ended.set_value(); });
      ended.get_future().wait();
    } else {
      link_->wait(pushed);
    }
    tickets.push_back(reinterpret_cast<uint32_t*>(take_memory(4)));
    if (!take(link_->finish(pushed, plan_.buckets[bucket].spec, tickets.back(), stream_, plan_.waits))) return;
    use_results(bucket, op);
  }

  void use_results(size_t bucket, Op& op) {
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
      release(op.grads[leaf], what.grad_bytes(leaf));
      if (!what.leaves[leaf].aliased) release(out, what.bytes(leaf));
    }
  }

  void agree() {
    auto* numbers = reinterpret_cast<uint32_t*>(take_memory(12));
    enqueue([numbers, step = step_] {
      numbers[0] = static_cast<uint32_t>(step);
      numbers[1] = static_cast<uint32_t>(step + 1000);
    });
    take(link_->agree(0, numbers, numbers + 1, numbers + 2, stream_, plan_.waits));
    enqueue([numbers] { HOLDS(numbers[2] == numbers[1]); });
    release(numbers, 12);
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
  Status failure_;
};
