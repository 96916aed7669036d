// See token_bucket.h. Thread contract: as stated there; one mutex, never held while sleeping.
#include "ffi/core/token_bucket.h"

#include <algorithm>
#include <chrono>

#include "ffi/core/io.h"

namespace jmo {

TokenBucket::Booking TokenBucket::reserve(size_t bytes) {
  if (!(rate_bps_ > 0)) return Booking();
  std::lock_guard<std::mutex> lock(mutex_);
  Booking booking;
  booking.begin_s = std::max(free_s_, now_s() - kBurstS);
  booking.end_s = booking.begin_s + static_cast<double>(bytes) / rate_bps_;
  free_s_ = booking.end_s;
  return booking;
}

bool TokenBucket::wait_until(double time_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (time_s <= now_s()) return !closed_;
  const std::chrono::duration<double> since_epoch(time_s);
  const std::chrono::steady_clock::time_point deadline(
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(since_epoch));
  return !closed_changed_.wait_until(lock, deadline, [&] { return closed_; });
}

void TokenBucket::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  closed_changed_.notify_all();
}

}  // namespace jmo
