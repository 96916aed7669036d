// The memory bandwidth that the update could reach here: STREAM-like passes with real threads.
//
// What always holds: each thread touches, and then uses, its own part of each array, so that its pages are
// near it; bytes are those that the pattern moves, without the reads for ownership that a plain store costs.
// Thread contract: measure_stream may be called from any thread; run nothing else meanwhile, or it measures
// that too.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

#include "ffi/core/io.h"
#include "ffi/core/kernel_pool.h"

namespace jmo {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

// Fresh pages, huge where the system grants it. Empty if there is no memory.
class Pages {
 public:
  explicit Pages(size_t size) : size_(size) {
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    (void)madvise(memory, size, MADV_HUGEPAGE);
    data_ = static_cast<float*>(memory);
  }
  ~Pages() {
    if (data_ != nullptr) munmap(data_, size_);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  float* data() const { return data_; }

 private:
  size_t size_;
  float* data_ = nullptr;
};

struct Arrays {
  float* a;
  float* b;
  float* c;
  size_t count;  // floats in each
};

void triad(const Arrays& x) {
#pragma GCC ivdep
  for (size_t i = 0; i < x.count; ++i) x.a[i] = x.b[i] + 3.0f * x.c[i];
}
void copy(const Arrays& x) {
#pragma GCC ivdep
  for (size_t i = 0; i < x.count; ++i) x.a[i] = x.b[i];
}
void update(const Arrays& x) {
#pragma GCC ivdep
  for (size_t i = 0; i < x.count; ++i) x.a[i] = 0.5f * x.a[i] + x.b[i];
}

// Lets all threads of a pass start together.
class Barrier {
 public:
  explicit Barrier(int parties) : parties_(parties) {}
  void wait() {  // spins, since a sleeping thread starts late
    const int round = round_.load();
    if (arrived_.fetch_add(1) + 1 == parties_) {
      arrived_ = 0;
      round_ = round + 1;
      return;
    }
    while (round_.load() == round) std::this_thread::yield();
  }

 private:
  const int parties_;
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
};

constexpr int kPatterns = 3;
using Pattern = void (*)(const Arrays&);
constexpr Pattern kRun[kPatterns] = {triad, copy, update};
constexpr double kBytesPerElement[kPatterns] = {12, 8, 12};

// One thread's share: touches its part of all arrays, then runs each pattern `repeats` times and leaves, for
// each pass, when it began and ended.
struct Share {
  Arrays arrays;
  std::vector<double> start_s, end_s;  // [pattern * repeats + repeat]
};

void run_share(Share* share, int repeats, Barrier* barrier) {
  set_flush_denormals();
  for (float* array : {share->arrays.a, share->arrays.b, share->arrays.c}) {
    std::fill_n(array, share->arrays.count, 1.0f);
  }
  for (const Pattern pattern : kRun) {
    for (int repeat = 0; repeat < repeats; ++repeat) {
      barrier->wait();
      share->start_s.push_back(now_s());
      pattern(share->arrays);
      share->end_s.push_back(now_s());
    }
  }
}

double best_bps(const std::vector<Share>& shares, int pattern, int repeats) {
  double elements = 0;
  for (const Share& share : shares) elements += static_cast<double>(share.arrays.count);
  double best_s = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const size_t pass = static_cast<size_t>(pattern * repeats + repeat);
    double start_s = shares[0].start_s[pass];
    double end_s = shares[0].end_s[pass];
    for (const Share& share : shares) {
      start_s = std::min(start_s, share.start_s[pass]);
      end_s = std::max(end_s, share.end_s[pass]);
    }
    if (repeat == 0 || end_s - start_s < best_s) best_s = end_s - start_s;
  }
  return best_s > 0 ? elements * kBytesPerElement[pattern] / best_s : 0;
}

}  // namespace

StreamResult measure_stream(size_t bytes, int threads, int repeats) {
  threads = std::max(threads, 1);
  repeats = std::max(repeats, 1);
  // Parts begin at page boundaries, so that no two threads touch one page.
  const size_t part = std::max(bytes / 3 / static_cast<size_t>(threads) / kPage, size_t{1}) * kPage;
  const size_t size = (part * static_cast<size_t>(threads) + kHugePage - 1) / kHugePage * kHugePage;
  const Pages a(size), b(size), c(size);
  if (a.data() == nullptr || b.data() == nullptr || c.data() == nullptr) return {0, 0, 0};

  std::vector<Share> shares(static_cast<size_t>(threads));
  Barrier barrier(threads);
  std::vector<std::thread> workers;
  for (size_t i = 0; i < shares.size(); ++i) {
    const size_t first = i * part / sizeof(float);
    shares[i].arrays = {a.data() + first, b.data() + first, c.data() + first, part / sizeof(float)};
    shares[i].start_s.reserve(static_cast<size_t>(kPatterns * repeats));
    shares[i].end_s.reserve(static_cast<size_t>(kPatterns * repeats));
    workers.emplace_back(run_share, &shares[i], repeats, &barrier);
  }
  for (std::thread& worker : workers) worker.join();
  return {best_bps(shares, 0, repeats), best_bps(shares, 1, repeats), best_bps(shares, 2, repeats)};
}

}  // namespace jmo
