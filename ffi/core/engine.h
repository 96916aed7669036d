// The native half of a store: what XLA's handlers hand over, and what the driver does with it.
//
//   handler --submit--> [events] --wait--> driver --read, write--> I/O threads --------> [events]
//                                            |---update, hand_back--> kernel threads ----> [events]
//                                            |---complete, fail--> completion thread ----> XLA
//
// What always holds: a request lives from submit until complete or fail, exactly one of which ends it.
// Promises are completed on a thread of the device's own, never on the driver's: XLA resumes the program
// there and may block in a collective. Nothing here decides an order; that is the scheduler's.
// Thread contract: submit, agree, post, wake, open_requests, set_exclusive, turns and turn_error from any
// thread; tiers are added before the driver starts; add_slots, add_device and add_bucket may come from any
// thread before what they set up is used; close after the driver has ended; everything else from the driver
// thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/core/io.h"
#include "ffi/core/kernel_pool.h"
#include "ffi/core/slots.h"
#include "ffi/core/status.h"
#include "ffi/core/update.h"
#include "ffi/core/worker.h"

namespace jmo {

// The ticket of a step that failed; no serial has it.
constexpr uint32_t kPoisonTicket = 0xFFFFFFFF;

struct LeafSpec {
  int64_t elements = 0;  // of one device's shard
  bool decay = false;
};

// A subgroup: elements [begin, begin + count) of the bucket's concatenated leaves.
struct SubgroupSpec {
  int64_t begin = 0;
  int64_t count = 0;
};

struct BucketSpec {
  RuleSpec rule;
  bool reads_params = false;
  int hyper_count = 0;  // the operand holds one more: not 0 skips the step
  std::vector<LeafSpec> leaves;
  std::vector<SubgroupSpec> subgroups;
  // Byte offsets of the sections in a record; the sections of all subgroups start at the same places.
  int64_t mu_offset = 0, nu_offset = 0, master_offset = 0, cells_offset = 0;
  int64_t record_bytes = 0;
};

struct LeafBuffers {
  const void* grad = nullptr;
  DType grad_type = DType::kF32;
  const void* param = nullptr;
  void* out = nullptr;
};

// What updates subgroups whose gradients, params and results lie on an accelerator (ffi/device).
class Accelerator {
 public:
  virtual ~Accelerator() = default;
  // As KernelPool::submit, for segments whose `grad`, `param` and `out` lie on the device. Moved there or
  // here, they may fail: see UpdateResult.
  virtual void update(UpdateJob job, KernelPool::Done done) = 0;
  // Ends the updates that were given to it, and takes no more; the kernels still run. Idempotent.
  virtual void drain() = 0;
  // Hands over no more requests. Those that are open have been ended, since what makes the others' gradients
  // may wait for them. Idempotent.
  virtual void close() = 0;
};

struct Request {
  int64_t instance = 0;
  int64_t bucket = 0;
  int64_t device = 0;
  int64_t run_id = 0;
  uint32_t ticket = 0;
  const float* hyper = nullptr;
  std::vector<LeafBuffers> leaves;
  uint32_t* ticket_out = nullptr;
  Accelerator* accelerator = nullptr;  // where the leaves' buffers lie; null: here
  bool* handed_back = nullptr;  // of an accelerator: set where old params or zeros are to be put in later
  std::function<void(const Status&)> finish;  // completes the promise; runs on the device's completion thread
};

enum class EventKind : int { kArrived = 0, kRead, kWritten, kUpdated, kHandedBack, kAgreed, kWoken, kLost };

struct Event {
  EventKind kind = EventKind::kWoken;
  // Request id for kArrived and kHandedBack; this process's ticket for kAgreed; else the driver's token.
  uint64_t token = 0;
  int64_t instance = 0, bucket = 0, device = 0, run_id = 0;
  uint32_t ticket = 0;
  bool skip = false;
  Status status;
  uint32_t crc = 0;
  size_t size = 0;                      // bytes
  double start_s = 0, end_s = 0;        // kRead, kWritten, kUpdated: of the monotonic clock
  int64_t free_bytes = -1;              // kRead, kWritten: see IoResult
  std::vector<int64_t> adopted_leaves;  // kUpdated: leaf indices whose params had been replaced
};

class Engine {
 public:
  explicit Engine(int kernel_threads);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // More slots, numbered on from those there are. Allocates and touches memory: for set-up, never in a step.
  // On this NUMA node, if the system allows it (-1: any).
  Status add_slots(size_t count, size_t slot_size, int numa_node = -1);
  char* slot(size_t index) const;  // null where there is none
  // Has it live as long as the slots, and no longer (what pins them).
  void keep(std::shared_ptr<void> companion);
  size_t slot_count() const;
  int add_tier(const TierOptions& options);
  bool direct_in_use(int tier) const { return tiers_.at(tier)->direct_in_use(); }
  // Of a tier that add_tier numbered: see TierIo.
  void set_exclusive(int tier, bool on) { tiers_.at(tier)->set_exclusive(on); }
  TurnStats turns(int tier, bool is_write) const { return tiers_.at(tier)->turns(is_write); }
  std::string turn_error(int tier) const { return tiers_.at(tier)->turn_error(); }
  // Without an accelerator the device's buffers are host memory.
  void add_device(int64_t ordinal, std::shared_ptr<Accelerator> accelerator = nullptr);
  std::shared_ptr<Accelerator> accelerator(int64_t ordinal) const;  // null where there is none
  KernelPool& kernels() { return *kernels_; }
  Status add_bucket(int64_t instance, int64_t bucket, BucketSpec spec);

