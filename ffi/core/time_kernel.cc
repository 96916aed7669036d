#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "ffi/core/io.h"
#include "ffi/core/kernel_pool.h"
#include "ffi/core/slots.h"

namespace jmo {
namespace {

double run_once(KernelPool& pool, const UpdateJob& job) {
  std::mutex mutex;
  std::condition_variable ready;
  bool done = false;
  const double start_s = now_s();
  pool.submit(job, [&](UpdateResult) {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    ready.notify_one();
  });
  std::unique_lock<std::mutex> lock(mutex);
  ready.wait(lock, [&] { return done; });
  return now_s() - start_s;
}

}  // namespace

double time_kernel(int64_t elements, int param, int grad, int threads, int repeats, bool decay) {
  static const float hyper[kAdamHyperCount] = {-1e-3f, 0.9f,  0.1f, 0.999f, 0.001f, 1e-8f,
                                               0,      0.01f, 0.1f, 0.001f, 0.19f,  0.9f};
  Segment segment;
  segment.grad_type = static_cast<DType>(grad);
  segment.count = elements;
  segment.decay = decay;
  UpdateJob job;
  job.spec.param = static_cast<DType>(param);
  job.hyper = hyper;
  const bool split = job.spec.param != DType::kF32;
  // all operands in one touched arena, each on its own page
  const size_t sizes[] = {elements * size_of(segment.grad_type),
                          elements * size_of(job.spec.param),
                          elements * size_of(job.spec.param),
                          elements * sizeof(float),
                          elements * sizeof(float),
                          split ? elements * sizeof(float) : 0,
                          split ? cells_of(elements) * sizeof(uint32_t) : 0};
  size_t total = 0;
  for (size_t size : sizes) total += (size + 8191) / 4096 * 4096;
  Slots arena(1, total, threads);
  if (!arena.status().ok()) return -1;
  char* at = arena.slot(0);
  char* parts[7];
  for (int i = 0; i < 7; ++i) {
    parts[i] = at;
    at += (sizes[i] + 8191) / 4096 * 4096;
  }
  std::memset(arena.slot(0), 0x3c, total);  // every operand an ordinary number
  segment.grad = parts[0];
  segment.param = parts[1];
  segment.out = parts[2];
  segment.mu = parts[3];
  segment.nu = parts[4];
  if (split) {
    segment.master = parts[5];
    segment.cells = reinterpret_cast<uint32_t*>(parts[6]);
  }
  job.segments.push_back(segment);
  KernelPool pool(threads);
  job.fresh = true;
  run_once(pool, job);
  job.fresh = false;
  double best_s = 0;
  for (int i = 0; i < repeats; ++i) {
    if (split) {  // the params are the last pass's results, as in training: else every cell would be adopted
      void* old = const_cast<void*>(job.segments[0].param);
      job.segments[0].param = job.segments[0].out;
      job.segments[0].out = old;
    }
    const double took_s = run_once(pool, job);
    best_s = i == 0 ? took_s : std::min(best_s, took_s);
  }
  pool.close();
  return best_s;
}

}  // namespace jmo
