// TierIo while its queues take turns on a device with others: processes with endless work, one of them
// killed; two tiers of one process; close, switching, failing locks, and what must not be done in a turn.
// Usage: turn_io_test [FOLDER]
#include <cerrno>

#include "ffi/core/fault.h"
#include "ffi/tests/io_fixture.h"
#include "ffi/tests/turn_fixture.h"

namespace jmo_test {
namespace {

using jmo::Code;
using jmo::DeviceTurn;
using jmo::IoResult;
using jmo::TierIo;
using jmo::TierOptions;

constexpr size_t kBlock = 16u << 10;
#ifdef JMO_SANITIZED
constexpr int kTurns = 20;
#else
constexpr int kTurns = 200;
#endif

TierOptions with_turns(const std::string& path) {
  TierOptions options;
  options.block_size = kBlock;
  options.turn.path = path;
  options.turn.quantum_s = 0.0005;
  return options;
}

// A tier that always has three records to read and three to write, until it is told to end.
class Load {
 public:
  Load(const TempDir& folder, int who, const TierOptions& options) : memory_(9 * kBlock) {
    for (uint64_t token = 0; token < kRecords; ++token) {
      jobs_.push_back(
          make_job(folder.file(std::to_string(who) + "-" + std::to_string(token % 3)), &memory_, token));
      jobs_.back().expected_crc = memory_.crc();
      if (token >= 3) in_.push_back(std::make_unique<Memory>(memory_.size()));
      if (token >= 3) jobs_.back().memory = in_.back()->data();
      if (token < 3) check_ok(run_one(TierOptions(), jobs_.back(), true));
    }
    tier_ = std::make_unique<TierIo>(options, [this](const IoResult& result) { ended(result); });
    tier_->set_exclusive(true);
    for (uint64_t token = 0; token < kRecords; ++token) submit(token);
  }
  // All jobs that were begun have come back well.
  void end() {
    ending_ = true;
    wait_until([&] { return running_.load() == 0; });
    tier_->close();
  }
  TierIo& tier() { return *tier_; }
  int jobs_done() const { return jobs_done_.load(); }

 private:
  static constexpr uint64_t kRecords = 6;

  void submit(uint64_t token) {
    ++running_;
    token < 3 ? tier_->write(jobs_[token]) : tier_->read(jobs_[token]);
  }
  void ended(const IoResult& result) {
    check_ok(result);
    ++jobs_done_;
    if (!ending_) submit(result.token);
    --running_;
  }

  Memory memory_;
  std::vector<std::unique_ptr<Memory>> in_;
  std::vector<jmo::IoJob> jobs_;
  std::unique_ptr<TierIo> tier_;
  std::atomic<bool> ending_{false};
  std::atomic<int> running_{0};
  std::atomic<int> jobs_done_{0};
};

struct Together {
  std::atomic<bool> end{false};
  std::atomic<int> jobs_done[Trace::kUsers] = {};
  Trace trace;
  Trace blocks;  // each as a turn from the beginning of its system call to the end
};

// Writes down when blocks are transferred.
class TracedCalls : public jmo::SyscallHooks {
 public:
  explicit TracedCalls(std::function<void(const jmo::Turn&)> writer) : writer_(std::move(writer)) {}
  ssize_t pread(int fd, void* memory, size_t size, off_t offset) override {
    return traced(false, size, [&] { return SyscallHooks::pread(fd, memory, size, offset); });
  }
  ssize_t pwrite(int fd, const void* memory, size_t size, off_t offset) override {
    return traced(true, size, [&] { return SyscallHooks::pwrite(fd, memory, size, offset); });
  }

 private:
  template <typename Call>
  ssize_t traced(bool is_write, size_t size, Call call) {
    jmo::Turn block;
    block.is_write = is_write;
    block.begin_s = jmo::now_s();
    const ssize_t moved = call();
    block.end_s = jmo::now_s();
    if (size == kBlock) writer_(block);  // larger ones make the files, without turns
    return moved;
  }

