// Threads that run the fused update. A job is one subgroup: its segments are cut into pieces at cell
// boundaries, which all threads of the pool take in turn, so that one large record is updated at the speed of
// all of them. Thread contract: submit may be called from any thread; `done` is called once a job, from a
// kernel thread, and must not block. close() finishes what was submitted and joins; it is idempotent. The
// segments' memory must outlive `done`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ffi/core/status.h"
#include "ffi/core/update.h"

namespace jmo {

struct UpdateJob {
  RuleSpec spec;
  const float* hyper = nullptr;
  std::vector<Segment> segments;
  bool fresh = false;
};

struct UpdateResult {
  Status status;                       // not ok only where operands had to be moved
  std::vector<int64_t> adopted_cells;  // per segment
  double start_s = 0;
  double end_s = 0;
};

class KernelPool {
 public:
  using Done = std::function<void(UpdateResult)>;
  explicit KernelPool(int threads);
  ~KernelPool();
  KernelPool(const KernelPool&) = delete;
  KernelPool& operator=(const KernelPool&) = delete;

  void submit(UpdateJob job, Done done);
  // Runs any function on a kernel thread (old params handed back after a failure, zero updates).
  void run(std::function<void()> work);
  void close();
  int threads() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Best of `repeats` STREAM-like passes over `bytes` of pre-touched memory with `threads` threads, in bytes/s
// moved. Patterns: triad (2 reads, 1 write), copy, and read-modify-write of the kind that an optimizer does.
struct StreamResult {
  double triad_bps, copy_bps, update_bps;
};
StreamResult measure_stream(size_t bytes, int threads, int repeats);

// Best of `repeats` passes of Adam over `elements` pre-touched elements with f32 moments, in seconds, without
// I/O or XLA. `param` and `grad` are DTypes as numbers. For benchmarks.
double time_kernel(int64_t elements, int param, int grad, int threads, int repeats, bool decay);

}  // namespace jmo
