// A device's link and the engine in random worlds: programs on emulated devices hand over gradients that are
// not there yet and reuse every buffer the moment they may; a small driver updates, refuses, forgets and
// closes; devices fail. Results, params and records must be those of the host's kernel, bit for bit, and
// everything must end.
//
// device_link_test [first seed [seeds]]
//
// What always holds: a seed that fails or hangs is named, and can be run alone. Thread contract: the driver
// and each program have a thread of their own, and meet in the engine, the links and the runtime only, but
// for what says so.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/core/engine.h"
#include "ffi/device/link.h"
#include "ffi/tests/device_fixture.h"
#include "ffi/tests/device_program.h"

namespace {

using namespace device_fixture;

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
      if (taken.count() > limit_s) fail_seed(__FILE__, __LINE__, "it hangs");
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  bool over_ = false;
  std::thread thread_;
};

// What the optimizer's driver does with the events of an engine, as the plan says.
class Driver {
 public:
  explicit Driver(World& world) : world_(world), plan_(world.plan), draw_(mix(world.plan.seed, 12)) {}

  // On a thread of its own, until stop(), or, where the plan says so, earlier.
  void run() {
    const bool leaves = plan_.ending == Ending::kClosed;  // at some event, or once nothing moves
    while (!stopped_) {
      const std::vector<jmo::Event> events = world_.engine->wait(0.05, 1 + draw_.below(8));
      if (leaves && events.empty()) return;
      for (const jmo::Event& event : events) {
        take(event);
        if (leaves && ++events_ >= plan_.last_event) return;
      }
      issue();
    }
  }
  void stop() {
    stopped_ = true;
    world_.engine->wake();
  }

  // -- after it has ended

  // What nobody waited for, once the engine has been closed.
  void take_rest() {
    for (const jmo::Event& event : world_.engine->wait(0, SIZE_MAX))
      if (event.kind == jmo::EventKind::kAgreed || event.kind == jmo::EventKind::kLost) take(event);
  }
  bool failed(int64_t step, int device, size_t bucket) const {
    return failed_.count({step, device, bucket}) != 0;
  }
  int64_t agreed(int device) const { return agreed_[device]; }
  // The updates that succeeded, and in which leaves params had been replaced.
  struct Updated {
    int64_t step;
    int device;
    size_t bucket, subgroup;
    std::vector<int64_t> adopted;
  };
  const std::vector<Updated>& updated() const { return updated_; }

 private:
  struct Open {
    uint64_t request;
    int64_t step;
    int device;
    size_t bucket;
    uint32_t ticket;
    Fate fate;
    std::vector<int64_t> to_update;
    size_t under_way = 0;
    std::string failure;
  };

  void take(const jmo::Event& event) {
    switch (event.kind) {
      case jmo::EventKind::kArrived:
        return arrived(event);
      case jmo::EventKind::kUpdated:
        return updated(event);
      case jmo::EventKind::kHandedBack:
        return complete(event.token);
      case jmo::EventKind::kAgreed:
        HOLDS(event.ticket == event.token + 1000);
        ++agreed_[event.device - kFirstOrdinal];
        return;
      case jmo::EventKind::kLost:
        HOLDS(plan_.ending == Ending::kFailed || plan_.ending == Ending::kRefused);
        failed_.insert({event.run_id - 1, static_cast<int>(event.device - kFirstOrdinal), event.bucket});
        return;
      default:
        return;
    }
  }

  void arrived(const jmo::Event& event) {
    Open open;
    open.request = event.token;
    open.step = event.run_id - 1;
    open.device = static_cast<int>(event.device - kFirstOrdinal);
    open.bucket = event.bucket;
    open.ticket = event.ticket;
    open.fate = plan_.fate(open.step, open.device, open.bucket);
    HOLDS(event.ticket == plan_.ticket(open.step, open.device));
    HOLDS(event.skip == (open.fate.kind == Fate::kSkip));
    if (open.fate.kind == Fate::kUpdate || open.fate.kind == Fate::kRefuse) {
      open.to_update.resize(plan_.buckets[open.bucket].spec.subgroups.size());
      std::iota(open.to_update.begin(), open.to_update.end(), 0);
      if (open.fate.kind == Fate::kRefuse) open.to_update.resize(open.fate.updated_first);
      draw_.shuffle(open.to_update);
    }
    Open& kept = open_[event.token] = std::move(open);
    if (kept.to_update.empty() && kept.fate.kind != Fate::kNever) end(kept);
  }

