// Turns on a storage device: at most one queue of a node transfers in one direction of a device at a time
// (MLP-Offload, arXiv 2509.02480, section 3.3: concurrent transfers of several workers slow each other down).
//
// 1. The queues of a device meet at a lock file. Locks belong to the queue's own open file description, so
//    two queues of one process exclude each other like those of two processes, and die with their process.
// 2. Queues stand in a line. Whoever wants a turn locks the direction's gate (byte 1 for reads, 3 for
//    writes), locks the byte behind the last one in the line, and lets the gate go. The turn is that of the
//    first in the line and ends when it unlocks its byte. So turns come in the order of asking, and whoever
//    stands in the line waits for at most one turn of each other queue. Under a plain lock that everybody
//    polls, or a turnstile with more than two, somebody may wait for ever.
// 3. The lines begin far behind all bytes that others lock: bytes 0 to 3 are kept for this class, those from
//    4 on and the file's content are jax_mlp_offload/exclusive.py's.
// 4. A queue's threads share its turn. It lasts while they have blocks to transfer, and ends once all blocks
//    under way have ended and there is no more to do, or somebody else waits and the quantum is over, or
//    turns have been switched off.
// What always holds: between enter() == kInTurn and leave(), this queue is first in the line. Switched off,
// entering is one relaxed atomic load. If the lock file fails, turns are off from then on and error() says
// why.
// Thread contract: all methods from any thread. Nothing waits but enter(), and that not beyond stop() or
// set_exclusive(false). System calls are made under the mutex: the lock file belongs on a local file system.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "ffi/core/syscalls.h"

namespace jmo {

// A turn from its place in the line to its end; seconds on the clock of now_s(). `place` grows along a line
// and begins again when that is empty.
struct Turn {
  bool is_write = false;
  int64_t place = 0;
  double lined_up_s = 0, begin_s = 0, end_s = 0;
};

struct TurnStats {
  int64_t count = 0;    // turns begun
  double waited_s = 0;  // for turns, up to now
  double held_s = 0;    // turns, up to now
};

class DeviceTurn {
 public:
  // A turn is not taken from a queue before it has lasted so long. It is many times what a change of turns
  // costs (the blocks of several threads running dry, up to a millisecond until the next one sees it) and
  // some ten blocks of an NVMe device or a parallel file system; and a record that others urgently need
  // waits for no more than so long for each of them.
  static constexpr double kQuantumS = 0.1;

  // A line that has not moved for so long has somebody in it who was stopped: turns are off from then on.
  static constexpr double kPatienceS = 20;

  struct Options {
    std::string path;  // of the lock file, the same for all users of a device; empty: turns are never taken
    bool is_write = false;
    double quantum_s = kQuantumS;
    double patience_s = kPatienceS;
    // Told of every turn just before it ends, under the mutex: for traces and tests. It must not call back.
    std::function<void(const Turn&)> on_turn;
  };

  enum class Entry { kFree, kInTurn, kStopped };

  explicit DeviceTurn(const Options& options);  // turns are off at first
  ~DeviceTurn();
  DeviceTurn(const DeviceTurn&) = delete;
  DeviceTurn& operator=(const DeviceTurn&) = delete;

  // Blocks that entered without a turn are not waited for, and a turn that is held lasts until its blocks
  // have ended.
  void set_exclusive(bool on);
  bool exclusive() const { return exclusive_.load(std::memory_order_relaxed); }

  // Before a block is transferred; waits for the turn. kFree: turns are off, or were switched off.
  Entry enter() { return exclusive() ? enter_in_turn() : Entry::kFree; }
  // After the block, if that was kInTurn. `more`: this thread comes back at once, to enter() or rest().
  void leave(bool more);
  // There is nothing to transfer now.
  void rest();
  // Ends all waiting, and the turn once its blocks have ended. From then on enter() gives kStopped, or kFree
  // where turns are off.
  void stop();
  // Closes the lock file; all blocks have ended.
  void close();

  TurnStats stats() const;
  std::string error() const;  // empty: the lock file works, or there is none to use

 private:
  enum class State { kNone, kLiningUp, kHeld, kEnding };  // kEnding: held, but no more blocks enter

  Entry enter_in_turn();
  void acquire(std::unique_lock<std::mutex>* lock);
  bool first_in_line();
  bool line_up();
  bool others_wait();
  void end_turn();
  void leave_line();
  bool check(const Status& status);

  const Options options_;
  const int64_t gate_;
  const int64_t line_begin_, line_end_;
  std::atomic<bool> exclusive_{false};
  std::atomic<bool> held_{false};  // state_ is kHeld or kEnding; spares rest() the mutex

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  LockFile file_;
  std::string error_;
  State state_ = State::kNone;
  int64_t place_ = -1;  // the byte that is locked in the line, or -1
  int64_t ahead_ = -1;  // a byte that somebody before has locked, or -1
  bool stopped_ = false;
  int waiting_ = 0;  // threads in enter()
  int inside_ = 0;   // threads between enter() and leave()
  double asked_s_ = 0, lined_up_s_ = 0, begin_s_ = 0;
  TurnStats stats_;
};

}  // namespace jmo
