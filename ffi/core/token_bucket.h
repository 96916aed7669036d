// A smooth bandwidth limit, as a device of that bandwidth would give it.
//
// 1. reserve(n) books the next n / rate seconds of the imagined device, in the order of the calls.
// 2. The caller waits until its time begins, transfers, and waits until its time ends. The transfer so
//    overlaps with the time that pays for it, and nothing is complete earlier than on a device of that
//    bandwidth.
// 3. Time not booked is lost but for the last `kBurstS` seconds of it, which make up for late wake-ups.
// What always holds: no thread polls; each sleeps until its own time or until close().
// Thread contract: any method from any thread.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace jmo {

class TokenBucket {
 public:
  static constexpr double kBurstS = 0.002;

  struct Booking {
    double begin_s = 0;  // on the clock of now_s()
    double end_s = 0;
  };

  // `rate_bps` in bytes/s; 0 (or less) = unlimited.
  explicit TokenBucket(double rate_bps) : rate_bps_(rate_bps) {}

  Booking reserve(size_t bytes);
  // Sleeps until `time_s`. False: closed (at once, also where the time has come).
  bool wait_until(double time_s);
  // Wakes all that wait; nobody waits from now on.
  void close();

 private:
  const double rate_bps_;
  std::mutex mutex_;
  std::condition_variable closed_changed_;
  double free_s_ = 0;  // the imagined device is booked up to here
  bool closed_ = false;
};

}  // namespace jmo
