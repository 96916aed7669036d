// The emulated device: its calls, its failures, what CUDA would refuse.
//
// 1. A call looks up its stream, counts itself, and pushes one operation onto the stream's queue.
// 2. The stream's thread waits for the mark that the operation has to wait for, does its work unless the
//    device has failed, and passes the operation's own mark.
// 3. A record makes a new mark of its event; a wait takes the event's last one.
//
// What always holds: no lock is taken by two calls but those of one event; looking up a handle shares one.
// Marks live as long as there are streams: a count of a mark's users would order those, too. Thread
// contract: as emulated.h says.
#include "ffi/device/emulated.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "ffi/device/cell_update.h"
#include "ffi/device/emulated_pins.h"
#include "ffi/device/emulated_stream.h"

namespace jmo {
namespace {

using namespace emulated;

constexpr int kKinds = static_cast<int>(EmulatedCall::kAny) + 1;
const char* const kNames[kKinds] = {"pin",          "make_memory",    "make_stream",    "make_event",
                                    "copy_to_host", "copy_to_device", "copy_on_device", "set_zero",
                                    "set_u32",      "update",         "record",         "wait",
                                    "wait_on_host", "a call"};

class EmulatedDevice : public Device {
 public:
  // How many calls of a kind there were before this one.
  int64_t count(EmulatedCall call) {
    return calls_[static_cast<int>(call)].fetch_add(1, std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t> calls_[kKinds] = {};
};

struct EventState {
  int device = 0;
  std::mutex mutex;
  std::deque<Mark> marks;  // the last one counts
  std::atomic<int> host_waits{0};

  Mark* last() {
    std::lock_guard<std::mutex> lock(mutex);
    return marks.empty() ? nullptr : &marks.back();
  }
};

}  // namespace

class EmulatedRuntime::Impl {
 public:
  explicit Impl(EmulatedOptions given) : options(std::move(given)), devices(std::max(options.devices, 0)) {}
  ~Impl() { streams.clear(); }

  EmulatedDevice* device(int number) {
    if (number < 0 || number >= static_cast<int>(devices.size()))
      die("there is no device " + std::to_string(number));
    return &devices[number];
  }

  // What the plan of failures has for this call.
  struct Fate {
    bool now = false, later = false;
  };
  Fate fate(EmulatedCall call, int number) {
    Fate fate;
    const bool in_step = call >= EmulatedCall::kCopyToHost;
    const auto one = [&](EmulatedCall kind) {
      const int64_t nth = device(number)->count(kind);
      for (const EmulatedFailure& failure : options.failures) {
        if (failure.call != kind || failure.device != number) continue;
        if (failure.nth >= 0 && failure.nth != nth) continue;
        (failure.later ? fate.later : fate.now) = true;
      }
    };
    one(call);
    if (in_step) one(EmulatedCall::kAny);
    return fate;
  }
  // A call on an event is not refused for reasons of its own: there the device fails. Null, or the name of
  // the operation that will.
  const char* event_fails_as(EmulatedCall call, int number) {
    const Fate fate = this->fate(call, number);
    const char* name = kNames[static_cast<int>(call)];
    if (fate.now) device(number)->fail("device " + std::to_string(number) + ": " + name + " failed");
    return fate.later ? name : nullptr;
  }
  static Status refused(EmulatedCall call, int number) {
    return Status(Code::kIo, "device " + std::to_string(number) + ": " + kNames[static_cast<int>(call)] +
                                 " was refused");
  }

  StreamState* stream(int number, Stream handle) const {
    std::shared_lock<std::shared_mutex> lock(mutex);
    const auto found = streams.find(handle);
    if (found == streams.end()) die("there is no such stream (any more)");
    if (found->second->device_number() != number) die("a stream of another device");
    return found->second.get();
  }
  EventState* event(int number, Event handle) const {
    std::shared_lock<std::shared_mutex> lock(mutex);
    const auto found = events.find(handle);
    if (found == events.end()) die("there is no such event (any more)");
    if (found->second->device != number) die("an event of another device");
    return found->second.get();
  }
  void* new_handle() { return reinterpret_cast<void*>(++handles); }  // never used twice

