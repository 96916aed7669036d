// The emulated device by itself: streams, events, copies, failures and memory checks are those of CUDA.
#include "ffi/device/emulated.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/core/slots.h"
#include "ffi/tests/check.h"
#include "ffi/tests/kernel_fixture.h"

namespace jmo {
namespace {

constexpr size_t kPage = 4096;

EmulatedOptions options(int devices, int longest_delay_us, std::vector<EmulatedFailure> failures = {}) {
  EmulatedOptions result;
  result.devices = devices;
  result.seed = 7;
  result.longest_delay_us = longest_delay_us;
  result.failures = std::move(failures);
  return result;
}

// A runtime with two streams and two events on device 0, and some pinned pages.
struct World {
  explicit World(EmulatedOptions given) : runtime(std::move(given)), pages(8, kPage, 1) {
    for (auto& stream : streams) CHECK(runtime.make_stream(0, &stream).ok());
    for (auto& event : events) CHECK(runtime.make_event(0, &event).ok());
    CHECK(runtime.pin(pages.slot(0), 8 * kPage).ok());
    std::memset(pages.slot(0), 0, 8 * kPage);
  }
  ~World() {
    for (auto& stream : streams) runtime.free_stream(0, stream);
    for (auto& event : events) runtime.free_event(0, event);
    runtime.unpin(pages.slot(0));
    const EmulatedRuntime::InUse left = runtime.in_use();
    CHECK_EQ(left.streams + left.events + left.pins + left.memories, size_t{0});
  }
  int* pinned(size_t page = 0) { return reinterpret_cast<int*>(pages.slot(page)); }

  EmulatedRuntime runtime;
  Slots pages;
  DeviceRuntime::Stream streams[2];
  DeviceRuntime::Event events[2];
};

// Holds a stream up until it is let go.
class Gate {
 public:
  Gate(EmulatedRuntime& runtime, DeviceRuntime::Stream stream) {
    CHECK(runtime.run(0, stream, [future = opens_.get_future().share()] { future.wait(); }).ok());
  }
  void open() { opens_.set_value(); }