  const std::function<void(const jmo::Turn&)> writer_;
};

void check_trace(const Trace& trace) {
  for (bool is_write : {false, true}) {
    check_exclusive(trace.sorted(is_write));
    check_bounded(trace.sorted(is_write));
  }
}

// Until each of the first `users` has had so many more turns each way.
void wait_for_turns(const Trace& trace, int users) {
  int begun[2][Trace::kUsers];
  for (int way : {0, 1})
    for (int who = 0; who < users; ++who) begun[way][who] = trace.by_user[way][who];
  wait_until([&] {
    for (int way : {0, 1})
      for (int who = 0; who < users; ++who)
        if (trace.by_user[way][who] < begun[way][who] + kTurns) return false;
    return true;
  });
}

void test_processes_take_turns(const TempDir& folder, int users) {
  Shared<Together> together;
  std::vector<pid_t> children;
  for (int who = 0; who < users; ++who)
    children.push_back(run_in_child([&] {
      TierOptions options = with_turns(folder.file("turns"));
      options.turn.on_turn = together->trace.writer(who);
      TracedCalls calls(together->blocks.writer(who));
      InstalledHooks installed(&calls);
      Load load(folder, who, options);
      wait_until([&] {
        together->jobs_done[who] = load.jobs_done();
        return together->end.load();
      });
      load.end();
    }));
  wait_for_turns(together->trace, users);
  kill_child(children.back());
  for (int who = 0; who < users - 1; ++who) {  // by jobs: one that is alone keeps its turns
    const int before = together->jobs_done[who];
    wait_until([&] { return together->jobs_done[who] > before + kTurns; });
  }
  together->end = true;
  for (int who = 0; who < users - 1; ++who) check_exited(children[who]);
  check_trace(together->trace);
  for (bool is_write : {false, true}) {
    CHECK(together->blocks.by_user[is_write][0] > kTurns);
    check_exclusive(together->blocks.sorted(is_write));
  }
  CHECK_EQ(line_length(folder.file("turns")), 0);
}

void test_two_tiers_of_one_process_take_turns(const TempDir& folder) {
  Shared<Together> together;
  std::vector<std::unique_ptr<Load>> loads;
  for (int who = 0; who < 2; ++who) {
    TierOptions options = with_turns(folder.file("turns"));
    options.turn.on_turn = together->trace.writer(who);
    loads.push_back(std::make_unique<Load>(folder, who, options));
  }
  wait_for_turns(together->trace, 2);
  for (auto& load : loads) load->end();
  check_trace(together->trace);
  for (int who = 0; who < 2; ++who)
    for (bool is_write : {false, true}) {
      const jmo::TurnStats stats = loads[who]->tier().turns(is_write);
      CHECK_EQ(stats.count, int64_t{together->trace.by_user[is_write][who]});
      CHECK(stats.held_s > 0 && stats.waited_s > 0);
      CHECK_EQ(loads[who]->tier().turn_error(), std::string());
    }
}

void test_switching_loses_no_job(const TempDir& folder) {
  Load first(folder, 0, with_turns(folder.file("turns"))),
      second(folder, 1, with_turns(folder.file("turns")));
  for (int round = 0; round < kTurns; ++round) {
    const int before = first.jobs_done();
    first.tier().set_exclusive(round % 2 == 0);
    if (round % 5 == 0) second.tier().set_exclusive(round % 3 == 0);
    wait_until([&] { return first.jobs_done() > before; });
  }
  first.end();
  second.end();
}

// A queue whose turn somebody else has.
class Blocked {
 public:
  Blocked(const TempDir& folder, const TierOptions& options)
      : path_(options.turn.path),
        memory_(4 * kBlock),
        holder_(holding(path_)),
        tier_(options, results.collector()) {
    holder_.set_exclusive(true);
    CHECK_EQ(holder_.enter(), DeviceTurn::Entry::kInTurn);
    tier_.set_exclusive(true);
    for (uint64_t i = 0; i < kJobs; ++i)
      tier_.write(make_job(folder.file("blocked" + std::to_string(i)), &memory_, i));
    wait_until([&] { return line_length(path_) == 2; });
  }
  void let_go() { holder_.leave(false); }
  TierIo& tier() { return tier_; }

  static constexpr uint64_t kJobs = 20;
  Results results;

 private:
  static DeviceTurn::Options holding(const std::string& path) {
    DeviceTurn::Options options;
    options.path = path;
    options.is_write = true;
    return options;
  }

