// See link.h.
#include "ffi/device/link.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <utility>

namespace jmo {

struct DeviceLink::Block {
  Block(DeviceRuntime& runtime, int device, Scalars* memory) : scalars(memory), event(runtime, device) {}
  Scalars* const scalars;
  DeviceEvent event;
};

DeviceLink::DeviceLink(Engine& engine, DeviceRuntime& runtime, const LinkOptions& options)
    : engine_(engine), runtime_(runtime), options_(options) {
  status_ = set_up();
  if (!status_.ok()) return;
  try {
    arrivals_thread_ = std::thread([this] { run_arrivals(); });
  } catch (const std::system_error& error) {
    status_ = Status(Code::kIo, std::string("a thread for arrivals: ") + error.what());
  }
}

DeviceLink::~DeviceLink() {
  close();
  if (copier_) copier_->close();
  completions_.close();
}

Status DeviceLink::set_up() {
  copier_ = std::make_unique<Copier>(runtime_, options_.copier, engine_.kernels());
  if (!copier_->status().ok()) return copier_->status();
  own_ = std::make_unique<DeviceStream>(runtime_, device());
  if (!own_->status().ok()) return own_->status();
  return add_blocks(options_.blocks);
}

Status DeviceLink::add_blocks(size_t count) {
  if (count == 0) return Status();
  auto memory = std::make_unique<PinnedMemory>(runtime_, device(), count * sizeof(Scalars));
  if (!memory->status().ok()) return memory->status();
  auto* scalars = reinterpret_cast<Scalars*>(memory->get());
  std::vector<std::unique_ptr<Block>> blocks;
  for (size_t index = 0; index < count; ++index) {
    blocks.push_back(std::make_unique<Block>(runtime_, device(), scalars + index));
    if (!blocks.back()->event.status().ok()) return blocks.back()->event.status();
  }
  if (!memory->pinned().ok()) copier_->set_on_device(false);
  std::lock_guard<std::mutex> lock(mutex_);
  memory_.push_back(std::move(memory));
  for (auto& block : blocks) {
    free_blocks_.push_back(block.get());
    blocks_.push_back(std::move(block));
  }
  return Status();
}

Status DeviceLink::pinned() const {
  for (const auto& memory : memory_)
    if (!memory->pinned().ok()) return memory->pinned();
  return copier_->pinned();
}

DeviceLink::Block* DeviceLink::take_block() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_blocks_.empty()) return nullptr;
  Block* block = free_blocks_.back();
  free_blocks_.pop_back();
  return block;
}

void DeviceLink::give_block(Block* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_blocks_.push_back(block);
}

// Until the stream no longer writes to a block. (On a device that has failed as a whole it does not, and so
// the event may be refused.)
void DeviceLink::settle(Block* block, DeviceRuntime::Stream stream) {
  if (block->event.record(stream).ok()) (void)block->event.wait_on_host();
}

// If blocks have run out: what programs left here that were ended between push and pull, before this run.
void DeviceLink::drop_left_behind(int64_t run_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!free_blocks_.empty()) return;
  for (auto it = pushed_.begin(); it != pushed_.end();) {
    const bool left = (*it)->ended && (*it)->run_id != run_id;
    if (left) free_blocks_.push_back((*it)->block);
    it = left ? pushed_.erase(it) : std::next(it);
  }
}

// ---- push

