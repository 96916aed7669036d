// See io_queue.h, also for the thread contract.
#include "ffi/core/io_queue.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>

#include "ffi/core/fault.h"

namespace jmo {
namespace {

// Signals are for the threads of the program. It also keeps SIGXFSZ, which a write beyond RLIMIT_FSIZE sends
// to the writing thread, from ending the process: the write fails with EFBIG as well.
void become_io_thread(bool is_write) {
  sigset_t blocked;
  sigfillset(&blocked);
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&blocked, number);
  (void)pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  (void)pthread_setname_np(pthread_self(), is_write ? "jmo-write" : "jmo-read");
}

}  // namespace

struct IoQueue::Entry {
  Entry(const IoJob& job, const Options& options, std::atomic<bool>* direct)
      : file(job, options.is_write, options.block_size, direct) {}

  RecordFile file;
  Phase phase = Phase::kQueued;
  size_t next_block = 0;  // blocks before this one are taken
  size_t in_flight = 0;   // pieces taken and not ended
  Status status;          // the first error
  double start_s = 0;     // written by the thread that takes up the job, then by the one that has block 0
};

IoQueue::IoQueue(const Options& options, std::atomic<bool>* direct, const TierIo::Done& done)
    : options_(options), direct_(direct), done_(done), bucket_(options.limit_bps), turn_(options.turn) {
  try {
    for (int index = 0; index < options.threads; ++index) threads_.emplace_back([this] { run(); });
  } catch (...) {  // no more threads to be had: those that run must be joined before the members go
    close();
    throw;
  }
}

IoQueue::~IoQueue() { close(); }

void IoQueue::submit(const IoJob& job) {
  auto entry = std::make_shared<Entry>(job, options_, direct_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_) {
      queue_.push_back(std::move(entry));
      work_changed_.notify_one();
      return;
    }
  }
  entry->start_s = now_s();
  fail(entry, Status(Code::kClosed, entry->file.what() + ": the tier is closed"));
  finish(entry.get());
}

void IoQueue::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    work_changed_.notify_all();
    closing_changed_.notify_all();
  }
  bucket_.close();
  turn_.stop();
}

void IoQueue::close() {
  stop();
  std::lock_guard<std::mutex> join_lock(join_mutex_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  turn_.close();
}

void IoQueue::run() {
  become_io_thread(options_.is_write);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    EntryPtr entry = turn_.exclusive() ? next_in_turn() : first_free();
    if (entry != nullptr) {
      work_on(entry, &lock);
    } else if (closing_) {
      return;  // a job that is being opened is ended by the thread that opens it
    } else {
      rest_if_idle();
      work_changed_.wait(lock);
    }
  }
}

// The first job with a piece of work to take. At most one job a thread is being opened, so this looks at few.
IoQueue::EntryPtr IoQueue::first_free() {
  for (const EntryPtr& entry : queue_)
    if (entry->phase == Phase::kQueued || entry->phase == Phase::kOpen) return entry;
  return nullptr;
}

// As first_free, but opens the next file ahead. Those that are not open lie behind those that are.
IoQueue::EntryPtr IoQueue::next_in_turn() {
  EntryPtr block_of;
  int opened = 0;
  for (const EntryPtr& entry : queue_) {
    if (entry->phase == Phase::kQueued) return opened < options_.threads ? entry : block_of;
    ++opened;
    if (entry->phase == Phase::kOpen && block_of == nullptr) block_of = entry;
  }
  return block_of;
}

void IoQueue::work_on(const EntryPtr& entry, std::unique_lock<std::mutex>* lock) {
  ++entry->in_flight;
  if (entry->phase == Phase::kQueued) entry->start_s = now_s();
  if (closing_) {
    end_piece(entry, closed_first(*entry), lock);
  } else if (entry->phase == Phase::kQueued) {
    entry->phase = Phase::kOpening;
    lock->unlock();
    const Status status = open(entry.get());
    lock->lock();
    entry->phase = Phase::kOpen;
    work_changed_.notify_all();
    end_piece(entry, status, lock);
  } else {
    const size_t block = entry->next_block++;
    if (entry->next_block == entry->file.block_count()) leave_queue(entry);
    lock->unlock();
    const Status status = transfer(entry.get(), block);
    lock->lock();
    end_piece(entry, status, lock);
  }
}

Status IoQueue::open(Entry* entry) {
  const FaultOutcome fault = draw_fault(entry->file.job().path, options_.is_write);
  if (fault.delay_s > 0 && !pause(entry, fault.delay_s)) return closed_first(*entry);
  if (Status status = entry->file.open(); !status.ok()) return status;
  return fault_status(fault, entry->file.what());
}

Status IoQueue::transfer(Entry* entry, size_t block) {
  const TokenBucket::Booking booking = bucket_.reserve(entry->file.block_bytes(block));
  if (!bucket_.wait_until(booking.begin_s)) return closed_first(*entry);
  const DeviceTurn::Entry entered = turn_.enter();
  if (entered == DeviceTurn::Entry::kStopped) return closed_first(*entry);
  if (entered == DeviceTurn::Entry::kInTurn && block == 0) entry->start_s = now_s();
  Status status = entry->file.transfer(block);
  if (entered == DeviceTurn::Entry::kInTurn) turn_.leave(options_.limit_bps <= 0);
  (void)bucket_.wait_until(booking.end_s);  // the bytes are moved: closing now changes nothing
  return status;
}

Status IoQueue::closed_first(const Entry& entry) {
  return Status(Code::kClosed, entry.file.what() + ": the tier was closed first");
}

void IoQueue::end_piece(const EntryPtr& entry, const Status& status, std::unique_lock<std::mutex>* lock) {
  if (!status.ok()) fail(entry, status);
  --entry->in_flight;
  if (entry->in_flight > 0 || entry->next_block < entry->file.block_count()) return;
  lock->unlock();
  finish(entry.get());
  lock->lock();
}

void IoQueue::fail(const EntryPtr& entry, const Status& status) {
  if (entry->status.ok()) entry->status = status;
  if (entry->next_block == entry->file.block_count()) return;
  entry->next_block = entry->file.block_count();
  leave_queue(entry);
}

void IoQueue::leave_queue(const EntryPtr& entry) {
  const auto place = std::find(queue_.begin(), queue_.end(), entry);
  if (place != queue_.end()) queue_.erase(place);
}

void IoQueue::finish(Entry* entry) {
  IoResult result;
  if (entry->status.ok()) entry->status = entry->file.finish(&result.crc);
  entry->file.abandon();
  result.token = entry->file.job().token;
  result.is_write = options_.is_write;
  result.status = entry->status;
  result.size = entry->file.job().size;
  result.start_s = entry->start_s;
  result.end_s = now_s();
  result.free_bytes = entry->file.free_bytes();
  done_(result);
}

// Sleeps for an injected delay. False: closing.
bool IoQueue::pause(Entry* entry, double delay_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  entry->phase = Phase::kDelayed;
  rest_if_idle();
  const std::chrono::duration<double> delay(delay_s);
  const bool closing = closing_changed_.wait_for(lock, delay, [&] { return closing_; });
  entry->phase = Phase::kOpening;
  return !closing;
}

// Gives up the turn if no thread is about to transfer a block. A file that is being opened is as good as a
// block: it takes microseconds, and a turn that ended there would not be worth its change.
void IoQueue::rest_if_idle() {
  for (const EntryPtr& entry : queue_)
    if (entry->phase != Phase::kDelayed) return;
  turn_.rest();
}

}  // namespace jmo