  // Queues the request, if its bucket and device are known (its operands are the handler's to check).
  Status submit(Request request);
  // The bucket's description, or null where there is none.
  std::shared_ptr<const BucketSpec> bucket(int64_t instance, int64_t bucket) const;

  // All processes gave the step that a device has been through `ticket`, where this one had `mine`.
  void agree(int64_t instance, int64_t device, uint32_t mine, uint32_t ticket);

  // A request was begun by XLA and will not be submitted.
  void lost(const Request& request, const Status& status);

  // At most `most` events; waits up to `timeout_s` for the first.
  std::vector<Event> wait(double timeout_s, size_t most);
  void wake();
  void read(int tier, IoJob job) { tiers_.at(tier)->read(std::move(job)); }
  void write(int tier, IoJob job) { tiers_.at(tier)->write(std::move(job)); }
  // A transfer that others carried out has ended: an event as of read or write. From any thread.
  void post(const IoResult& result);
  // Updates one subgroup of a request; `memory` is its record (null where record_bytes is 0).
  Status update(uint64_t request, int64_t subgroup, char* memory, bool fresh, uint64_t token);
  // Puts the old params (16-bit params) or zero updates (f32) into the request's outputs, on a kernel thread.
  Status hand_back(uint64_t request);
  Status complete(uint64_t request, uint32_t ticket);
  Status fail(uint64_t request, const std::string& message);
  void fail_all(const std::string& message);
  size_t open_requests() const;
  // Ends I/O and kernels, then what is open, with an error; joins all threads. Idempotent.
  void close();

 private:
  std::vector<std::shared_ptr<Accelerator>> accelerators() const;
  void push(Event event);
  Request* find(uint64_t request);
  void end(uint64_t request, Status status);
  UpdateJob make_job(const Request& request, const BucketSpec& spec, const SubgroupSpec& subgroup,
                     char* memory, std::vector<int64_t>* leaf_of_segment) const;

  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Event> events_;
  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;
  uint64_t next_request_ = 1;
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<const BucketSpec>> buckets_;
  struct Device {
    std::unique_ptr<Worker> completions;
    std::shared_ptr<Accelerator> accelerator;
  };
  std::map<int64_t, Device> devices_;
  std::vector<std::unique_ptr<Slots>> arenas_;
  std::vector<std::shared_ptr<void>> kept_;  // after the arenas, so that it goes before them
  std::vector<std::unique_ptr<TierIo>> tiers_;
  std::unique_ptr<KernelPool> kernels_;
  bool closed_ = false;
};

// Engines by the number that programs carry as an attribute. Thread contract: any thread.
void register_engine(int64_t id, std::shared_ptr<Engine> engine);
void unregister_engine(int64_t id);
std::shared_ptr<Engine> find_engine(int64_t id);
std::vector<std::shared_ptr<Engine>> all_engines();

}  // namespace jmo