Status DeviceLink::push(Request request, const uint32_t* ticket, const float* hyper, int hyper_count,
                        DeviceRuntime::Stream stream, bool wait) {
  if (hyper_count > kMostHypers)
    return Status(Code::kInvalid, std::to_string(hyper_count) + " hyperparameters, where " +
                                      std::to_string(kMostHypers) + " have room");
  drop_left_behind(request.run_id);
  Block* block = take_block();
  if (block == nullptr)
    return Status(Code::kInvalid, "device " + std::to_string(options_.ordinal) + " has more than " +
                                      std::to_string(blocks_.size()) + " ops under way at once");
  auto pushed = std::make_shared<Pushed>();
  pushed->instance = request.instance;
  pushed->bucket = request.bucket;
  pushed->run_id = request.run_id;
  pushed->leaves = request.leaves;
  pushed->block = block;
  pushed->request = std::move(request);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pushed_.push_back(pushed);
  }
  Scalars* scalars = block->scalars;
  Status status = runtime_.copy_to_host(device(), stream, &scalars->ticket, ticket, sizeof(uint32_t));
  if (status.ok())
    status = runtime_.copy_to_host(device(), stream, scalars->hyper, hyper, hyper_count * sizeof(float));
  if (status.ok())
    status = expect(block, stream, wait, [this, pushed](const Status& past) { arrived(pushed, past); });
  if (status.ok()) return status;
  settle(block, stream);
  if (status.code() != Code::kClosed) {
    lose(pushed, status);
    return Status();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  pushed_.remove(pushed);
  free_blocks_.push_back(block);
  return status;
}

// The device refused something before the op arrived. The others may be on their way into a collective, so
// this one must not just end: the pull gives old params and the poison ticket.
void DeviceLink::lose(const std::shared_ptr<Pushed>& pushed, const Status& status) {
  engine_.lost(pushed->request, status);
  pushed->request = Request();
  pushed->handed_back = true;
  pushed->ticket = kPoisonTicket;
  end(pushed, Status());
}

// Has `arrived` called once the stream has got so far; it is not called where this fails.
Status DeviceLink::expect(Block* block, DeviceRuntime::Stream stream, bool wait,
                          std::function<void(const Status&)> arrived) {
  Status status = block->event.record(stream);
  if (status.ok() && wait) status = block->event.wait_on_host();
  if (!status.ok()) return status;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) return Status(Code::kClosed, "the store of this program is closed");
    arrivals_.push_back({block, std::move(arrived)});
  }
  arriving_.notify_one();
  return Status();
}

// ---- arrivals

void DeviceLink::run_arrivals() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    arriving_.wait(lock, [this] { return closing_ || !arrivals_.empty(); });
    if (arrivals_.empty()) return;
    Arrival next = std::move(arrivals_.front());
    arrivals_.pop_front();
    lock.unlock();
    next.arrived(next.block->event.wait_on_host());
    next.arrived = nullptr;
    lock.lock();
  }
}

void DeviceLink::arrived(const std::shared_ptr<Pushed>& pushed, const Status& past) {
  if (!past.ok()) {
    lose(pushed, past);
    return;
  }
  Request request = std::move(pushed->request);
  request.ticket = pushed->block->scalars->ticket;
  request.hyper = pushed->block->scalars->hyper;
  request.ticket_out = &pushed->ticket;
  request.accelerator = this;
  request.handed_back = &pushed->handed_back;
  request.finish = [this, pushed](const Status& ended) { end(pushed, ended); };
  const Status status = engine_.submit(std::move(request));
  if (!status.ok()) end(pushed, Status(status.code(), "jax_mlp_offload: " + status.message()));
}

void DeviceLink::end(const std::shared_ptr<Pushed>& pushed, const Status& status) {
  std::function<void()> then;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    pushed->ended = true;
    pushed->status = status;
    then = std::move(pushed->then);
  }
  ended_.notify_all();
  if (then) completions_.run(std::move(then));
}

// ---- pull

static bool same(const LeafBuffers& a, const LeafBuffers& b) {
  return a.out == b.out && a.param == b.param && (a.grad == b.grad || b.grad == nullptr);
}

