// See fault.h. Thread contract: one mutex guards the list; `armed` spares production the mutex.
#include "ffi/core/fault.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "ffi/core/syscalls.h"

namespace jmo {
namespace {

struct Fault {
  FaultSpec spec;
  int64_t jobs_seen;
  uint64_t random_state;
};

struct Faults {
  std::atomic<bool> armed{false};
  std::mutex mutex;
  std::vector<Fault> list;
};

Faults& faults() {
  static Faults instance;
  return instance;
}

// SplitMix64 (Steele, Lea, Flood 2014): the same times from the same seed with every standard library.
double next_uniform(uint64_t* state) {
  uint64_t z = (*state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

}  // namespace

void inject_fault(const FaultSpec& spec) {
  std::lock_guard<std::mutex> lock(faults().mutex);
  faults().list.push_back(Fault{spec, 0, spec.seed});
  faults().armed.store(true, std::memory_order_release);
}

void clear_faults() {
  std::lock_guard<std::mutex> lock(faults().mutex);
  faults().list.clear();
  faults().armed.store(false, std::memory_order_release);
}

FaultOutcome draw_fault(const std::string& path, bool is_write) {
  FaultOutcome outcome;
  if (!faults().armed.load(std::memory_order_acquire)) return outcome;
  std::lock_guard<std::mutex> lock(faults().mutex);
  for (Fault& fault : faults().list) {
    const FaultSpec& spec = fault.spec;
    if (spec.is_write != is_write || path.compare(0, spec.path_prefix.size(), spec.path_prefix) != 0)
      continue;
    const int64_t turn = fault.jobs_seen++ - spec.after_count;
    if (spec.max_delay_s > 0)
      outcome.delay_s +=
          spec.min_delay_s + next_uniform(&fault.random_state) * (spec.max_delay_s - spec.min_delay_s);
    const bool fails = turn >= 0 && (spec.fail_count < 0 || turn < spec.fail_count);
    if (fails && outcome.error_number == 0) outcome.error_number = spec.error_number;
  }
  return outcome;
}

Status fault_status(const FaultOutcome& fault, const std::string& what) {
  if (fault.error_number == 0) return Status();
  return errno_status(what + " at offset 0 (injected fault)", fault.error_number);
}

}  // namespace jmo
