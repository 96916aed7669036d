// DeviceTurn on a real lock file: exclusion, order, quantum, killed and forked processes, locks that fail.
// Usage: turn_test [FOLDER]
#include "ffi/core/turn.h"

#include <cerrno>

#include "ffi/tests/io_fixture.h"
#include "ffi/tests/turn_fixture.h"

namespace jmo_test {
namespace {

using jmo::DeviceTurn;
using Entry = jmo::DeviceTurn::Entry;

constexpr double kForEver = 1e9;

DeviceTurn::Options on(const std::string& path, double quantum_s = kForEver, bool is_write = false) {
  DeviceTurn::Options options;
  options.path = path;
  options.quantum_s = quantum_s;
  options.is_write = is_write;
  return options;
}

class Exclusive : public DeviceTurn {
 public:
  explicit Exclusive(const Options& options) : DeviceTurn(options) { set_exclusive(true); }
};

// A thread that enters; its end is what enter() gave.
class Entering {
 public:
  explicit Entering(DeviceTurn* turn) : thread_([this, turn] { entry_ = turn->enter(); }) {}
  Entry join() {
    thread_.join();
    return entry_;
  }

 private:
  Entry entry_ = Entry::kFree;
  std::thread thread_;
};

void test_off_unless_asked_for(const std::string& path) {
  DeviceTurn without(on(""));
  without.set_exclusive(true);
  DeviceTurn off(on(path));
  Exclusive holder(on(path));
  CHECK_EQ(holder.enter(), Entry::kInTurn);
  for (DeviceTurn* turn : {&without, &off}) {
    CHECK(!turn->exclusive());
    CHECK_EQ(turn->enter(), Entry::kFree);
    CHECK_EQ(turn->stats().count, int64_t{0});
    CHECK_EQ(turn->error(), std::string());
  }
  CHECK_EQ(line_length(path), 1);
  holder.leave(true);
}

void test_directions_are_independent(const std::string& path) {
  Exclusive reads(on(path)), writes(on(path, kForEver, true));
  CHECK_EQ(reads.enter(), Entry::kInTurn);
  CHECK_EQ(writes.enter(), Entry::kInTurn);
  CHECK_EQ(line_length(path), 2);
  reads.leave(false);
  CHECK_EQ(line_length(path), 1);
  writes.leave(false);
  CHECK_EQ(line_length(path), 0);
}

// The threads of one queue share a turn, and keep it while there is more to do and nobody waits.
void test_a_turn_is_shared_and_kept(const std::string& path) {
  Exclusive turn(on(path, 0));
  CHECK_EQ(turn.enter(), Entry::kInTurn);
  CHECK_EQ(Entering(&turn).join(), Entry::kInTurn);
  turn.leave(false);  // the other is inside
  CHECK_EQ(line_length(path), 1);
  turn.leave(true);
  CHECK_EQ(line_length(path), 1);
  CHECK_EQ(turn.enter(), Entry::kInTurn);
  CHECK_EQ(turn.stats().count, int64_t{1});
  turn.rest();  // somebody is inside
  CHECK_EQ(line_length(path), 1);
  turn.leave(true);
  turn.rest();
  CHECK_EQ(line_length(path), 0);
  turn.rest();
  CHECK_EQ(turn.enter(), Entry::kInTurn);
  CHECK_EQ(turn.stats().count, int64_t{2});
  turn.leave(false);
  CHECK_EQ(line_length(path), 0);
}

void test_the_quantum_ends_a_turn_only_for_others(const std::string& path) {
  for (double quantum_s : {0.0, kForEver}) {
    Exclusive holder(on(path, quantum_s)), other(on(path));
    CHECK_EQ(holder.enter(), Entry::kInTurn);
    CHECK_EQ(Entering(&holder).join(), Entry::kInTurn);
    Entering waiting(&other);
    wait_until([&] { return line_length(path) == 2; });
    holder.leave(true);
    CHECK_EQ(other.stats().count, int64_t{0});  // a block is under way
    if (quantum_s == 0) {
      Entering again(&holder);  // has to go behind the other
      holder.leave(true);
      CHECK_EQ(waiting.join(), Entry::kInTurn);
      wait_until([&] { return line_length(path) == 2; });
      CHECK_EQ(holder.stats().count, int64_t{1});
      other.leave(false);
      CHECK_EQ(again.join(), Entry::kInTurn);
      CHECK_EQ(holder.stats().count, int64_t{2});
      holder.leave(false);
    } else {
      holder.leave(true);
      for (int block = 0; block < 100; ++block) {
        CHECK_EQ(holder.enter(), Entry::kInTurn);
        holder.leave(true);
      }
      CHECK_EQ(other.stats().count, int64_t{0});
      CHECK_EQ(line_length(path), 2);
      holder.rest();
      CHECK_EQ(waiting.join(), Entry::kInTurn);
      other.leave(false);
    }
  }
}

void test_turns_come_in_the_order_of_asking(const std::string& path) {
  Shared<Trace> trace;
  std::vector<std::unique_ptr<Exclusive>> turns;
  std::vector<std::unique_ptr<Entering>> waiting;
  for (int who = 0; who < Trace::kUsers; ++who) {
    DeviceTurn::Options options = on(path);
    options.on_turn = trace->writer(who);
    turns.push_back(std::make_unique<Exclusive>(options));
    waiting.push_back(std::make_unique<Entering>(turns.back().get()));
    wait_until([&] { return line_length(path) == who + 1; });
  }
  for (int who = 0; who < Trace::kUsers; ++who) {
    CHECK_EQ(waiting[who]->join(), Entry::kInTurn);
    turns[who]->leave(false);
  }
  const std::vector<Traced> seen = trace->sorted(false);
  CHECK_EQ(seen.size(), size_t{Trace::kUsers});
  for (int who = 0; who < Trace::kUsers; ++who) {
    CHECK_EQ(seen[who].who, who);
    CHECK_EQ(turns[who]->stats().count, int64_t{1});
    CHECK(turns[who]->stats().held_s == seen[who].turn.end_s - seen[who].turn.begin_s);
    if (who > 0) CHECK_EQ(seen[who].turn.place, seen[who - 1].turn.place + 1);
    if (who > 0) CHECK(turns[who]->stats().waited_s >= seen[who].turn.begin_s - seen[who].turn.lined_up_s);
  }
  check_exclusive(seen);
  check_bounded(seen);
}

void test_stop_and_switching_off_end_the_waiting(const std::string& path) {
  Exclusive holder(on(path));
  CHECK_EQ(holder.enter(), Entry::kInTurn);
  for (bool stop : {false, true}) {
    Exclusive other(on(path));
    Entering first(&other), second(&other);
    wait_until([&] { return line_length(path) == 2; });
    stop ? other.stop() : other.set_exclusive(false);
    const Entry expected = stop ? Entry::kStopped : Entry::kFree;
    CHECK_EQ(first.join(), expected);
    CHECK_EQ(second.join(), expected);
    CHECK_EQ(other.enter(), expected);
    CHECK_EQ(line_length(path), 1);
    CHECK_EQ(other.stats().count, int64_t{0});
    CHECK(other.stats().waited_s > 0);
  }
  holder.set_exclusive(false);  // its block is still under way
  CHECK_EQ(line_length(path), 1);
  holder.leave(true);
  CHECK_EQ(line_length(path), 0);
  holder.set_exclusive(true);
  CHECK_EQ(holder.enter(), Entry::kInTurn);
  holder.stop();
  CHECK_EQ(line_length(path), 1);
  holder.leave(true);
  CHECK_EQ(line_length(path), 0);
}

// One that has the turn and one that waits for it are killed; a third waits behind both.
void test_the_killed_stand_in_nobodys_way(const std::string& path) {
  const auto hold = [&] {
    Exclusive turn(on(path));
    (void)turn.enter();
    for (;;) ::pause();
  };
  std::vector<pid_t> children;
  for (int count = 1; count <= 2; ++count) {
    children.push_back(run_in_child(hold));
    wait_until([&] { return line_length(path) == count; });
  }
  Exclusive turn(on(path));
  Entering waiting(&turn);
  wait_until([&] { return line_length(path) == 3; });
  for (pid_t child : {children[1], children[0]}) {
    CHECK_EQ(turn.stats().count, int64_t{0});
    kill_child(child);
  }
  CHECK_EQ(waiting.join(), Entry::kInTurn);
  turn.leave(false);
}

// A data loader's workers, say, that outlive the process which forked them.
void test_forked_children_keep_no_turn(const std::string& path) {
  struct Pids {
    std::atomic<pid_t> grandchild{0};
  };
  Shared<Pids> pids;
  const pid_t child = run_in_child([&] {
    Exclusive turn(on(path));
    CHECK_EQ(turn.enter(), Entry::kInTurn);
    const pid_t grandchild = ::fork();
    if (grandchild > 0) pids->grandchild = grandchild;
    for (;;) ::pause();
  });
  wait_until([&] { return pids->grandchild.load() != 0; });
  CHECK_EQ(line_length(path), 1);
  kill_child(child);
  wait_until([&] { return line_length(path) == 0; });
  CHECK_EQ(::kill(pids->grandchild, SIGKILL), 0);
}

void test_forked_children_harm_no_turn(const std::string& path) {
  auto turn = std::make_unique<Exclusive>(on(path));
  CHECK_EQ(turn->enter(), Entry::kInTurn);
  turn->leave(true);
  const size_t files = open_files();
  check_exited(run_in_child([&] {
    CHECK_EQ(open_files(), files - 1);
    const int file = ::open("/dev/null", O_RDONLY | O_CLOEXEC);  // gets the number of the one that is gone
    turn->rest();
    turn.reset();
    CHECK(::fcntl(file, F_GETFD) >= 0);
  }));
  CHECK_EQ(line_length(path), 1);
  turn->rest();
  CHECK_EQ(line_length(path), 0);
}

// Locks that fail from the `after`th call on.
class NoLocks : public jmo::SyscallHooks {
 public:
  NoLocks(int after, int error_number) : left_(after), error_number_(error_number) {}
  int lock(int fd, int command, struct flock* range) override {
    if (left_.fetch_sub(1) > 0) return SyscallHooks::lock(fd, command, range);
    errno = error_number_;
    return -1;
  }

