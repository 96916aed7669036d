// The token bucket: booked times exactly, real waits with a generous tolerance, close().
#include "ffi/core/token_bucket.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "ffi/core/io.h"
#include "ffi/tests/check.h"

namespace jmo_test {
namespace {

using jmo::now_s;
using jmo::TokenBucket;

bool near(double a, double b, double tolerance) { return std::fabs(a - b) <= tolerance; }

// Bookings follow each other without a gap while they are made ahead of time, so that the rate is exact.
void test_bookings_are_contiguous() {
  TokenBucket bucket(1e6);
  const double start_s = now_s();
  TokenBucket::Booking last = bucket.reserve(4 << 20);
  CHECK(last.begin_s <= now_s() && last.begin_s >= start_s - TokenBucket::kBurstS);
  const double first_s = last.begin_s;
  double bytes = 4 << 20;
  for (size_t size : {size_t{1}, size_t{4096}, size_t{4} << 20, size_t{0}, size_t{123457}}) {
    const TokenBucket::Booking next = bucket.reserve(size);
    CHECK_EQ(next.begin_s, last.end_s);
    CHECK(near(next.end_s - next.begin_s, static_cast<double>(size) / 1e6, 1e-6));
    bytes += static_cast<double>(size);
    last = next;
  }
  CHECK(near(last.end_s - first_s, bytes / 1e6, 1e-5));
}

// Idle time is not saved up, but for the burst.
void test_idle_time_is_lost() {
  TokenBucket bucket(1e9);
  bucket.reserve(1000);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const double before_s = now_s();
  const TokenBucket::Booking booking = bucket.reserve(1000);
  CHECK(booking.begin_s >= before_s - TokenBucket::kBurstS - 1e-6);
  CHECK(booking.begin_s <= now_s());
}

void test_unlimited() {
  for (double rate : {0.0, -1.0, std::nan("")}) {
    TokenBucket bucket(rate);
    const double start_s = now_s();
    for (int i = 0; i < 1000; ++i) CHECK(bucket.wait_until(bucket.reserve(size_t{1} << 40).end_s));
    CHECK(now_s() - start_s < 1.0);
    bucket.close();
    CHECK(!bucket.wait_until(bucket.reserve(1).end_s));
  }
}

// Seconds that `count` blocks take `threads` threads that wait as IoQueue does.
double time_blocks(double rate_bps, size_t block, int count, int threads) {
  TokenBucket bucket(rate_bps);
  std::atomic<int> blocks{count};
  const double start_s = now_s();
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i)
    running.emplace_back([&] {
      while (blocks.fetch_sub(1) > 0) {
        const TokenBucket::Booking booking = bucket.reserve(block);
        CHECK(bucket.wait_until(booking.begin_s));
        CHECK(now_s() >= booking.begin_s);
        CHECK(bucket.wait_until(booking.end_s));
        CHECK(now_s() >= booking.end_s);
      }
    });
  for (std::thread& thread : running) thread.join();
  return now_s() - start_s;
}

// Half a second's worth of blocks. Never faster; a busy machine may be slower, and gets three attempts.
void check_rate(double rate_bps, size_t block, int threads) {
  const int count = static_cast<int>(0.5 * rate_bps / static_cast<double>(block));
  const double expected_s = count * static_cast<double>(block) / rate_bps;
  double took_s = 1e9;
  for (int attempt = 0; attempt < 3 && took_s > 1.25 * expected_s; ++attempt) {
    took_s = time_blocks(rate_bps, block, count, threads);
    CHECK(took_s > expected_s - 2 * TokenBucket::kBurstS);
  }
  CHECK(took_s <= 1.25 * expected_s);
}

void test_rates() {
  check_rate(400e6, 4u << 20, 2);
  check_rate(50e6, 512u << 10, 1);
  check_rate(100e6, 256u << 10, 4);
}

void test_close_wakes_all() {
  TokenBucket bucket(1e6);
  std::atomic<int> refused{0};
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i)
    waiting.emplace_back([&] { refused += !bucket.wait_until(bucket.reserve(100u << 20).end_s); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double start_s = now_s();
  bucket.close();
  for (std::thread& thread : waiting) thread.join();
  CHECK_EQ(refused.load(), 3);
  CHECK(now_s() - start_s < 5.0);  // the first would have waited for 100 s
  CHECK(!bucket.wait_until(0));
  CHECK(!bucket.wait_until(now_s() + 1000));
  bucket.close();
}

}  // namespace
}  // namespace jmo_test

int main() {
  jmo_test::test_bookings_are_contiguous();
  jmo_test::test_idle_time_is_lost();
  jmo_test::test_unlimited();
  jmo_test::test_rates();
  jmo_test::test_close_wakes_all();
  return 0;
}
