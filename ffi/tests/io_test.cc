// Transfers of TierIo on a real file system: sizes, alignments, order, many at once, limits, close().
// Usage: io_test [FOLDER]
#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "ffi/core/fault.h"
#include "ffi/tests/io_fixture.h"

namespace jmo_test {
namespace {

using jmo::Code;
using jmo::IoResult;
using jmo::TierIo;
using jmo::TierOptions;

constexpr size_t kBlock = 64u << 10;

TierOptions small_blocks(bool direct) {
  TierOptions options;
  options.block_size = kBlock;
  options.direct = direct;
  return options;
}

std::vector<size_t> sizes() {
  std::vector<size_t> all = {0, 1, 2, 511, 512, 513, 4095, 4096, 4097, 8192, (5u << 20) + 4321, 3u << 20};
  for (size_t blocks : {1, 2})
    for (int delta : {-2, -1, 0, 1, 2}) all.push_back(blocks * kBlock + static_cast<size_t>(delta));
  return all;
}

void round_trip(const std::string& path, size_t size, size_t misalign, const TierOptions& options) {
  Memory out(size, misalign);
  out.fill(size + misalign);
  const IoResult written = run_one(options, make_job(path, &out, 7), true);
  check_ok(written);
  CHECK_EQ(written.crc, out.crc());
  CHECK_EQ(size_on_disk(path), size);
  CHECK(read_plain(path) == std::string(out.data(), size));  // the page cache agrees with O_DIRECT

  Memory in(size, misalign);
  const IoResult read = run_one(options, make_job(path, &in, 8, out.crc()), false);
  check_ok(read);
  CHECK_EQ(read.crc, out.crc());
  CHECK(std::memcmp(in.data(), out.data(), size) == 0);
  CHECK(in.guard_intact());

  Memory now(size, misalign);
  const IoResult read_now = jmo::read_now(make_job(path, &now, 9, out.crc()), options.direct);
  check_ok(read_now);
  CHECK_EQ(read_now.token, uint64_t{9});
  CHECK_EQ(read_now.crc, out.crc());
  CHECK(std::memcmp(now.data(), out.data(), size) == 0);
  CHECK(now.guard_intact());
}

// In ascending and descending order of size on one path, so that files grow, shrink and are overwritten in
// place.
void test_sizes_and_alignments(const TempDir& folder) {
  std::vector<size_t> order = sizes();
  std::sort(order.begin(), order.end());
  for (bool direct : {true, false}) {
    for (size_t misalign : {size_t{0}, size_t{1}, size_t{64}, size_t{512}}) {
      for (size_t size : order) round_trip(folder.file("record"), size, misalign, small_blocks(direct));
      for (auto size = order.rbegin(); size != order.rend(); ++size)
        round_trip(folder.file("record"), *size, misalign, small_blocks(direct));
    }
  }
  TierOptions odd = small_blocks(true);
  odd.block_size = 5000;  // rounded up to 8192
  odd.threads = 5;
  round_trip(folder.file("odd"), 1000001, 0, odd);
  odd.block_size = 0;
  odd.threads = 0;
  round_trip(folder.file("odd"), 20000, 0, odd);
}

void test_mode_and_overwrite_in_place(const TempDir& folder) {
  const std::string path = folder.file("in-place");
  Memory memory(1u << 20);
  memory.fill(1);
  check_ok(run_one(TierOptions(), make_job(path, &memory), true));
  struct stat before, after;
  CHECK_EQ(::stat(path.c_str(), &before), 0);
  CHECK_EQ(before.st_mode & 07777, mode_t{0600});
  memory.fill(2);
  check_ok(run_one(TierOptions(), make_job(path, &memory), true));
  CHECK_EQ(::stat(path.c_str(), &after), 0);
  CHECK_EQ(before.st_ino, after.st_ino);
  CHECK_EQ(before.st_blocks, after.st_blocks);
  CHECK(read_plain(path) == std::string(memory.data(), memory.size()));
}

// Several threads hand over writes, then reads, of records that differ; every one comes back once and right.
void test_many_in_flight(const TempDir& folder) {
  constexpr size_t kThreads = 4, kPerThread = 12, kCount = kThreads * kPerThread;
  std::vector<std::unique_ptr<Memory>> out, in;
  for (size_t i = 0; i < kCount; ++i) {
    out.push_back(std::make_unique<Memory>(200000 + 4321 * i % 90000));
    out.back()->fill(i);
    in.push_back(std::make_unique<Memory>(out.back()->size()));
  }
  const size_t files_before = open_files();
  Results results;
  TierIo tier(small_blocks(true), results.collector());
  const auto from_threads = [&](const auto& submit) {
    std::vector<std::thread> threads;
    for (size_t t = 0; t < kThreads; ++t)
      threads.emplace_back([&submit, t] {
        for (size_t i = t * kPerThread; i < (t + 1) * kPerThread; ++i) submit(i);
      });
    for (std::thread& thread : threads) thread.join();
  };
  const auto path = [&](size_t i) { return folder.file("many" + std::to_string(i)); };
  from_threads([&](size_t i) { tier.write(make_job(path(i), out[i].get(), i)); });
  CHECK(open_files() <= files_before + 2);  // one descriptor an I/O thread
  for (const IoResult& result : results.wait(kCount)) {
    check_ok(result);
    CHECK_EQ(result.crc, out[result.token]->crc());
  }
  from_threads([&](size_t i) { tier.read(make_job(path(i), in[i].get(), kCount + i, out[i]->crc())); });
  for (const IoResult& result : results.wait(2 * kCount)) check_ok(result);
  for (size_t i = 0; i < kCount; ++i) CHECK(std::memcmp(in[i]->data(), out[i]->data(), in[i]->size()) == 0);
  CHECK_EQ(open_files(), files_before);
}

// A record is overwritten and read again many times by one chain of callbacks, as an engine does.
void test_reads_see_the_last_write(const TempDir& folder) {
  const std::string path = folder.file("chain");
  for (size_t size : {size_t{3} * kBlock, size_t{3} * kBlock + 77}) {
    Results results;
    TierIo tier(small_blocks(true), results.collector());
    for (uint64_t round = 0; round < 20; ++round) {
      Memory out(size), in(size);
      out.fill(round);
      tier.write(make_job(path, &out, 2 * round));
      check_ok(results.wait(2 * round + 1).back());
      tier.read(make_job(path, &in, 2 * round + 1, out.crc()));
      check_ok(results.wait(2 * round + 2).back());
      CHECK(std::memcmp(in.data(), out.data(), size) == 0);
    }
  }
}

void test_close_ends_every_job_once(const TempDir& folder) {
  Memory memory(4 * kBlock);
  TierOptions options = small_blocks(true);
  options.write_limit_bps =
      4e6;  // so that close() comes while jobs wait for bandwidth: 60 of them would take 16 s
  Results results;
  TierIo tier(options, results.collector());
  for (uint64_t i = 0; i < 60; ++i)
    tier.write(make_job(folder.file("closed" + std::to_string(i)), &memory, i));
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  const double start_s = jmo::now_s();
  std::thread other([&] { tier.close(); });
  tier.close();
  CHECK(jmo::now_s() - start_s < 5);
  other.join();
  size_t closed = 0;
  for (const IoResult& result : results.wait(60)) {
    if (result.status.code() == Code::kClosed) {
      ++closed;
      check_contains(result.status.message(), folder.file("closed"));
    } else {
      check_ok(result);
    }
  }
  CHECK(closed > 0);
  tier.read(make_job(folder.file("closed0"), &memory, 60));
  CHECK_EQ(results.wait(61).back().status.code(), Code::kClosed);
  tier.close();
}

void test_close_while_others_submit(const TempDir& folder) {
  constexpr uint64_t kThreads = 3, kPerThread = 40;
  Memory memory(kBlock);
  Results results;
  TierIo tier(small_blocks(true), results.collector());
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kPerThread; ++i)
        tier.write(make_job(folder.file("race" + std::to_string(t)), &memory, t * kPerThread + i));
    });
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  tier.close();
  for (std::thread& thread : threads) thread.join();
  for (const IoResult& result : results.wait(kThreads * kPerThread))
    CHECK(result.status.ok() || result.status.code() == Code::kClosed);
}