  // Gives the engine some of the updates that may run, in any order.
  void issue() {
    std::vector<Open*> ready;
    for (auto& entry : open_)
      if (!entry.second.to_update.empty()) ready.push_back(&entry.second);
    draw_.shuffle(ready);
    for (Open* open : ready) {
      for (int64_t left = draw_.between(1, 4); left > 0 && !open->to_update.empty(); --left) {
        const int64_t subgroup = open->to_update.back();
        open->to_update.pop_back();
        ++open->under_way;
        world_.links[open->device]->set_on_device(draw_.below(4) < plan_.on_device);
        updates_[++tokens_] = {open->request, subgroup};
        SUCCEEDS(world_.engine->update(open->request, subgroup,
                                       world_.record(open->device, open->bucket, subgroup), open->step == 0,
                                       tokens_));
      }
    }
  }

  void updated(const jmo::Event& event) {
    const auto [request, subgroup] = updates_.at(event.token);
    updates_.erase(event.token);
    Open& open = open_.at(request);
    if (!event.status.ok()) {
      HOLDS(plan_.ending == Ending::kFailed || plan_.ending == Ending::kRefused);
      open.failure = event.status.message();
      open.to_update.clear();
    } else {
      updated_.push_back(
          {open.step, open.device, open.bucket, static_cast<size_t>(subgroup), event.adopted_leaves});
    }
    if (--open.under_way == 0 && open.to_update.empty()) end(open);
  }

  // All of its updates have ended.
  void end(Open& open) {
    if (!open.failure.empty()) {
      failed_.insert({open.step, open.device, open.bucket});
      world_.broken[open.device] = true;
      if (draw_.one_in(2)) {
        const uint64_t request = open.request;
        SUCCEEDS(world_.engine->fail(request, open.failure));
        open_.erase(request);
        return;
      }
    }
    if (open.failure.empty() && open.fate.kind == Fate::kUpdate) return complete(open.request);
    SUCCEEDS(world_.engine->hand_back(open.request));
  }

  void complete(uint64_t request) {
    const Open& open = open_.at(request);
    const uint32_t ticket =
        open.failure.empty() ? Plan::ticket_after(open.fate, open.ticket, open.step) : kPoison;
    SUCCEEDS(world_.engine->complete(request, ticket));
    open_.erase(request);
  }

  World& world_;
  const Plan& plan_;
  Draw draw_;
  std::atomic<bool> stopped_{false};
  int64_t events_ = 0;
  uint64_t tokens_ = 0;
  std::map<uint64_t, Open> open_;
  std::map<uint64_t, std::pair<uint64_t, int64_t>> updates_;  // token: request, subgroup
  std::set<std::tuple<int64_t, int, size_t>> failed_;
  std::vector<Updated> updated_;
  int64_t agreed_[4] = {};
};

using Programs = std::vector<std::unique_ptr<Program>>;

// Runs all programs and the driver to their end, and closes the engine.
void play(World& world, Programs& programs, Driver& driver) {
  std::vector<std::thread> threads;
  for (auto& program : programs) threads.emplace_back([&program] { program->run(); });
  std::thread driving([&driver] { driver.run(); });
  if (world.plan.ending == Ending::kClosed) {
    driving.join();
    world.engine->close();
  }
  for (auto& thread : threads) thread.join();
  driver.stop();
  if (driving.joinable()) driving.join();
  world.engine->close();
  driver.take_rest();
  world.close();
  for (auto& program : programs) program->drain();
}

bool has_failed(const Status& status) { return status.message().find(" failed") != std::string::npos; }

