// See turn.h, also for the thread contract. Functions named in its private part are called with the mutex
// held.
#include "ffi/core/turn.h"

#include <algorithm>
#include <chrono>

#include "ffi/core/io.h"

namespace jmo {
namespace {

// Waiting is polling: a lock that the kernel waits for could only be interrupted by a signal, and stop() must
// end it at once. The first pauses are short for turns that end early because their queue ran dry; the later
// ones are a hundredth of a full turn and cost a thread about one percent of a core.
constexpr std::chrono::microseconds kLeastPause(50);
constexpr std::chrono::microseconds kMostPause(1000);

// At a turn in every microsecond, a line that never empties would last for twelve days.
constexpr int64_t kLineLength = int64_t{1} << 40;

}  // namespace

DeviceTurn::DeviceTurn(const Options& options)
    : options_(options),
      gate_(options.is_write ? 3 : 1),
      line_begin_(options.is_write ? 2 * kLineLength : kLineLength),
      line_end_(line_begin_ + kLineLength) {
  if (options.path.empty() || !check(file_.open(options.path))) return;
  int64_t ignored = 0;
  (void)check(
      file_.find_locked(line_begin_, line_end_, &ignored));  // tells whether there are such locks here
}

DeviceTurn::~DeviceTurn() { stop(); }

void DeviceTurn::set_exclusive(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  exclusive_.store(on && !options_.path.empty() && error_.empty(), std::memory_order_relaxed);
  if (!exclusive() && inside_ == 0) end_turn();
  changed_.notify_all();
}

DeviceTurn::Entry DeviceTurn::enter_in_turn() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiting_;
  while (exclusive() && !stopped_ && state_ != State::kHeld) {
    if (state_ == State::kNone) {
      acquire(&lock);
    } else {
      changed_.wait(lock);
    }
  }
  --waiting_;
  if (!exclusive()) return Entry::kFree;
  if (stopped_) return Entry::kStopped;
  ++inside_;
  return Entry::kInTurn;
}

void DeviceTurn::leave(bool more) {
  std::lock_guard<std::mutex> lock(mutex_);
  --inside_;
  const bool quantum_over = now_s() - begin_s_ >= options_.quantum_s;
  if (state_ == State::kHeld && (!exclusive() || stopped_ || (quantum_over && others_wait())))
    state_ = State::kEnding;
  const bool idle = !more && waiting_ == 0;
  if (inside_ == 0 && (state_ == State::kEnding || idle)) end_turn();
}

void DeviceTurn::rest() {
  if (!held_.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (inside_ == 0 && waiting_ == 0) end_turn();
}

void DeviceTurn::stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  if (inside_ == 0) end_turn();
  changed_.notify_all();
}

void DeviceTurn::close() {
  stop();
  std::lock_guard<std::mutex> lock(mutex_);
  file_.close();
}

TurnStats DeviceTurn::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  TurnStats stats = stats_;
  if (state_ == State::kLiningUp) stats.waited_s += now_s() - asked_s_;
  if (held_.load(std::memory_order_relaxed)) stats.held_s += now_s() - begin_s_;
  return stats;
}

std::string DeviceTurn::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

// One thread does this for all; the others wait for changed_.
void DeviceTurn::acquire(std::unique_lock<std::mutex>* lock) {
  state_ = State::kLiningUp;
  asked_s_ = now_s();
  auto pause = kLeastPause;
  bool first = false;
  double moved_s = asked_s_;
  int64_t ahead = ahead_;
  while (exclusive() && !stopped_ && !(first = first_in_line())) {
    if (ahead != ahead_) moved_s = now_s();
    ahead = ahead_;
    if (now_s() - moved_s > options_.patience_s) {
      check(Status(Code::kIo, "another process has not given its turn back; it may have been stopped"));
      break;
    }
    changed_.wait_for(*lock, pause);
    pause = std::min(2 * pause, kMostPause);
  }
  begin_s_ = now_s();
  stats_.waited_s += begin_s_ - asked_s_;
  if (first) {
    ++stats_.count;
    state_ = State::kHeld;
    held_.store(true, std::memory_order_relaxed);
  } else {
    state_ = State::kNone;
    leave_line();
  }
  changed_.notify_all();
}

bool DeviceTurn::first_in_line() {
  if (place_ < 0 && !line_up()) return false;
  return check(file_.find_locked(line_begin_, place_, &ahead_)) && ahead_ < 0;
}

// Locks the byte behind the last one in the line. False: somebody else is at the gate.
bool DeviceTurn::line_up() {
  bool locked = false;
  if (!check(file_.try_lock(gate_, &locked)) || !locked) return false;
  int64_t last = line_begin_ - 1;
  Status status;
  for (int64_t next = last; status.ok() && next >= 0;) {
    last = next;
    status = file_.find_locked(last + 1, line_end_, &next);
  }
  if (status.ok()) status = file_.try_lock(last + 1, &locked);
  if (status.ok() && locked) {
    place_ = last + 1;
    lined_up_s_ = now_s();
  }
  const Status opened = file_.unlock(gate_);
  return check(status) && check(opened) && locked;
}

bool DeviceTurn::others_wait() {
  int64_t behind = -1;
  return check(file_.find_locked(place_ + 1, line_end_, &behind)) && behind >= 0;
}

void DeviceTurn::end_turn() {
  if (!held_.load(std::memory_order_relaxed)) return;
  Turn turn;
  turn.is_write = options_.is_write;
  turn.place = place_;
  turn.lined_up_s = lined_up_s_;
  turn.begin_s = begin_s_;
  turn.end_s = now_s();
  stats_.held_s += turn.end_s - turn.begin_s;
  if (options_.on_turn) options_.on_turn(turn);
  state_ = State::kNone;
  held_.store(false, std::memory_order_relaxed);
  leave_line();
  changed_.notify_all();
}

void DeviceTurn::leave_line() {
  if (place_ >= 0) (void)check(file_.unlock(place_));
  place_ = -1;
}

// Turns work no more once a lock fails; the queue goes on without.
bool DeviceTurn::check(const Status& status) {
  if (status.ok()) return true;
  if (error_.empty()) error_ = status.message();
  file_.close();  // whatever it still has locked would stop the others
  exclusive_.store(false, std::memory_order_relaxed);
  changed_.notify_all();
  return false;
}

}  // namespace jmo