  // Gives an operation to a stream, or says why not. `call`'s plan has been asked.
  Status push(int number, StreamState* stream, std::unique_ptr<Operation> operation) {
    Status status = this->status(number);
    if (!status.ok()) return status;
    if (operation->pin != nullptr) operation->pin->users.fetch_add(1, std::memory_order_relaxed);
    stream->push(std::move(operation));
    return status;
  }
  Status simple(EmulatedCall call, int number, Stream handle, std::function<void(bool whole)> work);
  Status copy(EmulatedCall call, int number, Stream handle, void* to, const void* from, size_t bytes,
              const void* host);
  void do_update(int number, const DeviceUpdate& update);
  // What a failed device's streams still hold is not done, and uses nothing.
  void drain_failed() {
    std::shared_lock<std::shared_mutex> lock(mutex);
    for (const auto& entry : streams)
      if (devices[entry.second->device_number()].failed()) entry.second->drain();
  }
  // Whether the device has failed, and why; once that has been told, nothing is done on it any more.
  Status status(int number) const {
    if (!devices[number].failed()) return Status();
    std::shared_lock<std::shared_mutex> lock(mutex);
    for (const auto& entry : streams)
      if (entry.second->device_number() == number) entry.second->wait_idle();
    return devices[number].status();
  }

