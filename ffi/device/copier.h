// Updates of one device's subgroups: what lies on the device passes through pinned chunks to the host's
// kernels and back, or the device updates the pinned records itself.
//
//   update --> [jobs] --down thread: copy_to_host, wait--> kernel threads: update, copy_to_device
//                                                            --up thread: wait--> done
//
// 1. The down thread cuts a job into parts, gives each a free chunk and copies its gradients and params there
//    on the `down` stream, as many parts ahead as there are chunks; then it waits for the oldest and hands it
//    to the kernels.
// 2. The kernel thread that ends a part copies its results to the device on the `up` stream.
// 3. The up thread waits for that, frees the chunk, and calls `done` once all parts of the job are through.
// 4. With `on_device` the down thread gives the whole job to the device on the `up` stream instead (in tables
//    of segments), and the up thread waits for it.
//
// What always holds: when `done` is called, nothing reads or writes the job's memory any more, on host or
// device. A failure of the device ends a job with its status, never silently. Gradients are there before
// `update` is called.
//
// Thread contract: update and set_on_device from any thread; close (idempotent) from any but its own and the
// kernels'.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/core/kernel_pool.h"
#include "ffi/device/resources.h"
#include "ffi/device/runtime.h"
#include "ffi/device/staging.h"

namespace jmo {

struct CopierOptions {
  int device = 0;
  size_t chunk_bytes = 8u << 20;
  size_t chunks = 8;
};

// Since it was made. Busy: at least one copy of that direction was under way.
struct CopierStats {
  int64_t to_host_bytes = 0, to_device_bytes = 0;
  double to_host_busy_s = 0, to_device_busy_s = 0;
  double on_device_busy_s = 0;  // updates by the device
};

class Copier {
 public:
  Copier(DeviceRuntime& runtime, const CopierOptions& options, KernelPool& kernels);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Why it cannot work; then nothing may be asked of it.
  const Status& status() const { return status_; }
  // Why the chunks are not pinned (copies are slow then), or ok.
  const Status& pinned() const { return pinned_; }
  void set_on_device(bool on) { on_device_ = on; }
  void update(UpdateJob job, KernelPool::Done done);
  CopierStats stats() const;
  // Ends what was given to it; the kernels must still run.
  void close();

 private:
  struct Job;
  struct Chunk;
  struct Table;
  struct Flight;  // a part in a chunk, or segments in a table, on their way
  // Time with anything under way.
  struct Busy {
    int count = 0;
    double since_s = 0, total_s = 0;
    void begins();
    void ends();
    double so_far_s() const;
  };
  using Lock = std::unique_lock<std::mutex>;

  Status set_up();
  void run_down();
  void run_up();
  std::deque<std::shared_ptr<Flight>> flights_of(const std::shared_ptr<Job>& job) const;
  std::shared_ptr<Flight> next_to_issue();
  void issue(const std::shared_ptr<Flight>& flight);
  Status copy_down(Flight& flight);
  Status give_table(Flight& flight);
  void land(const std::shared_ptr<Flight>& flight);
  void send_back(const std::shared_ptr<Flight>& flight, const UpdateResult& result);
  Status copy_up(Flight& flight);
  void end(const std::shared_ptr<Flight>& flight, const Status& status);

  DeviceRuntime& runtime_;
  const CopierOptions options_;
  KernelPool& kernels_;
  std::atomic<bool> on_device_{false};
  Status status_, pinned_;
  std::unique_ptr<PinnedMemory> memory_;  // before the streams, so that it goes once they hold nothing
  std::unique_ptr<DeviceStream> down_, up_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<std::unique_ptr<Table>> tables_;

  mutable std::mutex mutex_;
  std::condition_variable for_down_, for_up_;
  std::deque<std::shared_ptr<Job>> jobs_;          // not yet cut
  std::deque<std::shared_ptr<Flight>> waiting_;    // for a chunk or a table
  std::deque<std::shared_ptr<Flight>> landing_;    // on `down`, oldest first
  std::deque<std::shared_ptr<Flight>> returning_;  // on `up`
  std::vector<Chunk*> free_chunks_;
  std::vector<Table*> free_tables_;
  size_t open_ = 0;  // jobs that are not done
  int64_t to_host_bytes_ = 0, to_device_bytes_ = 0;
  Busy down_busy_, up_busy_, device_busy_;
  bool closing_ = false;
  std::thread down_thread_, up_thread_;
};

}  // namespace jmo
