// See measure.h.
#include "ffi/device/measure.h"

#include <algorithm>

#include "ffi/core/io.h"
#include "ffi/device/resources.h"

namespace jmo {
namespace {

// Memory on both sides, and a stream and an event each way.
class Bench {
 public:
  Bench(DeviceRuntime& runtime, int device, size_t bytes)
      : runtime_(runtime),
        device_(device),
        bytes_(bytes),
        host_(runtime, device, 2 * bytes),
        down_(runtime, device),
        up_(runtime, device),
        down_past_(runtime, device),
        up_past_(runtime, device) {
    for (const Status& status :
         {host_.status(), down_.status(), up_.status(), down_past_.status(), up_past_.status()})
      if (status_.ok()) status_ = status;
    if (status_.ok()) status_ = host_.pinned();
    if (status_.ok()) status_ = runtime.make_memory(device, 2 * bytes, &memory_);
    if (!status_.ok()) memory_ = nullptr;
  }
  ~Bench() {
    if (memory_ != nullptr) runtime_.free_memory(device_, memory_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  const Status& status() const { return status_; }

  // One copy in each direction asked for; returns the time that it took, and fails by status().
  double copy_s(bool down, bool up) {
    const double begin_s = now_s();
    char* device = static_cast<char*>(memory_);
    if (down) note(runtime_.copy_to_host(device_, down_.get(), host_.get(), device, bytes_));
    if (up) note(runtime_.copy_to_device(device_, up_.get(), device + bytes_, host_.get() + bytes_, bytes_));
    if (down) note(down_past_.record(down_.get()));
    if (up) note(up_past_.record(up_.get()));
    if (down) note(down_past_.wait_on_host());
    if (up) note(up_past_.wait_on_host());
    return now_s() - begin_s;
  }

 private:
  void note(const Status& status) {
    if (status_.ok()) status_ = status;
  }

  DeviceRuntime& runtime_;
  const int device_;
  const size_t bytes_;
  PinnedMemory host_;
  DeviceStream down_, up_;
  DeviceEvent down_past_, up_past_;
  void* memory_ = nullptr;
  Status status_;
};

double best_s(Bench& bench, bool down, bool up, int repeats) {
  double best = bench.copy_s(down, up);
  for (int i = 0; i < std::max(repeats, 1) && bench.status().ok(); ++i) {
    const double seconds = bench.copy_s(down, up);
    best = i == 0 ? seconds : std::min(best, seconds);
  }
  return best;
}

}  // namespace

Status measure_link(DeviceRuntime& runtime, int device, size_t bytes, int repeats, LinkSpeed* speed) {
  if (bytes == 0) return Status(Code::kInvalid, "a copy of 0 bytes has no speed");
  Bench bench(runtime, device, bytes);
  if (!bench.status().ok()) return bench.status();
  const auto size = static_cast<double>(bytes);
  speed->to_host_bps = size / best_s(bench, true, false, repeats);
  speed->to_device_bps = size / best_s(bench, false, true, repeats);
  speed->both_bps = 2 * size / best_s(bench, true, true, repeats);
  return bench.status();
}

}  // namespace jmo
