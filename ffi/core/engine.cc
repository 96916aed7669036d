// See engine.h.
#include "ffi/core/engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "ffi/core/pages.h"

namespace jmo {

Engine::Engine(int kernel_threads) : kernels_(std::make_unique<KernelPool>(kernel_threads)) {}

Engine::~Engine() { close(); }

Status Engine::add_slots(size_t count, size_t slot_size, int numa_node) {
  auto arena = std::make_unique<Slots>(count, slot_size, kernels_->threads(), numa_node);
  if (!arena->status().ok()) return arena->status();
  std::lock_guard<std::mutex> lock(mutex_);
  arenas_.push_back(std::move(arena));
  return Status();
}

void Engine::keep(std::shared_ptr<void> companion) {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(std::move(companion));
}

char* Engine::slot(size_t index) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& arena : arenas_) {
    if (index < arena->count()) return arena->slot(index);
    index -= arena->count();
  }
  return nullptr;
}

size_t Engine::slot_count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t count = 0;
  for (const auto& arena : arenas_) count += arena->count();
  return count;
}

int Engine::add_tier(const TierOptions& options) {
  tiers_.push_back(std::make_unique<TierIo>(options, [this](const IoResult& result) { post(result); }));
  return static_cast<int>(tiers_.size()) - 1;
}

void Engine::post(const IoResult& result) {
  Event event;
  event.kind = result.is_write ? EventKind::kWritten : EventKind::kRead;
  event.token = result.token;
  event.status = result.status;
  event.crc = result.crc;
  event.size = result.size;
  event.start_s = result.start_s;
  event.end_s = result.end_s;
  event.free_bytes = result.free_bytes;
  push(std::move(event));
}

void Engine::add_device(int64_t ordinal, std::shared_ptr<Accelerator> accelerator) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (devices_.count(ordinal) != 0) return;
  devices_[ordinal] = {std::make_unique<Worker>(), std::move(accelerator)};
}

std::shared_ptr<Accelerator> Engine::accelerator(int64_t ordinal) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = devices_.find(ordinal);
  return found == devices_.end() ? nullptr : found->second.accelerator;
}

std::vector<std::shared_ptr<Accelerator>> Engine::accelerators() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Accelerator>> found;
  for (const auto& device : devices_)
    if (device.second.accelerator) found.push_back(device.second.accelerator);
  return found;
}

Status Engine::add_bucket(int64_t instance, int64_t bucket, BucketSpec spec) {
  int64_t elements = 0;
  for (const LeafSpec& leaf : spec.leaves) elements += leaf.elements;
  int64_t covered = 0;
  for (const SubgroupSpec& subgroup : spec.subgroups) {
    if (subgroup.begin != covered || subgroup.count <= 0)
      return Status(Code::kInvalid, "subgroups of bucket " + std::to_string(bucket) + " leave a gap");
    covered += subgroup.count;
  }
  if (covered != elements)
    return Status(Code::kInvalid, "subgroups of bucket " + std::to_string(bucket) + " cover " +
                                      std::to_string(covered) + " of " + std::to_string(elements) +
                                      " elements");
  std::lock_guard<std::mutex> lock(mutex_);
  buckets_[{instance, bucket}] = std::make_shared<const BucketSpec>(std::move(spec));
  return Status();
}

std::shared_ptr<const BucketSpec> Engine::bucket(int64_t instance, int64_t bucket) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = buckets_.find({instance, bucket});
  return found == buckets_.end() ? nullptr : found->second;
}

Status Engine::submit(Request request) {
  Event event;
  event.kind = EventKind::kArrived;
  event.instance = request.instance;
  event.bucket = request.bucket;
  event.device = request.device;
  event.run_id = request.run_id;
  event.ticket = request.ticket;
  const auto spec = bucket(request.instance, request.bucket);
  if (!spec) return Status(Code::kInvalid, "there is no bucket " + std::to_string(request.bucket));
  if (request.accelerator == nullptr) {
    for (size_t leaf = 0; leaf < request.leaves.size(); ++leaf)
      advise_huge_pages(request.leaves[leaf].out, spec->leaves[leaf].elements * size_of(spec->rule.param));
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return Status(Code::kClosed, "the store of this program is closed");
    if (devices_.count(request.device) == 0)
      return Status(Code::kInvalid,
                    "device " + std::to_string(request.device) +
                        " is not one of the optimizer's devices; pass mesh= and param_specs=");
    event.skip = request.hyper[spec->hyper_count] != 0.0f;
    event.token = next_request_++;
    requests_[event.token] = std::make_unique<Request>(std::move(request));
    events_.push_back(std::move(event));
  }
  ready_.notify_one();
  return Status();
}

