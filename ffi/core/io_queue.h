// The queue and the threads of one direction (reads or writes) of a tier: what is private to io.cc.
//
// 1. Jobs wait in the order in which they came. A thread takes the first piece of work that there is: to
//    open a job's file, or one block of a job whose file is open. A job that another thread is opening is
//    passed over. So several blocks of a job and of the next ones are in flight, and there are never more
//    open files than threads.
// 2. A piece that fails drops the blocks of its job that nobody has taken; the first error is the job's.
// 3. The thread that ends a job's last piece finishes it and calls `done`, without any lock.
// 4. While turns are taken (turn.h), blocks wait for the turn, and a file is opened ahead where fewer than
//    `threads` jobs with blocks left are open: so the turn finds blocks of the next job when those of the
//    last one are taken. It is given up when no job is left but those with an injected delay, and after each
//    block of a limited queue, as the device would stand still until the next may begin. Twice as many files
//    as threads may be open then.
// 5. stop() drops all blocks that nobody has taken and wakes the threads that wait for bandwidth; jobs so
//    cut end with kClosed, by the same way. close() also waits for the transfers that are under way, and
//    joins.
// What always holds: a job is in `queue_` exactly while it has a piece that nobody has taken; `done` is
// called once a job.
// Thread contract: submit, stop and close from any thread; close not from `done`.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/core/io.h"
#include "ffi/core/record_file.h"
#include "ffi/core/token_bucket.h"
#include "ffi/core/turn.h"

namespace jmo {

class IoQueue {
 public:
  struct Options {
    bool is_write = false;
    double limit_bps = 0;  // 0 = unlimited
    int threads = 1;
    size_t block_size = kDirectAlign;
    DeviceTurn::Options turn;
  };

  // `direct` and `done` outlive the queue.
  IoQueue(const Options& options, std::atomic<bool>* direct, const TierIo::Done& done);
  ~IoQueue();
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;

  // After stop() the job ends at once, in the calling thread.
  void submit(const IoJob& job);
  void stop();
  void close();

  void set_exclusive(bool on) { turn_.set_exclusive(on); }
  const DeviceTurn& turn() const { return turn_; }

 private:
  enum class Phase { kQueued, kDelayed, kOpening, kOpen };
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;

  void run();
  EntryPtr first_free();
  EntryPtr next_in_turn();
  void work_on(const EntryPtr& entry, std::unique_lock<std::mutex>* lock);
  Status open(Entry* entry);
  Status transfer(Entry* entry, size_t block);
  static Status closed_first(const Entry& entry);
  void end_piece(const EntryPtr& entry, const Status& status, std::unique_lock<std::mutex>* lock);
  void fail(const EntryPtr& entry, const Status& status);
  void leave_queue(const EntryPtr& entry);
  void finish(Entry* entry);
  bool pause(Entry* entry, double delay_s);
  void rest_if_idle();

  const Options options_;
  std::atomic<bool>* const direct_;
  const TierIo::Done& done_;
  TokenBucket bucket_;
  DeviceTurn turn_;

  std::mutex mutex_;  // guards what follows, and the entries' bookkeeping
  std::condition_variable work_changed_;
  std::condition_variable closing_changed_;
  std::deque<EntryPtr> queue_;
  bool closing_ = false;

  std::mutex join_mutex_;  // so that a second close() returns only when the threads are gone
  std::vector<std::thread> threads_;
};

}  // namespace jmo