std::shared_ptr<DeviceLink::Pushed> DeviceLink::find(int64_t instance, int64_t bucket, int64_t run_id,
                                                     const std::vector<LeafBuffers>& leaves, Status* status) {
  std::lock_guard<std::mutex> lock(mutex_);
  bool other = false;
  for (auto it = pushed_.begin(); it != pushed_.end(); ++it) {
    const std::shared_ptr<Pushed> pushed = *it;
    if (pushed->instance != instance || pushed->bucket != bucket || pushed->run_id != run_id) continue;
    if (!std::equal(pushed->leaves.begin(), pushed->leaves.end(), leaves.begin(), leaves.end(), same)) {
      other = true;
      continue;
    }
    pushed_.erase(it);
    return pushed;
  }
  *status = Status(Code::kInvalid,
                   "optimizer " + std::to_string(instance) + ", bucket " + std::to_string(bucket) +
                       (other ? ": XLA moved gradients, params or results between jmo_push and jmo_pull"
                              : ": jmo_pull without its jmo_push"));
  return nullptr;
}

void DeviceLink::when_ended(const std::shared_ptr<Pushed>& pushed, std::function<void()> then) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pushed->ended) {
      pushed->then = std::move(then);
      return;
    }
  }
  then();
}

void DeviceLink::wait(const std::shared_ptr<Pushed>& pushed) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return pushed->ended; });
}

bool DeviceLink::settle_run(int64_t run_id, double timeout_s) {
  const auto of_run = [run_id](const std::shared_ptr<Pushed>& pushed) { return pushed->run_id == run_id; };
  std::unique_lock<std::mutex> lock(mutex_);
  const bool all_ended = ended_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] {
    return std::all_of(pushed_.begin(), pushed_.end(), [&](const std::shared_ptr<Pushed>& pushed) {
      return !of_run(pushed) || pushed->ended;
    });
  });
  if (!all_ended) return false;
  for (const auto& pushed : pushed_)
    if (of_run(pushed)) free_blocks_.push_back(pushed->block);
  pushed_.remove_if(of_run);
  return true;
}

Status DeviceLink::finish(const std::shared_ptr<Pushed>& pushed, const BucketSpec& spec, uint32_t* ticket_out,
                          DeviceRuntime::Stream stream, bool wait) {
  Block* block = pushed->block;
  Status status = pushed->status;
  for (size_t leaf = 0; status.ok() && pushed->handed_back && leaf < pushed->leaves.size(); ++leaf) {
    const LeafBuffers& buffers = pushed->leaves[leaf];
    const size_t bytes = spec.leaves[leaf].elements * size_of(spec.rule.param);
    status = spec.rule.param == DType::kF32
                 ? runtime_.set_zero(device(), stream, buffers.out, bytes)
                 : runtime_.copy_on_device(device(), stream, buffers.out, buffers.param, bytes);
  }
  if (status.ok()) status = runtime_.set_u32(device(), stream, ticket_out, pushed->ticket);
  if (status.ok() && wait) status = block->event.record(stream);
  if (status.ok() && wait) status = block->event.wait_on_host();
  if (!status.ok()) settle(block, stream);  // XLA is told, and takes its buffers
  give_block(block);
  return status;
}

Status DeviceLink::agree(int64_t instance, const uint32_t* mine, const uint32_t* agreed,
                         DeviceRuntime::Stream stream, bool wait) {
  Block* block = take_block();
  if (block == nullptr)
    return Status(Code::kInvalid,
                  "device " + std::to_string(options_.ordinal) + " has too many ops under way at once");
  Scalars* scalars = block->scalars;
  Status status = runtime_.copy_to_host(device(), stream, &scalars->ticket, mine, sizeof(uint32_t));
  if (status.ok())
    status = runtime_.copy_to_host(device(), stream, &scalars->agreed, agreed, sizeof(uint32_t));
  if (status.ok())
    status = expect(block, stream, wait, [this, instance, block](const Status& past) {
      if (past.ok())
        engine_.agree(instance, options_.ordinal, block->scalars->ticket, block->scalars->agreed);
      give_block(block);
    });
  if (!status.ok()) {
    settle(block, stream);
    give_block(block);
  }
  return status;
}

// ----

void DeviceLink::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  arriving_.notify_one();
  if (arrivals_thread_.joinable()) arrivals_thread_.join();
}

}  // namespace jmo