void test_injected_delays_mix_the_order(const TempDir& folder) {
  constexpr uint64_t kCount = 40;
  jmo::FaultSpec fault;
  fault.path_prefix = folder.file("late");
  fault.is_write = true;
  fault.max_delay_s = 0.01;
  fault.seed = 3;
  jmo::inject_fault(fault);
  Memory memory(3 * kBlock);
  Results results;
  {
    TierIo tier(small_blocks(true), results.collector());
    for (uint64_t i = 0; i < kCount; ++i)
      tier.write(make_job(folder.file("late" + std::to_string(i)), &memory, i));
    std::vector<uint64_t> tokens;
    for (const IoResult& result : results.wait(kCount)) {
      check_ok(result);
      tokens.push_back(result.token);
    }
    CHECK(!std::is_sorted(tokens.begin(), tokens.end()));
  }
  jmo::clear_faults();
}

// Seconds that four writes of 4 MB took, with as many reads at the same time where `both` is set.
double time_four_records(const TempDir& folder, const TierOptions& options, bool both) {
  Memory out(4000000);
  std::vector<std::unique_ptr<Memory>> in;
  for (int i = 0; i < 4; ++i) in.push_back(std::make_unique<Memory>(out.size()));
  Results results;
  TierIo tier(options, results.collector());
  const double start_s = jmo::now_s();
  for (uint64_t i = 0; i < 4; ++i) {
    tier.write(make_job(folder.file("limited" + std::to_string(i)), &out, i));
    if (both) tier.read(make_job(folder.file("limit"), in[i].get(), 4 + i, out.crc()));
  }
  for (const IoResult& result : results.wait(both ? 8 : 4)) check_ok(result);
  return jmo::now_s() - start_s;
}

// At 20 MB/s they take 0.8 s each way, and both ways at once no longer. Never faster; a busy machine may be
// slower, and gets three attempts.
void test_limits(const TempDir& folder) {
  Memory memory(4000000);
  check_ok(run_one(TierOptions(), make_job(folder.file("limit"), &memory), true));
  TierOptions options;
  options.read_limit_bps = options.write_limit_bps = 20e6;
  for (bool both : {false, true}) {
    double took_s = 1e9;
    for (int attempt = 0; attempt < 3 && took_s > 1.0; ++attempt) {
      took_s = time_four_records(folder, options, both);
      CHECK(took_s > 0.79);
    }
    CHECK(took_s <= 1.0);
  }
}

}  // namespace
}  // namespace jmo_test

int main(int argc, char** argv) {
  using namespace jmo_test;
  const TempDir folder(test_folder(argc, argv));
  test_sizes_and_alignments(folder);
  test_mode_and_overwrite_in_place(folder);
  test_many_in_flight(folder);
  test_reads_see_the_last_write(folder);
  test_close_ends_every_job_once(folder);
  test_close_while_others_submit(folder);
  test_injected_delays_mix_the_order(folder);
  test_limits(folder);
  return 0;
}