void Engine::agree(int64_t instance, int64_t device, uint32_t mine, uint32_t ticket) {
  Event event;
  event.kind = EventKind::kAgreed;
  event.token = mine;
  event.instance = instance;
  event.device = device;
  event.ticket = ticket;
  push(std::move(event));
}

void Engine::lost(const Request& request, const Status& status) {
  Event event;
  event.kind = EventKind::kLost;
  event.instance = request.instance;
  event.bucket = request.bucket;
  event.device = request.device;
  event.run_id = request.run_id;
  event.status = status;
  push(std::move(event));
}

void Engine::push(Event event) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(std::move(event));
  }
  ready_.notify_one();
}

void Engine::wake() { push(Event()); }

std::vector<Event> Engine::wait(double timeout_s, size_t most) {
  std::unique_lock<std::mutex> lock(mutex_);
  ready_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return !events_.empty(); });
  std::vector<Event> taken;
  while (!events_.empty() && taken.size() < most) {
    taken.push_back(std::move(events_.front()));
    events_.pop_front();
  }
  return taken;
}

Request* Engine::find(uint64_t request) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = requests_.find(request);
  return found == requests_.end() ? nullptr : found->second.get();
}

static Status no_request(uint64_t request) {
  return Status(Code::kInvalid, "there is no request " + std::to_string(request));
}

// The part of [begin, begin + count) that lies in each leaf, as segments over request and record.
UpdateJob Engine::make_job(const Request& request, const BucketSpec& spec, const SubgroupSpec& subgroup,
                           char* memory, std::vector<int64_t>* leaf_of_segment) const {
  UpdateJob job;
  job.spec = spec.rule;
  job.hyper = request.hyper;
  const size_t param_size = size_of(spec.rule.param);
  const size_t mu_size = size_of(spec.rule.mu), nu_size = size_of(spec.rule.nu);
  const size_t master_size = size_of(master_type(spec.rule.param));
  auto* cells = reinterpret_cast<uint32_t*>(memory + spec.cells_offset);
  int64_t leaf_begin = 0, done = 0;
  for (size_t leaf = 0; leaf < spec.leaves.size(); ++leaf) {
    const int64_t elements = spec.leaves[leaf].elements;
    const int64_t from = std::max(subgroup.begin, leaf_begin);
    const int64_t to = std::min(subgroup.begin + subgroup.count, leaf_begin + elements);
    if (from < to) {
      const LeafBuffers& buffers = request.leaves[leaf];
      const int64_t skip = from - leaf_begin;
      Segment segment;
      segment.grad = static_cast<const char*>(buffers.grad) + skip * size_of(buffers.grad_type);
      segment.grad_type = buffers.grad_type;
      if (buffers.param) segment.param = static_cast<const char*>(buffers.param) + skip * param_size;
      segment.out = static_cast<char*>(buffers.out) + skip * param_size;
      if (spec.rule.has_mu) segment.mu = memory + spec.mu_offset + done * mu_size;
      if (spec.rule.rule == Rule::kAdam) segment.nu = memory + spec.nu_offset + done * nu_size;
      if (spec.rule.param != DType::kF32) {
        segment.master = memory + spec.master_offset + done * master_size;
        segment.cells = cells;
      }
      segment.count = to - from;
      segment.decay = spec.leaves[leaf].decay;
      cells += cells_of(segment.count);
      done += segment.count;
      job.segments.push_back(segment);
      leaf_of_segment->push_back(static_cast<int64_t>(leaf));
    }
    leaf_begin += elements;
  }
  return job;
}