 private:
  std::atomic<int> left_;
  const int error_number_;
};

void test_a_turn_that_is_never_given_back_is_not_waited_for(const std::string& path) {
  DeviceTurn::Options little_patience = on(path);
  little_patience.patience_s = 0.01;
  Exclusive stopped(on(path)), other(little_patience);
  CHECK_EQ(stopped.enter(), Entry::kInTurn);
  CHECK_EQ(other.enter(), Entry::kFree);  // and not after for ever
  CHECK(!other.exclusive());
  CHECK(other.error().find("stopped") != std::string::npos);
  stopped.leave(false);
  CHECK(stopped.error().empty());
}

void test_without_locks_turns_are_off(const std::string& path) {
  DeviceTurn nowhere(on(path + ".d/missing"));
  nowhere.set_exclusive(true);
  CHECK_EQ(nowhere.enter(), Entry::kFree);
  check_contains(nowhere.error(), "open " + path + ".d/missing: No such file");
  for (int error_number : {ENOLCK, EINVAL}) {
    for (int after = 0; after < 9; ++after) {
      NoLocks hooks(after, error_number);
      InstalledHooks installed(&hooks);
      Exclusive turn(on(path, 0));
      for (int block = 0; block < 9; ++block) {
        const Entry entry = turn.enter();
        CHECK(entry == (turn.exclusive() ? Entry::kInTurn : Entry::kFree));
        if (entry == Entry::kInTurn) turn.leave(true);
      }
      turn.rest();
      check_contains(turn.error(), "of " + path);
      check_contains(turn.error(), "errno " + std::to_string(error_number));
      turn.set_exclusive(true);
      CHECK(!turn.exclusive());
      jmo::install_syscall_hooks(nullptr);
      CHECK_EQ(line_length(path), 0);  // though it is still open, nobody waits for it
    }
  }
}

}  // namespace
}  // namespace jmo_test

int main(int argc, char** argv) {
  using namespace jmo_test;
  const TempDir folder(test_folder(argc, argv));
  const std::string path = folder.file("turns");
  test_forked_children_keep_no_turn(path);
  test_forked_children_harm_no_turn(path);
  test_off_unless_asked_for(path);
  test_directions_are_independent(path);
  test_a_turn_is_shared_and_kept(path);
  test_the_quantum_ends_a_turn_only_for_others(path);
  test_turns_come_in_the_order_of_asking(path);
  test_stop_and_switching_off_end_the_waiting(path);
  test_the_killed_stand_in_nobodys_way(path);
  test_a_turn_that_is_never_given_back_is_not_waited_for(path);
  test_without_locks_turns_are_off(path);
  CHECK_EQ(size_on_disk(path), uint64_t{0});  // its content is not ours
  return 0;
}
