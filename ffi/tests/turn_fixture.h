// What the tests of turns share: processes made by fork, a trace of turns in memory that they share, and a
// look at the line of a lock file. Thread contract: Trace may be used from any thread of any process; fork
// only while no other thread runs, so that the child may start threads of its own, also under a sanitizer.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "ffi/core/syscalls.h"
#include "ffi/core/turn.h"
#include "ffi/tests/check.h"

namespace jmo_test {

// Waits for what another thread or process does. A test that would wait for ever ends with a message.
inline void wait_until(const std::function<bool()>& reached) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (!reached()) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// Memory that processes forked later share. All bytes are 0 at first.
template <typename T>
class Shared {
 public:
  Shared() {
    void* memory = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    value_ = new (memory) T();
  }
  ~Shared() { ::munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() { return value_; }
  T* get() { return value_; }

 private:
  T* value_ = nullptr;
};

struct Traced {
  int who = 0;
  jmo::Turn turn;
};

// The first `kMost` turns, in no order.
struct Trace {
  static constexpr int kMost = 1 << 17;
  static constexpr int kUsers = 4;

  std::function<void(const jmo::Turn&)> writer(int who) {
    return [this, who](const jmo::Turn& turn) {
      const int index = count.fetch_add(1);
      if (index < kMost) turns[index] = {who, turn};
      by_user[turn.is_write][who].fetch_add(1);
    };
  }
  // Of one direction, by their beginning; without one that a killed process had not written down.
  std::vector<Traced> sorted(bool is_write) const {
    std::vector<Traced> result;
    for (int index = 0; index < std::min(count.load(), kMost); ++index)
      if (turns[index].turn.end_s > 0 && turns[index].turn.is_write == is_write)
        result.push_back(turns[index]);
    std::sort(result.begin(), result.end(),
              [](const Traced& a, const Traced& b) { return a.turn.begin_s < b.turn.begin_s; });
    return result;
  }

  std::atomic<int> count{0};
  std::atomic<int> by_user[2][kUsers] = {};
  Traced turns[kMost];
};

// Nothing of one user overlaps with anything of another.
inline void check_exclusive(const std::vector<Traced>& turns) {
  double ended_s[Trace::kUsers] = {};
  for (const Traced& traced : turns) {
    for (int other = 0; other < Trace::kUsers; ++other)
      if (other != traced.who) CHECK(traced.turn.begin_s >= ended_s[other]);
    ended_s[traced.who] = std::max(ended_s[traced.who], traced.turn.end_s);
  }
}

// Whoever stands in the line sees at most one turn of each other user before its own.
inline void check_bounded(const std::vector<Traced>& turns) {
  for (size_t mine = 0; mine < turns.size(); ++mine) {
    int seen[Trace::kUsers] = {};
    for (size_t other = mine; other-- > 0;) {
      if (turns[other].turn.begin_s <= turns[mine].turn.lined_up_s) break;
      CHECK_EQ(++seen[turns[other].who], 1);
    }
    CHECK_EQ(seen[turns[mine].who], 0);
  }
}

// How many stand in the lines of a lock file, those at their heads included.
inline int line_length(const std::string& path) {
  jmo::LockFile file;
  CHECK(file.open(path).ok());
  int length = 0;
  for (int64_t next = 3;; ++length) {
    CHECK(file.find_locked(next + 1, std::numeric_limits<int64_t>::max(), &next).ok());
    if (next < 0) return length;
  }
}

// Runs `work` in a child, which ends with it or with its parent.
inline pid_t run_in_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child > 0) return child;
  CHECK_EQ(::prctl(PR_SET_PDEATHSIG, SIGKILL), 0);
  work();
  ::_exit(0);
}

inline void check_exited(pid_t child) {
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

inline void kill_child(pid_t child) {
  int status = -1;
  CHECK_EQ(::kill(child, SIGKILL), 0);
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFSIGNALED(status));
}

}  // namespace jmo_test