Status Engine::update(uint64_t request_id, int64_t subgroup, char* memory, bool fresh, uint64_t token) {
  Request* request = find(request_id);
  if (!request) return no_request(request_id);
  const auto spec = bucket(request->instance, request->bucket);
  std::vector<int64_t> leaf_of_segment;
  UpdateJob job = make_job(*request, *spec, spec->subgroups.at(subgroup), memory, &leaf_of_segment);
  job.fresh = fresh;
  const auto done = [this, token, leaves = std::move(leaf_of_segment)](const UpdateResult& result) {
    Event event;
    event.kind = EventKind::kUpdated;
    event.token = token;
    event.status = result.status;
    event.start_s = result.start_s;
    event.end_s = result.end_s;
    for (size_t i = 0; i < leaves.size(); ++i)
      if (result.adopted_cells[i] > 0) event.adopted_leaves.push_back(leaves[i]);
    push(std::move(event));
  };
  if (request->accelerator != nullptr) {
    request->accelerator->update(std::move(job), done);
  } else {
    kernels_->submit(std::move(job), done);
  }
  return Status();
}

Status Engine::hand_back(uint64_t request_id) {
  Request* request = find(request_id);
  if (!request) return no_request(request_id);
  const auto handed_back = [this, request_id] {
    Event event;
    event.kind = EventKind::kHandedBack;
    event.token = request_id;
    push(std::move(event));
  };
  if (request->accelerator != nullptr) {
    *request->handed_back = true;
    handed_back();
    return Status();
  }
  const auto spec = bucket(request->instance, request->bucket);
  kernels_->run([request, spec, handed_back] {
    for (size_t leaf = 0; leaf < request->leaves.size(); ++leaf) {
      const LeafBuffers& buffers = request->leaves[leaf];
      const size_t bytes = spec->leaves[leaf].elements * size_of(spec->rule.param);
      if (spec->rule.param == DType::kF32) {
        std::memset(buffers.out, 0, bytes);
      } else {
        std::memcpy(buffers.out, buffers.param, bytes);
      }
    }
    handed_back();
  });
  return Status();
}

void Engine::end(uint64_t request_id, Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = requests_.find(request_id);
  if (found == requests_.end()) return;
  std::shared_ptr<Request> request(std::move(found->second));
  requests_.erase(found);
  devices_.at(request->device).completions->run([request, status] { request->finish(status); });
}

Status Engine::complete(uint64_t request_id, uint32_t ticket) {
  Request* request = find(request_id);
  if (!request) return no_request(request_id);
  *request->ticket_out = ticket;
  end(request_id, Status());
  return Status();
}

Status Engine::fail(uint64_t request_id, const std::string& message) {
  if (!find(request_id)) return no_request(request_id);
  end(request_id, Status(Code::kIo, message));
  return Status();
}

void Engine::fail_all(const std::string& message) {
  // XLA takes its buffers back below: what works on them has to end first.
  for (const auto& accelerator : accelerators()) accelerator->drain();
  kernels_->close();
  std::vector<uint64_t> open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& entry : requests_) open.push_back(entry.first);
  }
  for (uint64_t request : open) end(request, Status(Code::kIo, message));
}

size_t Engine::open_requests() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return requests_.size();
}

void Engine::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  for (auto& tier : tiers_) tier->close();
  fail_all("jax_mlp_offload: the store of this program was closed while it ran");
  for (const auto& accelerator : accelerators()) accelerator->close();
  for (auto& device : devices_) device.second.completions->close();
}

namespace {
std::mutex registry_mutex;
std::map<int64_t, std::shared_ptr<Engine>>& registry() {
  // Never destroyed: XLA's threads may still look here while the process ends.
  static auto* engines = new std::map<int64_t, std::shared_ptr<Engine>>;
  return *engines;
}
}  // namespace

void register_engine(int64_t id, std::shared_ptr<Engine> engine) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry()[id] = std::move(engine);
}

void unregister_engine(int64_t id) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry().erase(id);
}

std::shared_ptr<Engine> find_engine(int64_t id) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto found = registry().find(id);
  return found == registry().end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Engine>> all_engines() {
  std::lock_guard<std::mutex> lock(registry_mutex);
  std::vector<std::shared_ptr<Engine>> engines;
  for (const auto& entry : registry()) engines.push_back(entry.second);
  return engines;
}

}  // namespace jmo