// What an ended program may have failed with.
void check_failure(const Plan& plan, const Status& failure, int device) {
  const std::string& message = failure.message();
  switch (plan.ending) {
    case Ending::kClean:
      return SUCCEEDS(failure);
    case Ending::kClosed:
      if (!failure.ok() && message.find("closed") == std::string::npos)
        fail_seed(__FILE__, __LINE__, message);
      return;
    default:
      if (failure.ok()) return;
      const std::string whose = "device " + std::to_string(device) + ": ";
      const bool refused = message.find(" was refused") != std::string::npos;
      if (plan.emulation.failures[0].device != device || message.find(whose) == std::string::npos ||
          (!has_failed(failure) && !(refused && plan.ending == Ending::kRefused)))
        fail_seed(__FILE__, __LINE__, message);
  }
}

// The steps that a program got through, against the reference.
void check_device(const World& world, const Program& program, const Driver& driver, int device) {
  const Plan& plan = world.plan;
  Reference reference(plan, device);
  // nothing of a failed device counts
  const bool lost = has_failed(program.failure()) || program.device_failed();
  plan.ending == Ending::kFailed && !program.failure().ok();  // nothing of a failed device counts
  bool whole = !lost && program.failure().ok();
  for (int64_t step = 0; step < plan.steps && !lost; ++step) {
    for (size_t bucket = 0; bucket < plan.buckets.size(); ++bucket) {
      const bool failed = driver.failed(step, device, bucket);
      const auto expected = reference.step(step, bucket, failed);
      whole &= program.has_result(step, bucket) && !failed;
      if (program.has_result(step, bucket)) HOLDS(program.result(step, bucket) == expected);
    }
  }
  if (!lost) HOLDS(program.free_memory_untouched());
  for (const Driver::Updated& update : driver.updated())
    if (whole && update.device == device)
      HOLDS(update.adopted == reference.adopted(update.step, update.bucket, update.subgroup));
  if (!whole) {
    HOLDS(plan.ending != Ending::kClean);
    return;
  }
  for (size_t bucket = 0; bucket < plan.buckets.size(); ++bucket) {
    const BucketPlan& what = plan.buckets[bucket];
    for (size_t leaf = 0; leaf < what.leaves.size(); ++leaf)
      HOLDS(std::memcmp(program.param(bucket, leaf), reference.param(bucket, leaf).data(),
                        what.bytes(leaf)) == 0);
    for (size_t subgroup = 0; subgroup < what.spec.subgroups.size(); ++subgroup)
      HOLDS(what.spec.record_bytes == 0 ||
            std::memcmp(world.record(device, bucket, subgroup), reference.record(bucket, subgroup).data(),
                        what.spec.record_bytes) == 0);
  }
  if (plan.ending == Ending::kClean) HOLDS(driver.agreed(device) == program.agreed());
}

void play_seed(uint64_t seed) {
  const Plan plan = draw_plan(seed);
  World world(plan);
  Programs programs;
  for (int device = 0; device < plan.devices; ++device)
    programs.push_back(std::make_unique<Program>(world, device));
  Driver driver(world);
  play(world, programs, driver);
  for (int device = 0; device < plan.devices; ++device) {
    check_failure(plan, programs[device]->failure(), device);
    check_device(world, *programs[device], driver, device);
  }
}

// Where the emulation or a sanitizer ends a world, or has something to say of it.
void name_seed() {
  std::fprintf(stderr, "device_link_test: seed %llu\n", static_cast<unsigned long long>(seed_in_work.load()));
}

}  // namespace

#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_on_report(void*) { name_seed(); }
#endif

int main(int argc, char** argv) {
  std::signal(SIGABRT, [](int) { name_seed(); });  // and then it ends
  jmo::set_flush_denormals();
#ifdef JMO_SANITIZED
  constexpr double kLimit_s = 120;
  uint64_t count = 80;
#else
  constexpr double kLimit_s = 30;
  uint64_t count = 1000;
#endif
  uint64_t first = 0;
  if (argc > 1) {
    first = std::strtoull(argv[1], nullptr, 10);
    count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  }
  Watchdog watchdog(kLimit_s);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    watchdog.begins(seed);
    play_seed(seed);
  }
  std::printf("device_link_test: %llu worlds\n", static_cast<unsigned long long>(count));
  return 0;
}