 private:
  std::promise<void> opens_;
};

void pause_ms(int duration_ms) { std::this_thread::sleep_for(std::chrono::milliseconds(duration_ms)); }

void test_copies_come_later_and_in_order() {
  World world(options(1, 200));
  EmulatedRuntime& runtime = world.runtime;
  const auto stream = world.streams[0];
  int device[4] = {1, 2, 3, 4};
  uint32_t number = 0;
  Gate gate(runtime, stream);
  CHECK(runtime.copy_to_host(0, stream, world.pinned(), device, 16).ok());
  CHECK(runtime.copy_to_device(0, stream, device + 1, world.pinned(), 4).ok());
  CHECK(runtime.copy_on_device(0, stream, device + 2, device + 1, 4).ok());
  CHECK(runtime.set_zero(0, stream, device, 4).ok());
  CHECK(runtime.set_u32(0, stream, &number, 77).ok());
  CHECK(runtime.poison(0, stream, device + 3, 4).ok());
  pause_ms(5);
  CHECK(world.pinned()[3] == 0 && device[1] == 2 && number == 0);
  device[3] = 5;  // a copy reads when it is done, not at the call
  gate.open();
  CHECK(runtime.synchronize(0, stream).ok());
  CHECK(world.pinned()[0] == 1 && world.pinned()[3] == 5);
  CHECK(device[0] == 0 && device[1] == 1 && device[2] == 1 && device[3] == -1);
  CHECK_EQ(number, 77u);
}

void test_events() {
  World world(options(1, 0));
  EmulatedRuntime& runtime = world.runtime;
  const auto [first, second] = world.streams;
  const auto [event, other] = world.events;
  CHECK(runtime.wait_on_host(0, event).ok());  // never recorded
  CHECK(runtime.wait(0, second, event).ok());
  CHECK(runtime.synchronize(0, second).ok());

  Gate gate(runtime, first);
  CHECK(runtime.record(0, event, first).ok());
  CHECK(runtime.wait(0, second, event).ok());
  std::atomic<bool> past{false};
  CHECK(runtime.run(0, second, [&past] { past = true; }).ok());
  DeviceRuntime::Stream third;
  CHECK(runtime.make_stream(0, &third).ok());
  CHECK(runtime.record(0, event, third).ok());  // the wait above keeps the event as it was
  CHECK(runtime.wait_on_host(0, event).ok());
  CHECK(runtime.record(0, other, second).ok());
  pause_ms(5);
  CHECK(!past);
  gate.open();
  CHECK(runtime.wait_on_host(0, other).ok());
  CHECK(past);

  CHECK(runtime.record(0, event, first).ok());  // what comes after a record is not waited for
  Gate late(runtime, first);
  CHECK(runtime.wait_on_host(0, event).ok());
  CHECK(runtime.record(0, event, first).ok());
  CHECK(runtime.wait(0, third, event).ok());
  CHECK(runtime.record(0, other, third).ok());
  runtime.free_event(0, event);  // a wait that was given keeps what it needs
  late.open();
  CHECK(runtime.wait_on_host(0, other).ok());
  CHECK(runtime.make_event(0, &world.events[0]).ok());
  runtime.free_stream(0, third);
}

void test_copies_of_pageable_memory_wait() {
  World world(options(1, 100));
  EmulatedRuntime& runtime = world.runtime;
  int device = 5, pageable = 0;
  std::atomic<bool> before{false};
  CHECK(runtime
            .run(0, world.streams[0],
                 [&before] {
                   pause_ms(3);
                   before = true;
                 })
            .ok());
  CHECK(runtime.copy_to_host(0, world.streams[0], &pageable, &device, 4).ok());
  CHECK(before && pageable == 5);
  pageable = 6;
  CHECK(runtime.copy_to_device(0, world.streams[0], &device, &pageable, 4).ok());
  CHECK_EQ(device, 6);
}

void test_pins() {
  World world(options(2, 0, {{EmulatedCall::kPin, 0, 4, false}}));
  EmulatedRuntime& runtime = world.runtime;
  Slots more(3, kPage, 1);
  char* memory = more.slot(0);
  CHECK(!runtime.pin(memory + 8, kPage).ok());
  CHECK(runtime.pin(memory, 2 * kPage).ok());
  CHECK(!runtime.pin(memory + kPage, 2 * kPage).ok());  // in part already
  CHECK(!runtime.pin(memory + 2 * kPage, kPage).ok());  // the plan's
  CHECK(runtime.pin(memory + 2 * kPage, kPage).ok());
  CHECK_EQ(runtime.in_use().pins, size_t{3});
  std::vector<char> device(4 * kPage);
  // over the end of what was pinned at once
  CHECK(!runtime.copy_to_host(0, world.streams[0], memory + kPage, device.data(), kPage + 1).ok());
  CHECK(!runtime.copy_to_host(0, world.streams[0], memory, world.pinned(), 8).ok());  // host to host
  runtime.unpin(memory);
  runtime.unpin(memory + 2 * kPage);
}

void test_memory() {
  World world(options(2, 0, {{EmulatedCall::kMakeMemory, 1, 0, false}}));
  void* memory = nullptr;
  CHECK(!world.runtime.make_memory(1, 16, &memory).ok());
  CHECK(world.runtime.make_memory(0, 16, &memory).ok());
  CHECK(world.runtime.set_zero(0, world.streams[0], memory, 16).ok());
  CHECK(world.runtime.copy_to_host(0, world.streams[0], world.pinned(), memory, 16).ok());
  CHECK(world.runtime.synchronize(0, world.streams[0]).ok());
  world.runtime.free_memory(0, memory);
}

void test_a_refused_call_does_nothing() {
  World world(
      options(1, 0, {{EmulatedCall::kCopyToHost, 0, 1, false}, {EmulatedCall::kMakeStream, 0, 2, false}}));
  EmulatedRuntime& runtime = world.runtime;
  int device[2] = {1, 2};
  DeviceRuntime::Stream stream;
  CHECK(!runtime.make_stream(0, &stream).ok());
  CHECK(runtime.copy_to_host(0, world.streams[0], world.pinned(), device, 4).ok());
  const Status refused = runtime.copy_to_host(0, world.streams[0], world.pinned() + 1, device + 1, 4);
  CHECK(refused.message() == "device 0: copy_to_host was refused");
  CHECK(runtime.synchronize(0, world.streams[0]).ok());
  CHECK(world.pinned()[0] == 1 && world.pinned()[1] == 0);
}

void test_a_failed_device_stays_failed() {
  World world(options(2, 50, {{EmulatedCall::kCopyToDevice, 0, 1, true}}));
  EmulatedRuntime& runtime = world.runtime;
  const auto [first, second] = world.streams;
  int device[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; ++i) world.pinned()[i] = i + 1;
  Gate gate(runtime, first);
  CHECK(runtime.copy_to_device(0, first, device, world.pinned(), 4).ok());
  CHECK(runtime.copy_to_device(0, first, device + 1, world.pinned() + 1, 8).ok());  // this one fails, later
  CHECK(runtime.copy_to_device(0, first, device + 3, world.pinned() + 3, 4).ok());
  CHECK(runtime.record(0, world.events[0], first).ok());
  CHECK(runtime.wait(0, second, world.events[0]).ok());
  CHECK(runtime.set_zero(0, second, device, 4).ok());
  gate.open();
  const Status failed = runtime.wait_on_host(0, world.events[0]);
  CHECK(failed.message() == "device 0: copy_to_device failed");
  CHECK(runtime.synchronize(0, second).message() == failed.message());
  CHECK(device[0] == 1 && device[1] == 2 && device[2] == 0 &&
        device[3] == 0);  // one half done, none after it
  CHECK(runtime.copy_to_host(0, first, world.pinned(), device, 4).message() == failed.message());
  CHECK(runtime.record(0, world.events[0], first).message() == failed.message());
  CHECK(runtime.wait(0, first, world.events[0]).message() == failed.message());
  CHECK(runtime.wait_on_host(0, world.events[1]).message() == failed.message());  // even one never recorded
  DeviceRuntime::Stream stream;
  DeviceRuntime::Event event;
  CHECK(runtime.make_stream(0, &stream).message() == failed.message());
  CHECK(runtime.make_event(0, &event).message() == failed.message());
  runtime.fail(0, "later causes do not count");
  CHECK(runtime.set_u32(0, first, nullptr, 1).message() == failed.message());
  int pageable = 3;
  CHECK(runtime.copy_to_host(0, first, &pageable, device, 4).message() == failed.message());
  CHECK(runtime.make_stream(1, &stream).ok());  // the other device has not failed
  CHECK(runtime.set_zero(1, stream, device, 4).ok());
  CHECK(runtime.synchronize(1, stream).ok());
  CHECK_EQ(device[0], 0);
  runtime.free_stream(1, stream);
}

// A host that is told of a failure may take its memory back: nothing is done on the device any more.
void test_nothing_runs_after_a_failure_was_told() {
  World world(options(1, 0));
  EmulatedRuntime& runtime = world.runtime;
  std::atomic<bool> begun{false}, ended{false};
  CHECK(runtime
            .run(0, world.streams[1],
                 [&] {
                   begun = true;
                   pause_ms(10);
                   ended = true;
                 })
            .ok());
  while (!begun) std::this_thread::yield();
  runtime.fail(0, "gone");
  CHECK(runtime.set_u32(0, world.streams[0], nullptr, 1).message() == "gone");
  CHECK(ended);
  CHECK(runtime.wait_on_host(0, world.events[0]).message() == "gone");
}

// A wait on the host that fails later fails the device; what its streams still hold is no use of pinned
// memory.
void test_a_failed_wait_fails_the_device() {
  World world(options(1, 0, {{EmulatedCall::kWaitOnHost, 0, 0, true}}));
  EmulatedRuntime& runtime = world.runtime;
  Gate gate(runtime, world.streams[0]);
  int device = 0;
  for (int i = 0; i < 100; ++i)
    CHECK(runtime.copy_to_device(0, world.streams[0], &device, world.pinned(), 4).ok());
  std::thread opens([&gate] {
    pause_ms(3);
    gate.open();
  });
  const Status failed = runtime.wait_on_host(0, world.events[0]);
  CHECK(failed.message() == "device 0: wait_on_host failed");
  CHECK(runtime.synchronize(0, world.streams[1]).message() == failed.message());
  runtime.unpin(world.pinned());
  CHECK(runtime.pin(world.pinned(), 8 * kPage).ok());
  opens.join();
}

// A call on an event has no failure of its own: there the device fails.
void test_calls_on_events_fail_the_device() {
  for (const EmulatedCall call : {EmulatedCall::kRecord, EmulatedCall::kWait}) {
    World world(options(1, 0, {{call, 0, 1, false}}));
    const auto give = [&world, call] {
      return call == EmulatedCall::kRecord ? world.runtime.record(0, world.events[0], world.streams[0])
                                           : world.runtime.wait(0, world.streams[0], world.events[0]);
    };
    CHECK(give().ok());
    const Status failed = give();
    CHECK(failed.message().find(" failed") != std::string::npos);
    CHECK(world.runtime.synchronize(0, world.streams[1]).message() == failed.message());
  }
}

// A world's pinned pages as what an update reads and writes of the host.
DeviceUpdate make_update(World& world, kernel_fixture::State& state, const std::vector<float>& hyper) {
  DeviceUpdate update;
  update.spec = state.what.spec;
  auto* segment = reinterpret_cast<Segment*>(world.pinned(0));
  auto* first_cell = reinterpret_cast<int64_t*>(world.pinned(1));
  auto* adopted = reinterpret_cast<int64_t*>(world.pinned(2));
  std::memcpy(world.pinned(3), hyper.data(), hyper.size() * sizeof(float));
  *segment = state.segment();
  segment->mu = world.pinned(4);
  segment->nu = world.pinned(5);
  segment->master = world.pinned(6);
  segment->cells = reinterpret_cast<uint32_t*>(world.pinned(7));
  first_cell[0] = 0;
  first_cell[1] = cells_of(state.count);
  update.hyper = reinterpret_cast<const float*>(world.pinned(3));
  update.segments = segment;
  update.first_cell = first_cell;
  update.adopted_cells = adopted;
  update.count = 1;
  return update;
}

void test_update() {
  World world(options(1, 50));
  EmulatedRuntime& runtime = world.runtime;
  const kernel_fixture::Case what{
      {Rule::kAdam, DType::kBF16, DType::kF32, DType::kF32, true, false}, DType::kBF16, true};
  kernel_fixture::State state(what, 1000, 0);
  kernel_fixture::Random random(5);
  kernel_fixture::fill(state.grad, random, state.count);
  kernel_fixture::fill(state.param, random, state.count);
  kernel_fixture::State expected = state;
  const std::vector<float> hyper = kernel_fixture::hyper_for(what.spec, 0);
  CHECK_EQ(update_run(what.spec, hyper.data(), expected.segment(), 0, 1000, true), int64_t{0});
  DeviceUpdate update = make_update(world, state, hyper);
  update.fresh = true;
  CHECK(runtime.update(0, world.streams[0], update).ok());
  update.fresh = false;
  update.count = 0;  // taken at the call
  CHECK(runtime.synchronize(0, world.streams[0]).ok());
  CHECK(state.out.bytes == expected.out.bytes);
  CHECK(std::memcmp(world.pinned(4), expected.mu.data(), 4000) == 0);
  CHECK(std::memcmp(world.pinned(5), expected.nu.data(), 4000) == 0);
  CHECK(std::memcmp(world.pinned(6), expected.master.data(), 2000) == 0);
  CHECK_EQ(*reinterpret_cast<uint32_t*>(world.pinned(7)), expected.cells[0]);

  update.count = 1;
  *reinterpret_cast<uint32_t*>(world.pinned(7)) ^= 1;
  CHECK(runtime.update(0, world.streams[0], update).ok());
  CHECK(runtime.synchronize(0, world.streams[0]).ok());
  CHECK_EQ(*update.adopted_cells, int64_t{1});
  reinterpret_cast<Segment*>(world.pinned(0))->nu = state.nu.data();  // not pinned
  CHECK(runtime.update(0, world.streams[0], update).ok());
  CHECK(!runtime.synchronize(0, world.streams[0]).ok());
}

// Threads that pass a buffer through streams of several devices: each adds one to what the one before left.
void test_many_threads() {
  constexpr int kDevices = 3, kChains = 3, kLinks = 60;
  EmulatedRuntime runtime(options(kDevices, 60));
  std::vector<std::thread> threads;
  for (int chain = 0; chain < kDevices * kChains; ++chain) {
    threads.emplace_back([&runtime, chain] {
      const int device = chain % kDevices;
      DeviceRuntime::Stream streams[3];
      DeviceRuntime::Event event;
      for (auto& stream : streams) CHECK(runtime.make_stream(device, &stream).ok());
      CHECK(runtime.make_event(device, &event).ok());
      int number = 0;  // written by whichever stream has its turn
      for (int i = 0; i < kLinks; ++i) {
        CHECK(runtime.wait(device, streams[i * 7 % 3], event).ok());
        CHECK(runtime.run(device, streams[i * 7 % 3], [&number] { ++number; }).ok());
        CHECK(runtime.record(device, event, streams[i * 7 % 3]).ok());
        if (i % 16 != 15) continue;
        CHECK(runtime.wait_on_host(device, event).ok());
        CHECK_EQ(number, i + 1);
      }
      for (auto& stream : streams) runtime.free_stream(device, stream);
      CHECK_EQ(number, kLinks);
      runtime.free_event(device, event);
    });
  }
  for (auto& thread : threads) thread.join();
}

// How a process ends that does this: its exit status, or minus the signal.
template <typename Work>
int end_of(Work work) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    if (std::freopen("/dev/null", "w", stderr) == nullptr) std::_Exit(99);
    {
      World world(options(1, 0));
      work(world);
    }
    std::exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

void test_misuse_ends_the_process() {
  CHECK_EQ(end_of([](World&) {}), 0);
  CHECK_EQ(end_of([](World& world) { world.runtime.unpin(world.pinned(1)); }), -SIGABRT);
  CHECK_EQ(end_of([](World& world) { world.runtime.free_stream(0, world.events[0]); }), -SIGABRT);
  CHECK_EQ(end_of([](World& world) { world.runtime.free_event(0, world.streams[0]); }), -SIGABRT);
  CHECK_EQ(end_of([](World& world) { (void)world.runtime.record(1, world.events[0], world.streams[0]); }),
           -SIGABRT);
  CHECK_EQ(end_of([](World& world) { world.runtime.free_memory(0, world.pinned()); }), -SIGABRT);
  CHECK_EQ(end_of([](World& world) {
             world.runtime.free_stream(0, world.streams[1]);
             (void)world.runtime.set_u32(0, world.streams[1], nullptr, 0);
           }),
           -SIGABRT);
  CHECK_EQ(end_of([](World& world) {
             Gate gate(world.runtime, world.streams[0]);
             CHECK(world.runtime.copy_to_host(0, world.streams[0], world.pinned(), &gate, 4).ok());
             world.runtime.unpin(world.pinned());
           }),
           -SIGABRT);
  CHECK_EQ(end_of([](World& world) {
             Gate gate(world.runtime, world.streams[0]);
             CHECK(world.runtime.record(0, world.events[0], world.streams[0]).ok());
             std::thread waits([&world] { (void)world.runtime.wait_on_host(0, world.events[0]); });
             pause_ms(20);
             world.runtime.free_event(0, world.events[0]);
           }),
           -SIGABRT);
}

// Two streams that use one buffer, the second without waiting for the first, long after it: the values are
// right, and yet the sanitizer is to tell.
void test_a_missing_wait_is_found() {
#if defined(__SANITIZE_THREAD__)
  const auto use = [](bool waits) {
    return [waits](World& world) {
      int device = 0;
      CHECK(world.runtime.copy_to_device(0, world.streams[0], &device, world.pinned(), 4).ok());
      CHECK(world.runtime.record(0, world.events[0], world.streams[0]).ok());
      pause_ms(20);
      if (waits) CHECK(world.runtime.wait(0, world.streams[1], world.events[0]).ok());
      CHECK(world.runtime.copy_to_host(0, world.streams[1], world.pinned(1), &device, 4).ok());
      CHECK(world.runtime.synchronize(0, world.streams[1]).ok());
    };
  };
  CHECK_EQ(end_of(use(true)), 0);
  CHECK(end_of(use(false)) != 0);
#endif
}

void test_speed() {
  constexpr int kCalls = 20000;
  World world(options(1, 0));
  const auto start = std::chrono::steady_clock::now();
  int device = 0;
  for (int i = 0; i < kCalls; ++i) {
    CHECK(world.runtime.copy_to_host(0, world.streams[0], world.pinned(), &device, 4).ok());
    if (i % 8 != 0) continue;
    CHECK(world.runtime.record(0, world.events[0], world.streams[0]).ok());
    CHECK(world.runtime.wait_on_host(0, world.events[0]).ok());
  }
  CHECK(world.runtime.synchronize(0, world.streams[0]).ok());
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  std::printf("emulated_test: %.1f us a copy\n", took.count() / kCalls);
}

}  // namespace
}  // namespace jmo

int main() {
  jmo::set_flush_denormals();
  jmo::test_misuse_ends_the_process();  // forks: before there are threads
  jmo::test_a_missing_wait_is_found();
  jmo::test_copies_come_later_and_in_order();
  jmo::test_events();
  jmo::test_copies_of_pageable_memory_wait();
  jmo::test_pins();
  jmo::test_memory();
  jmo::test_a_refused_call_does_nothing();
  jmo::test_a_failed_device_stays_failed();
  jmo::test_nothing_runs_after_a_failure_was_told();
  jmo::test_a_failed_wait_fails_the_device();
  jmo::test_calls_on_events_fail_the_device();
  jmo::test_update();
  jmo::test_many_threads();
  jmo::test_speed();
  return 0;
}
