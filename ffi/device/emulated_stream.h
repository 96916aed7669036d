// A stream of the emulated device: a thread, its queue of operations, and the marks that streams and hosts
// wait for.
//
// What always holds: a thread waits on one word that another sets, so that they are ordered that way only. A
// failed device goes on draining its queues, so every mark is passed in the end and nothing blocks for good.
// Thread contract: push and Mark::wait from any thread; finish (idempotent) from one.
#pragma once

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "ffi/core/status.h"
#include "ffi/core/update.h"
#include "ffi/device/emulated_pins.h"

namespace jmo::emulated {

using Word = std::atomic<uint32_t>;

inline void sleep_while(Word* word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

inline void wake_all(Word* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

class Mark {
 public:
  void pass() {
    passed_.store(1, std::memory_order_release);
    wake_all(&passed_);
  }
  void wait() {
    while (passed_.load(std::memory_order_acquire) == 0) sleep_while(&passed_, 0);
  }

 private:
  Word passed_{0};
};

class Jitter {
 public:
  Jitter(uint64_t seed, int longest_us) : state_(seed * 0x9E3779B97F4A7C15u + 1), longest_us_(longest_us) {}
  // Half of the time not at all, now and then for long.
  void pause() {
    if (longest_us_ == 0) return;
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const uint64_t drawn = state_ >> 33;
    if (drawn % 2 == 0) return;
    const uint64_t most = drawn % 16 == 1 ? longest_us_ : longest_us_ / 16;
    std::this_thread::sleep_for(std::chrono::microseconds(drawn / 16 % (most + 1)));
  }

 private:
  uint64_t state_;
  const int longest_us_;
};

struct Operation {
  std::function<void()> work;
  Mark* after = nullptr;
  Mark* passes = nullptr;
  Pin* pin = nullptr;
  const char* fails_as = nullptr;  // the device fails here
  bool last = false;
  std::atomic<Operation*> next{nullptr};
};

// Any number of callers push; one thread takes.
class Queue {
 public:
  ~Queue() { delete taken_; }
  void push(Operation* operation) {
    Operation* before = newest_.exchange(operation, std::memory_order_acq_rel);
    before->next.store(operation, std::memory_order_release);
    pushed_.fetch_add(1, std::memory_order_release);
    wake_all(&pushed_);
  }
  // Valid until the next one is taken.
  Operation& take() {
    for (;;) {
      const uint32_t pushed = pushed_.load(std::memory_order_acquire);
      if (Operation* next = taken_->next.load(std::memory_order_acquire)) {
        delete taken_;
        taken_ = next;
        return *taken_;
      }
      sleep_while(&pushed_, pushed);
    }
  }

 private:
  Operation* taken_ = new Operation;
  std::atomic<Operation*> newest_{taken_};
  Word pushed_{0};
};

class Device {
 public:
  ~Device() { delete failure_.load(); }
  bool failed() const { return failure_.load() != nullptr; }
  // For good; the first cause counts.
  void fail(const std::string& message) {
    auto cause = std::make_unique<const std::string>(message);
    const std::string* none = nullptr;
    if (failure_.compare_exchange_strong(none, cause.get())) cause.release();
  }
  Status status() const {
    const std::string* cause = failure_.load();
    return cause == nullptr ? Status() : Status(Code::kIo, *cause);
  }

 private:
  std::atomic<const std::string*> failure_{nullptr};
};

class StreamState {
 public:
  StreamState(int number, Device* owner, uint64_t seed, int longest_us)
      : device_number_(number), device_(owner), jitter_(seed, longest_us), thread_([this] { work(); }) {}
  ~StreamState() { finish(); }

  int device_number() const { return device_number_; }
  void push(std::unique_ptr<Operation> operation) { queue_.push(operation.release()); }
  // Waits for all that has been pushed so far.
  void drain() {
    Mark end;
    auto operation = std::make_unique<Operation>();
    operation->passes = &end;
    push(std::move(operation));
    end.wait();
  }
  // The same, once and for all; nothing may be pushed any more.
  void finish() {
    if (!thread_.joinable()) return;
    auto end = std::make_unique<Operation>();
    end->last = true;
    push(std::move(end));
    thread_.join();
  }
  // Waits until what the stream does right now has ended; on a failed device nothing follows.
  void wait_idle() {
    while (busy_.load() == 1) sleep_while(&busy_, 1);
  }

 private:
  void work() {
    set_flush_denormals();
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // ns: short delays are to be short
    for (;;) {
      Operation& operation = queue_.take();
      if (operation.last) return;
      carry_out(operation);
      operation.work = nullptr;
    }
  }

  void carry_out(Operation& operation) {
    if (operation.after != nullptr) operation.after->wait();
    if (!device_->failed()) jitter_.pause();
    busy_.store(1);
    if (!device_->failed()) {
      if (operation.work) operation.work();
      if (operation.fails_as != nullptr)
        device_->fail("device " + std::to_string(device_number_) + ": " + operation.fails_as + " failed");
    }
    busy_.store(0);
    if (device_->failed()) {
      wake_all(&busy_);
    } else {
      jitter_.pause();
    }
    if (operation.pin != nullptr) operation.pin->users.fetch_sub(1, std::memory_order_release);
    if (operation.passes != nullptr) operation.passes->pass();
  }

  const int device_number_;
  Device* const device_;
  Jitter jitter_;
  Queue queue_;
  Word busy_{0};  // of the stream's thread only, so that it orders no two of them
  std::thread thread_;
};

}  // namespace jmo::emulated
