// The threads of the fused update and the pieces they take.
//
// 1. The cells of a job's segments are numbered through; a piece is kPieceCells consecutive ones, so it may
//    end one segment and begin the next (small leaves do not cost a piece each).
// 2. The queue holds jobs that still have untaken pieces, and functions, in the order of submission. A thread
//    takes the next piece of the first entry; the thread that takes the last piece removes the entry, so that
//    the others go on with the next job while this one is finished.
// 3. The thread that finishes a job's last piece calls `done`.
//
// What always holds: each piece is run once, each `done` is called once, and neither is called with the lock
// held.
//
// Thread contract: as kernel_pool.h says. In a closed pool a submission is a bug of the caller and ends the
// process.
#include "ffi/core/kernel_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "ffi/core/io.h"

namespace jmo {
namespace {

// 64 Ki elements: long enough (40 us and more) that taking a piece costs nothing, short enough that threads
// end together.
constexpr int64_t kPieceCells = 16;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "jmo::KernelPool: %s\n", what);
  std::abort();
}

// A job under way, or a plain function (pieces == 1, no segments).
struct Entry {
  UpdateJob job;
  KernelPool::Done done;
  std::function<void()> work;

  std::vector<int64_t> first_cell;  // per segment, and the total at the end
  int64_t pieces = 1;
  int64_t taken = 0;             // under the pool's lock
  std::atomic<int64_t> left{1};  // pieces not finished
  std::vector<std::atomic<int64_t>> adopted;
  double start_s = 0;  // written by the first piece's thread before it takes the piece
};

using EntryPtr = std::shared_ptr<Entry>;

EntryPtr make_entry(UpdateJob job, KernelPool::Done done) {
  auto entry = std::make_shared<Entry>();
  entry->first_cell.push_back(0);
  for (const Segment& segment : job.segments) {
    entry->first_cell.push_back(entry->first_cell.back() + cells_of(segment.count));
  }
  // A job without elements has one empty piece: `done` comes from a kernel thread all the same.
  entry->pieces = std::max<int64_t>((entry->first_cell.back() + kPieceCells - 1) / kPieceCells, 1);
  entry->left = entry->pieces;
  entry->adopted = std::vector<std::atomic<int64_t>>(job.segments.size());
  entry->job = std::move(job);
  entry->done = std::move(done);
  return entry;
}

// Updates the cells [piece * kPieceCells, + kPieceCells) of the job, segment by segment.
void run_piece(Entry& entry, int64_t piece) {
  const std::vector<int64_t>& first = entry.first_cell;
  int64_t cell = piece * kPieceCells;
  const int64_t end = std::min(cell + kPieceCells, first.back());
  size_t index = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), cell) - first.begin()) - 1;
  for (; cell < end; ++index) {
    const Segment& segment = entry.job.segments[index];
    const int64_t stop = std::min(end, first[index + 1]);
    const int64_t from = (cell - first[index]) * kCellElements;
    const int64_t to = std::min((stop - first[index]) * kCellElements, segment.count);
    if (from >= to) continue;  // a segment without elements
    const int64_t adopted = update_run(entry.job.spec, entry.job.hyper, segment, from, to, entry.job.fresh);
    if (adopted != 0) entry.adopted[index].fetch_add(adopted, std::memory_order_relaxed);
    cell = stop;
  }
}

void finish(Entry& entry) {
  UpdateResult result;
  result.adopted_cells.reserve(entry.adopted.size());
  for (const auto& count : entry.adopted)
    result.adopted_cells.push_back(count.load(std::memory_order_relaxed));
  result.start_s = entry.start_s;
  result.end_s = now_s();
  if (entry.done) entry.done(std::move(result));
}

}  // namespace

class KernelPool::Impl {
 public:
  explicit Impl(int threads) {
    for (int i = 0; i < std::max(threads, 1); ++i) workers_.emplace_back([this] { work(); });
  }

  void push(EntryPtr entry) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) die("work was submitted after close()");
      queue_.push_back(std::move(entry));
    }
    wake_.notify_all();  // a job has pieces for all
  }

  void close() {
    if (in_pool == this) die("close() was called from a kernel thread");
    const std::lock_guard<std::mutex> closing(close_mutex_);  // a second caller waits for the first
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) {
      if (worker.joinable()) worker.join();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }

  int threads() const { return static_cast<int>(workers_.size()); }

 private:
  // The pool whose thread this is. (Ids of threads that have ended are given to others.)
  static thread_local const Impl* in_pool;

  // The next piece, or a null entry when the pool closes and nothing is left. While a piece is under way its
  // `done` may submit more, so the other threads stay until it has ended.
  std::pair<EntryPtr, int64_t> take() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return !queue_.empty() || (closing_ && running_ == 0); });
    if (queue_.empty()) return {nullptr, 0};
    EntryPtr entry = queue_.front();
    const int64_t piece = entry->taken++;
    if (piece == 0) entry->start_s = now_s();
    if (entry->taken == entry->pieces) queue_.pop_front();
    ++running_;
    return {std::move(entry), piece};
  }

  void end_piece() {
    bool last = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      last = --running_ == 0 && closing_;
    }
    if (last) wake_.notify_all();
  }

  void work() {
    in_pool = this;
    set_flush_denormals();
    for (;;) {
      auto [entry, piece] = take();
      if (entry == nullptr) return;
      if (entry->work) {
        entry->work();
      } else {
        run_piece(*entry, piece);
        if (entry->left.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(*entry);
      }
      entry.reset();  // what the callbacks hold goes before the pool may count as idle
      end_piece();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<EntryPtr> queue_;  // entries with untaken pieces
  int running_ = 0;             // pieces and functions under way
  bool closing_ = false;
  bool closed_ = false;
  std::mutex close_mutex_;
  std::vector<std::thread> workers_;
};

thread_local const KernelPool::Impl* KernelPool::Impl::in_pool = nullptr;

KernelPool::KernelPool(int threads) : impl_(std::make_unique<Impl>(threads)) {}
KernelPool::~KernelPool() { close(); }

void KernelPool::submit(UpdateJob job, Done done) {
  impl_->push(make_entry(std::move(job), std::move(done)));
}

void KernelPool::run(std::function<void()> work) {
  auto entry = std::make_shared<Entry>();
  entry->work = std::move(work);
  impl_->push(std::move(entry));
}

void KernelPool::close() { impl_->close(); }
int KernelPool::threads() const { return impl_->threads(); }

}  // namespace jmo
