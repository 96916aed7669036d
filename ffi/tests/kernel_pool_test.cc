// The pool of kernel threads: the same bits for every number of threads, many jobs at once, close;
// measure_stream.
#include "ffi/core/kernel_pool.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/core/update.h"
#include "ffi/tests/check.h"
#include "ffi/tests/kernel_fixture.h"

namespace {

using namespace kernel_fixture;

// One job of several states, some empty or tiny, through a pool.
void run_pool(jmo::KernelPool& pool, std::vector<State>& states, const float* hyper, bool fresh,
              int64_t adopted) {
  jmo::UpdateJob job;
  job.spec = states[0].what.spec;
  job.hyper = hyper;
  job.fresh = fresh;
  for (State& state : states) job.segments.push_back(state.segment());
  std::promise<jmo::UpdateResult> promise;
  pool.submit(std::move(job), [&](jmo::UpdateResult result) { promise.set_value(std::move(result)); });
  const jmo::UpdateResult result = promise.get_future().get();
  CHECK_EQ(result.adopted_cells.size(), states.size());
  int64_t total = 0;
  for (int64_t count : result.adopted_cells) total += count;
  CHECK_EQ(total, adopted);
  CHECK(result.end_s >= result.start_s && result.start_s > 0);
}

void test_pool() {
  const int64_t counts[] = {0, 1, 70000, 4096, 0, 5, 300001, 4097, 131072, 0};
  for (const DType type : {DType::kF32, DType::kBF16}) {
    const Case what{{jmo::Rule::kAdam, type, DType::kF32, DType::kF32, true, false}, type, true};
    std::vector<State> states;
    Random random(99);
    int64_t cells = 0;
    for (int64_t count : counts) {
      states.emplace_back(what, count, 1);
      fill(states.back().param, random, count);
      fill(states.back().grad, random, count);
      cells += jmo::cells_of(count);
    }
    std::vector<float> hyper = hyper_for(what.spec, 3);
    std::vector<State> expected = states;
    for (State& state : expected)
      jmo::update_run(what.spec, hyper.data(), state.segment(), 0, state.count, true);
    for (int threads : {1, 2, 3, 7}) {
      jmo::KernelPool pool(threads);
      CHECK_EQ(pool.threads(), threads);
      std::vector<State> got = states;
      run_pool(pool, got, hyper.data(), true, 0);
      for (size_t i = 0; i < got.size(); ++i)
        CHECK(got[i] == expected[i] && got[i].cells == expected[i].cells);
      for (State& state : got) state.cells.assign(state.cells.size(), 1u);  // as if all params were foreign
      run_pool(pool, got, hyper.data(), false, type == DType::kF32 ? 0 : cells);
    }
  }
}

// Many jobs at once, jobs without elements, functions, submissions from `done`, and a close that finishes
// them all.
void test_pool_queue() {
  const Case what{{jmo::Rule::kAdam, DType::kF32, DType::kF32, DType::kF32, true, false}, DType::kF32, false};
  const std::vector<float> hyper = hyper_for(what.spec, 0);
  std::vector<State> states(40, State(what, 100000, 0));
  std::atomic<int> done{0}, functions{0}, chained{0};
  jmo::KernelPool pool(3);
  for (size_t i = 0; i < states.size(); ++i) {
    jmo::UpdateJob job;
    job.spec = what.spec;
    job.hyper = hyper.data();
    job.fresh = true;
    if (i % 8 != 7) job.segments.push_back(states[i].segment());
    pool.submit(std::move(job), [&](jmo::UpdateResult) {
      ++done;
      pool.run([&] { ++chained; });
    });
    pool.run([&] { ++functions; });
  }
  std::thread other([&] { pool.close(); });
  pool.close();
  other.join();
  pool.close();
  CHECK_EQ(done.load(), 40);
  CHECK_EQ(functions.load(), 40);
  CHECK_EQ(chained.load(), 40);
}

void test_stream() {
  const jmo::StreamResult result = jmo::measure_stream(6u << 20, 2, 2);
  CHECK(result.triad_bps > 0 && result.copy_bps > 0 && result.update_bps > 0);
}

}  // namespace

int main() {
  jmo::set_flush_denormals();
  test_pool();
  test_pool_queue();
  test_stream();
  std::printf("kernel_pool_test: ok\n");
  return 0;
}