  const EmulatedOptions options;
  std::vector<EmulatedDevice> devices;
  Pins pins;
  mutable std::shared_mutex mutex;  // of the handles
  uintptr_t handles = 0;
  std::unordered_map<void*, std::pair<int, std::unique_ptr<char[]>>> memories;
  std::atomic<uint64_t> host_waits{0};
  std::unordered_map<void*, std::unique_ptr<EventState>> events;
  std::vector<std::unique_ptr<EventState>> old_events;  // an operation may still wait for their marks
  std::unordered_map<void*, std::unique_ptr<StreamState>> streams;
};

// `work` is told whether it is to do all, or, as it fails, half.
Status EmulatedRuntime::Impl::simple(EmulatedCall call, int number, Stream handle,
                                     std::function<void(bool whole)> work) {
  StreamState* to = stream(number, handle);
  const Fate fate = this->fate(call, number);
  if (fate.now) return refused(call, number);
  auto operation = std::make_unique<Operation>();
  if (fate.later) operation->fails_as = kNames[static_cast<int>(call)];
  operation->work = [work = std::move(work), whole = !fate.later] { work(whole); };
  return push(number, to, std::move(operation));
}

// `host` is which of the two is host memory, null where both are the device's.
Status EmulatedRuntime::Impl::copy(EmulatedCall call, int number, Stream handle, void* to, const void* from,
                                   size_t bytes, const void* host) {
  StreamState* stream = this->stream(number, handle);
  const Fate fate = this->fate(call, number);
  if (fate.now) return refused(call, number);
  if ((to != host && pins.holds(to, 1)) || (from != host && pins.holds(from, 1)))
    return Status(Code::kInvalid,
                  std::string(kNames[static_cast<int>(call)]) + ": pinned host memory as the device's");
  auto operation = std::make_unique<Operation>();
  bool whole = true;
  if (host != nullptr) operation->pin = pins.find(host, bytes, &whole);
  if (!whole)
    return Status(Code::kInvalid,
                  std::string(kNames[static_cast<int>(call)]) + ": memory that is pinned in part");
  if (fate.later) operation->fails_as = kNames[static_cast<int>(call)];
  operation->work = [to, from, size = fate.later ? bytes / 2 : bytes] { std::memmove(to, from, size); };
  Mark end;
  const bool waits = host != nullptr && operation->pin == nullptr;
  if (waits) operation->passes = &end;
  Status status = push(number, stream, std::move(operation));
  if (!waits || !status.ok()) return status;
  end.wait();
  return this->status(number);
}

// On the stream's thread. Where CUDA would meet an illegal address, the device fails.
void EmulatedRuntime::Impl::do_update(int number, const DeviceUpdate& update) {
  const size_t count = update.count;
  bool pinned = pins.holds(update.hyper, sizeof(float)) &&
                pins.holds(update.segments, count * sizeof(Segment)) &&
                pins.holds(update.first_cell, (count + 1) * sizeof(int64_t)) &&
                pins.holds(update.adopted_cells, count * sizeof(int64_t));
  const size_t master_size = size_of(master_type(update.spec.param));
  for (size_t i = 0; i < count && pinned; ++i) {
    const Segment& segment = update.segments[i];
    const size_t elements = segment.count;
    const auto holds = [&](const void* memory, size_t bytes) {
      return memory == nullptr || pins.holds(memory, bytes);
    };
    pinned = holds(segment.mu, elements * size_of(update.spec.mu)) &&
             holds(segment.nu, elements * size_of(update.spec.nu)) &&
             holds(segment.master, elements * master_size) &&
             holds(segment.cells, cells_of(segment.count) * sizeof(uint32_t));
  }
  if (pinned) {
    run_device_update(update);
  } else {
    devices[number].fail("device " + std::to_string(number) +
                         ": update reaches host memory that is not pinned");
  }
}

EmulatedRuntime::EmulatedRuntime(EmulatedOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
EmulatedRuntime::~EmulatedRuntime() = default;

// -- set-up

Status EmulatedRuntime::devices(int* count) const {
  *count = static_cast<int>(impl_->devices.size());
  return Status();
}

int EmulatedRuntime::numa_node(int) const { return impl_->options.numa_node; }

Status EmulatedRuntime::pin(void* memory, size_t bytes) {
  if (impl_->fate(EmulatedCall::kPin, 0).now) return Impl::refused(EmulatedCall::kPin, 0);
  return impl_->pins.add(static_cast<char*>(memory), bytes);
}

void EmulatedRuntime::unpin(void* memory) {
  impl_->drain_failed();
  impl_->pins.remove(static_cast<char*>(memory));
}

Status EmulatedRuntime::make_memory(int device, size_t bytes, void** memory) {
  if (impl_->fate(EmulatedCall::kMakeMemory, device).now)
    return Impl::refused(EmulatedCall::kMakeMemory, device);
  if (Status status = impl_->status(device); !status.ok()) return status;
  auto fresh = std::make_unique<char[]>(bytes);
  *memory = fresh.get();
  std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  impl_->memories[*memory] = {device, std::move(fresh)};
  return Status();
}

void EmulatedRuntime::free_memory(int device, void* memory) {
  std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  const auto found = impl_->memories.find(memory);
  if (found == impl_->memories.end()) die("there is no such memory (any more)");
  if (found->second.first != device) die("memory of another device");
  impl_->memories.erase(found);
}

Status EmulatedRuntime::make_stream(int device, Stream* stream) {
  EmulatedDevice* owner = impl_->device(device);
  if (impl_->fate(EmulatedCall::kMakeStream, device).now)
    return Impl::refused(EmulatedCall::kMakeStream, device);
  if (Status status = impl_->status(device); !status.ok()) return status;
  std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  *stream = impl_->new_handle();
  const uint64_t seed = impl_->options.seed * 1000003 + impl_->handles;
  impl_->streams[*stream] =
      std::make_unique<StreamState>(device, owner, seed, impl_->options.longest_delay_us);
  return Status();
}

void EmulatedRuntime::free_stream(int device, Stream stream) {
  impl_->stream(device, stream)->finish();
  std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  impl_->streams.erase(stream);
  if (impl_->streams.empty()) impl_->old_events.clear();
}

Status EmulatedRuntime::make_event(int device, Event* event) {
  if (impl_->fate(EmulatedCall::kMakeEvent, device).now)
    return Impl::refused(EmulatedCall::kMakeEvent, device);
  if (Status status = impl_->status(device); !status.ok()) return status;
  auto state = std::make_unique<EventState>();
  state->device = device;
  std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  *event = impl_->new_handle();
  impl_->events[*event] = std::move(state);
  return Status();
}

void EmulatedRuntime::free_event(int device, Event event) {
  if (impl_->event(device, event)->host_waits.load() != 0) die("free of an event that a thread waits for");
  std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  if (!impl_->streams.empty()) impl_->old_events.push_back(std::move(impl_->events.at(event)));
  impl_->events.erase(event);
}

// -- in a step

Status EmulatedRuntime::copy_to_host(int device, Stream stream, void* to, const void* from, size_t bytes) {
  return impl_->copy(EmulatedCall::kCopyToHost, device, stream, to, from, bytes, to);
}

Status EmulatedRuntime::copy_to_device(int device, Stream stream, void* to, const void* from, size_t bytes) {
  return impl_->copy(EmulatedCall::kCopyToDevice, device, stream, to, from, bytes, from);
}

Status EmulatedRuntime::copy_on_device(int device, Stream stream, void* to, const void* from, size_t bytes) {
  return impl_->copy(EmulatedCall::kCopyOnDevice, device, stream, to, from, bytes, nullptr);
}

Status EmulatedRuntime::set_zero(int device, Stream stream, void* to, size_t bytes) {
  return impl_->simple(EmulatedCall::kSetZero, device, stream,
                       [to, bytes](bool whole) { std::memset(to, 0, whole ? bytes : bytes / 2); });
}

Status EmulatedRuntime::set_u32(int device, Stream stream, uint32_t* to, uint32_t value) {
  return impl_->simple(EmulatedCall::kSetU32, device, stream, [to, value](bool whole) {
    if (whole) *to = value;
  });
}

Status EmulatedRuntime::update(int device, Stream stream, const DeviceUpdate& update) {
  return impl_->simple(EmulatedCall::kUpdate, device, stream, [this, device, update](bool whole) {
    if (whole) impl_->do_update(device, update);
  });
}

Status EmulatedRuntime::record(int device, Event event, Stream stream) {
  StreamState* to = impl_->stream(device, stream);
  EventState* state = impl_->event(device, event);
  auto operation = std::make_unique<Operation>();
  operation->fails_as = impl_->event_fails_as(EmulatedCall::kRecord, device);
  std::lock_guard<std::mutex> lock(state->mutex);  // nobody finds the mark before it is in the queue
  if (Status status = impl_->status(device); !status.ok()) return status;
  operation->passes = &state->marks.emplace_back();
  to->push(std::move(operation));
  return Status();
}

Status EmulatedRuntime::wait(int device, Stream stream, Event event) {
  StreamState* to = impl_->stream(device, stream);
  EventState* state = impl_->event(device, event);
  auto operation = std::make_unique<Operation>();
  operation->fails_as = impl_->event_fails_as(EmulatedCall::kWait, device);
  operation->after = state->last();
  return impl_->push(device, to, std::move(operation));
}

Status EmulatedRuntime::wait_on_host(int device, Event event) {
  EventState* state = impl_->event(device, event);
  if (const char* as = impl_->event_fails_as(EmulatedCall::kWaitOnHost, device))
    fail(device, "device " + std::to_string(device) + ": " + as + " failed");
  state->host_waits.fetch_add(1, std::memory_order_relaxed);
  if (Mark* mark = state->last()) mark->wait();
  Jitter(impl_->options.seed + impl_->host_waits.fetch_add(1, std::memory_order_relaxed),
         impl_->options.longest_delay_us)
      .pause();
  state->host_waits.fetch_sub(1, std::memory_order_relaxed);
  return impl_->status(device);
}

// -- of the emulation only

Status EmulatedRuntime::run(int device, Stream stream, std::function<void()> work) {
  auto operation = std::make_unique<Operation>();
  operation->work = std::move(work);
  return impl_->push(device, impl_->stream(device, stream), std::move(operation));
}

Status EmulatedRuntime::poison(int device, Stream stream, void* memory, size_t bytes) {
  return run(device, stream, [memory, bytes] { std::memset(memory, 0xFF, bytes); });
}

Status EmulatedRuntime::synchronize(int device, Stream stream) {
  impl_->stream(device, stream)->drain();
  return impl_->status(device);
}

void EmulatedRuntime::fail(int device, const std::string& message) { impl_->device(device)->fail(message); }

EmulatedRuntime::InUse EmulatedRuntime::in_use() const {
  std::shared_lock<std::shared_mutex> lock(impl_->mutex);
  return {impl_->streams.size(), impl_->events.size(), impl_->pins.count(), impl_->memories.size()};
}

}  // namespace jmo
