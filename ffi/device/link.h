// One device's ops between XLA and the engine, where gradients and params are on an accelerator: `jmo_push`
// hands over, `jmo_pull` waits.
//
// 1. push: ticket and hyperparameters are copied into a pinned block on XLA's own stream, and an event is
//    recorded there, behind all that makes the gradients. Nothing waits.
// 2. The arrivals thread waits for the events, in order; then the request goes to the engine, as on the CPU.
// 3. The engine has its subgroups updated (copier.h), and ends it. Results are on the device by then.
// 4. pull: waits for that on the calling thread, and puts old params or zeros into the results where the
//    update was refused or skipped, on XLA's stream.
//
// What always holds: results are written where the push's outputs lie, of which XLA knows only the pull as a
// reader; what the push reads are program inputs, or outputs of its own too, so that all of it stays until
// the pull. So pushed and pulled pointers must be the same, which is checked. No device waits for another
// here, and none for a push that has not come. A block is taken at the push and given back by the pull; there
// is no allocation of device or pinned memory in between.
// XLA frees a program's buffers as soon as one of its ops fails. So a handler that fails first waits until
// all ops of the run have ended (settle_run). Where the op of another library fails between push and pull,
// XLA takes away what is still read and written here: that process is not to be trusted. What such a run
// leaves is dropped when blocks run out.
//
// Thread contract: push, agree and pull from XLA's threads; add_blocks before the ops that need them; update,
// drain and close as the engine says.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ffi/core/engine.h"
#include "ffi/core/worker.h"
#include "ffi/device/copier.h"
#include "ffi/device/resources.h"
#include "ffi/device/runtime.h"

namespace jmo {

struct LinkOptions {
  int64_t ordinal = 0;  // the engine's name of the device; the runtime's is the copier's
  CopierOptions copier;
  size_t blocks = 64;  // ops between push and pull, at most; see add_blocks
};

class DeviceLink : public Accelerator {
 public:
  static constexpr int kMostHypers = 30;

  // Of a block in pinned memory, as the device writes them.
  struct Scalars {
    uint32_t ticket;
    uint32_t agreed;
    float hyper[kMostHypers];
  };
  struct Block;

  // An op between push and pull.
  struct Pushed {
    int64_t instance = 0, bucket = 0, run_id = 0;
    std::vector<LeafBuffers> leaves;
    Block* block = nullptr;
    Request request;      // until it arrives
    uint32_t ticket = 0;  // written by the engine
    bool handed_back = false;
    bool ended = false;  // under the link's mutex, as what follows
    Status status;
    std::function<void()> then;
  };

  DeviceLink(Engine& engine, DeviceRuntime& runtime, const LinkOptions& options);
  ~DeviceLink() override;

  const Status& status() const { return status_; }  // why it cannot work
  Status pinned() const;                            // why copies are slow, or ok
  int device() const { return options_.copier.device; }
  DeviceRuntime& runtime() { return runtime_; }
  // Room for more ops at once. For set-up, never in a step.
  Status add_blocks(size_t count);
  // A stream that stands for XLA's where XLA has none.
  DeviceRuntime::Stream own_stream() const { return own_->get(); }
  // Of no effect while memory of the link's is not pinned.
  void set_on_device(bool on) { copier_->set_on_device(on && pinned().ok()); }
  CopierStats stats() const { return copier_->stats(); }

  // -- handlers. With `wait` they return only once XLA's buffers are no longer needed.

  // `request` lacks ticket, hyper, ticket_out, finish; those two lie on the device. Fails where the program
  // or the store is to blame, on every device alike; where the device is, the pull tells of it by its ticket.
  Status push(Request request, const uint32_t* ticket, const float* hyper, int hyper_count,
              DeviceRuntime::Stream stream, bool wait);
  // The op that was pushed with these buffers; null with a status if there is none.
  std::shared_ptr<Pushed> find(int64_t instance, int64_t bucket, int64_t run_id,
                               const std::vector<LeafBuffers>& leaves, Status* status);
  // Calls `then` once the engine has ended the op: here, or on a thread of the link's own.
  void when_ended(const std::shared_ptr<Pushed>& pushed, std::function<void()> then);
  void wait(const std::shared_ptr<Pushed>& pushed);
  // Of an op that has ended: what is still to be put into the results, and the ticket. Gives its block back.
  Status finish(const std::shared_ptr<Pushed>& pushed, const BucketSpec& spec, uint32_t* ticket_out,
                DeviceRuntime::Stream stream, bool wait);
  // Waits until nothing of a run is under way here, and forgets it: XLA is to be told of an error. False if
  // that takes longer than `timeout_s`.
  bool settle_run(int64_t run_id, double timeout_s);
  // All processes agreed on a ticket, where this one had `mine`.
  Status agree(int64_t instance, const uint32_t* mine, const uint32_t* agreed, DeviceRuntime::Stream stream,
               bool wait);

  // -- the engine

  void update(UpdateJob job, KernelPool::Done done) override {
    copier_->update(std::move(job), std::move(done));
  }
  void drain() override { copier_->close(); }
  void close() override;

 private:
  struct Arrival {
    Block* block;
    std::function<void(const Status&)> arrived;
  };

  Status set_up();
  Block* take_block();
  void give_block(Block* block);
  void settle(Block* block, DeviceRuntime::Stream stream);
  void lose(const std::shared_ptr<Pushed>& pushed, const Status& status);
  void run_arrivals();
  void arrived(const std::shared_ptr<Pushed>& pushed, const Status& past);
  void end(const std::shared_ptr<Pushed>& pushed, const Status& status);
  void drop_left_behind(int64_t run_id);
  Status expect(Block* block, DeviceRuntime::Stream stream, bool wait,
                std::function<void(const Status&)> arrived);

  Engine& engine_;
  DeviceRuntime& runtime_;
  const LinkOptions options_;
  Status status_;
  std::vector<std::unique_ptr<PinnedMemory>> memory_;  // of the blocks
  std::unique_ptr<DeviceStream> own_;
  std::unique_ptr<Copier> copier_;
  std::vector<std::unique_ptr<Block>> blocks_;

  std::mutex mutex_;
  std::condition_variable ended_, arriving_;
  std::vector<Block*> free_blocks_;
  std::list<std::shared_ptr<Pushed>> pushed_;  // in the order of the pushes
  std::deque<Arrival> arrivals_;
  bool closing_ = false;
  std::thread arrivals_thread_;
  Worker completions_;  // what XLA wants to hear of the ops' ends
};

}  // namespace jmo