  const std::string path_;
  Memory memory_;
  DeviceTurn holder_;
  TierIo tier_;
};

void test_close_ends_the_waiting(const TempDir& folder) {
  const std::string path = folder.file("turns");
  Blocked blocked(folder, with_turns(path));
  const size_t files = open_files();
  blocked.tier().close();
  for (const IoResult& result : blocked.results.wait(Blocked::kJobs)) {
    CHECK_EQ(result.status.code(), Code::kClosed);
    CHECK(result.start_s > 0 && result.end_s >= result.start_s);
  }
  CHECK_EQ(line_length(path), 1);
  CHECK(open_files() < files);
  CHECK(blocked.tier().turns(true).waited_s > 0);
  CHECK_EQ(blocked.tier().turns(true).count, int64_t{0});
  blocked.let_go();
}

void test_jobs_begin_when_the_turn_does(const TempDir& folder) {
  Blocked blocked(folder, with_turns(folder.file("turns")));
  const double before_s = jmo::now_s();
  blocked.let_go();
  for (const IoResult& result : blocked.results.wait(Blocked::kJobs)) {
    check_ok(result);
    CHECK(result.start_s >= before_s);
  }
  wait_until([&] { return line_length(folder.file("turns")) == 0; });
}

void test_switched_off_nobody_waits(const TempDir& folder) {
  Blocked blocked(folder, with_turns(folder.file("turns")));
  blocked.tier().set_exclusive(false);
  for (const IoResult& result : blocked.results.wait(Blocked::kJobs)) check_ok(result);
  CHECK_EQ(blocked.tier().turns(true).count, int64_t{0});
  blocked.let_go();
}

// Takes and ends a turn for writes, while the jobs of `tier` are under way.
void check_turn_is_to_be_had(const std::string& path) {
  DeviceTurn::Options options;
  options.path = path;
  options.is_write = true;
  DeviceTurn turn(options);
  turn.set_exclusive(true);
  CHECK_EQ(turn.enter(), DeviceTurn::Entry::kInTurn);
  turn.leave(false);
}

// Both would take more than a quarter of an hour, and are cut short.
void test_no_turn_is_held_while_waiting(const TempDir& folder) {
  const std::string path = folder.file("turns");
  jmo::FaultSpec fault;
  fault.path_prefix = folder.file("late");
  fault.is_write = true;
  fault.min_delay_s = fault.max_delay_s = 1000;
  jmo::inject_fault(fault);
  Memory memory(20 * kBlock);
  for (int threads : {1, 2, 3}) {
    Results results;
    TierOptions options = with_turns(path);
    options.threads = threads;
    TierIo tier(options, results.collector());
    tier.set_exclusive(true);
    for (uint64_t i = 0; i < 3; ++i) tier.write(make_job(folder.file("now" + std::to_string(i)), &memory, i));
    tier.write(make_job(folder.file("late"), &memory, 3));
    for (const IoResult& result : results.wait(3)) check_ok(result);
    check_turn_is_to_be_had(path);
    CHECK(tier.turns(true).count > 0);
    results.wait(3);
    tier.close();
    CHECK_EQ(results.wait(4).back().status.code(), Code::kClosed);
  }
  jmo::clear_faults();

  Results results;
  TierOptions options = with_turns(path);
  options.write_limit_bps = 16;
  TierIo tier(options, results.collector());
  tier.set_exclusive(true);
  tier.write(make_job(folder.file("slow"), &memory));
  wait_until([&] { return tier.turns(true).count > 0; });
  check_turn_is_to_be_had(path);
  results.wait(0);
  tier.close();
  results.wait(1);
}

// Locks that work `left` times.
class LocksRunOut : public jmo::SyscallHooks {
 public:
  explicit LocksRunOut(int left) : left_(left) {}
  int lock(int fd, int command, struct flock* range) override {
    if (left_.fetch_sub(1) > 0) return SyscallHooks::lock(fd, command, range);
    errno = ENOLCK;
    return -1;
  }

 private:
  std::atomic<int> left_;
};

void test_locks_that_fail_lose_no_job(const TempDir& folder) {
  const std::string path = folder.file("turns");
  for (int left = 0; left < 30; left += 3) {
    Memory memory(5 * kBlock);
    Results results;
    LocksRunOut hooks(left);
    InstalledHooks installed(&hooks);
    TierIo tier(with_turns(path), results.collector());
    for (uint64_t i = 0; i < 30; ++i) {
      tier.set_exclusive(true);
      tier.write(make_job(folder.file("any"), &memory, i));
      check_ok(results.wait(i + 1).back());
    }
    check_contains(tier.turn_error(), path + ": No locks available");
    tier.close();
  }
}

}  // namespace
}  // namespace jmo_test

int main(int argc, char** argv) {
  using namespace jmo_test;
  const TempDir folder(test_folder(argc, argv));
  test_processes_take_turns(folder, 2);
  test_processes_take_turns(folder, 3);
  test_two_tiers_of_one_process_take_turns(folder);
  test_switching_loses_no_job(folder);
  test_close_ends_the_waiting(folder);
  test_jobs_begin_when_the_turn_does(folder);
  test_switched_off_nobody_waits(folder);
  test_no_turn_is_held_while_waiting(folder);
  test_locks_that_fail_lose_no_job(folder);
  return 0;
}
