// A link's edges, one at a time: ops that do not belong together, too many of them, programs that end
// between push and pull, refused calls, set-up that fails. (Random worlds: device_link_test.)
#include "ffi/device/link.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/core/engine.h"
#include "ffi/device/emulated.h"
#include "ffi/tests/check.h"

namespace jmo {
namespace {

constexpr int64_t kElements = 100;
constexpr size_t kChunkBytes = 36864;
const float kHyper[kSgdHyperCount + 1] = {-0.5f, 0, 0};

BucketSpec make_bucket() {  // updates are gradients by -1/2; there are no records
  BucketSpec spec;
  spec.rule.rule = Rule::kSgd;
  spec.rule.has_mu = false;
  spec.hyper_count = kSgdHyperCount;
  spec.leaves = {{kElements, false}};
  spec.subgroups = {{0, kElements}};
  return spec;
}

LinkOptions link_options(size_t blocks) {
  LinkOptions options;
  options.ordinal = 7;
  options.copier.chunk_bytes = kChunkBytes;
  options.copier.chunks = 1;
  options.blocks = blocks;
  return options;
}

struct World {
  explicit World(size_t blocks, std::vector<EmulatedFailure> failures = {}) : runtime(options(failures)) {
    link = std::make_shared<DeviceLink>(engine, runtime, link_options(blocks));
    CHECK(link->status().ok());
    engine.add_device(7, link);
    CHECK(engine.add_bucket(0, 0, make_bucket()).ok());
    CHECK(runtime.make_stream(0, &stream).ok());
    grad.assign(kElements, 4.0f);
  }
  ~World() {
    engine.close();
    runtime.free_stream(0, stream);
  }
  static EmulatedOptions options(std::vector<EmulatedFailure> failures) {
    EmulatedOptions options;
    options.longest_delay_us = 50;
    options.failures = std::move(failures);
    return options;
  }

  std::vector<LeafBuffers> leaves() { return {{grad.data(), DType::kF32, nullptr, grad.data()}}; }
  Status push(int64_t run_id) {
    Request request;
    request.device = 7;
    request.run_id = run_id;
    request.leaves = leaves();
    return link->push(std::move(request), &ticket, kHyper, kSgdHyperCount + 1, stream, false);
  }
  // The next event of a kind; others are kept.
  Event next(EventKind kind) {
    for (;;) {
      for (auto it = events.begin(); it != events.end(); ++it) {
        if (it->kind != kind) continue;
        const Event event = *it;
        events.erase(it);
        return event;
      }
      for (const Event& event : engine.wait(1.0, 8)) events.push_back(event);
    }
  }
  // As the driver and the pull do it.
  void update(int64_t run_id) {
    const uint64_t request = next(EventKind::kArrived).token;
    CHECK(engine.update(request, 0, nullptr, true, 1).ok());
    CHECK(next(EventKind::kUpdated).status.ok());
    CHECK(engine.complete(request, 9).ok());
    CHECK(pull(run_id).ok());
    CHECK(runtime.synchronize(0, stream).ok());
  }
  Status pull(int64_t run_id) {
    Status status;
    const auto pushed = link->find(0, 0, run_id, leaves(), &status);
    if (pushed == nullptr) return status;
    link->wait(pushed);
    return link->finish(pushed, make_bucket(), &ticket_out, stream, false);
  }

  EmulatedRuntime runtime;  // outlives the engine with its link
  Engine engine{1};
  std::shared_ptr<DeviceLink> link;
  DeviceRuntime::Stream stream = nullptr;
  std::vector<float> grad;
  std::vector<Event> events;
  uint32_t ticket = 3, ticket_out = 0;
};

bool says(const Status& status, const char* what) { return status.message().find(what) != std::string::npos; }

void test_an_update() {
  World world(1);
  CHECK(world.push(1).ok());
  world.update(1);
  CHECK(world.grad[0] == -2.0f && world.grad[kElements - 1] == -2.0f);
  CHECK_EQ(world.ticket_out, 9u);
  CHECK(world.link->stats().to_host_bytes == 400 && world.link->stats().to_device_bytes == 400);
}

void test_ops_that_do_not_belong_together() {
  World world(2);
  CHECK(says(world.pull(1), "jmo_pull without its jmo_push"));
  CHECK(world.push(1).ok());
  CHECK(says(world.pull(2), "jmo_pull without its jmo_push"));
  Status status;
  std::vector<LeafBuffers> moved = world.leaves();
  moved[0].out = world.grad.data() + 1;
  CHECK(world.link->find(0, 0, 1, moved, &status) == nullptr);
  CHECK(says(status, "XLA moved gradients"));
  moved = world.leaves();
  moved.push_back(moved[0]);
  CHECK(world.link->find(0, 0, 1, moved, &status) == nullptr);
  world.update(1);
  CHECK(says(world.pull(1), "jmo_pull without its jmo_push"));  // once only
}

void test_too_many_ops() {
  World world(2);
  CHECK(world.push(1).ok());
  CHECK(world.push(1).ok());
  CHECK(says(world.push(1), "more than 2 ops under way"));
  const uint32_t numbers[2] = {1, 2};
  CHECK(!world.link->agree(0, numbers, numbers + 1, world.stream, false).ok());
  world.update(1);
  CHECK(world.push(1).ok());
  Request request;
  request.leaves = world.leaves();
  const std::vector<float> hyper(40);
  CHECK(says(world.link->push(std::move(request), &world.ticket, hyper.data(), 40, world.stream, false),
             "hyperparameters"));
}

// XLA ended the program after the push: the next run finds the block free once the engine has ended the op.
void test_ops_left_behind() {
  World world(1);
  CHECK(world.push(1).ok());
  for (int64_t run = 2; run <= 4; ++run) {
    const uint64_t request = world.next(EventKind::kArrived).token;
    CHECK(!world.push(run).ok());  // the last one is still the engine's
    CHECK(world.engine.complete(request, 9).ok());
    while (!world.push(run).ok()) std::this_thread::yield();
  }
  world.update(4);
}

// Where they are in the way of another run, whose own ops wait for their pulls.
void test_only_others_are_dropped() {
  World world(2);
  CHECK(world.push(1).ok());
  CHECK(world.engine.complete(world.next(EventKind::kArrived).token, 9).ok());
  CHECK(world.push(2).ok());
  CHECK(world.engine.complete(world.next(EventKind::kArrived).token, 9).ok());
  // time for their ends to be told
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(world.push(2).ok());
  CHECK(world.pull(2).ok());
  world.update(2);
  CHECK(says(world.pull(1), "jmo_pull without its jmo_push"));
}

// A handler that fails first waits for the other ops of its run.
void test_settling_a_run() {
  World world(2);
  CHECK(world.push(1).ok());
  const uint64_t request = world.next(EventKind::kArrived).token;
  CHECK(!world.link->settle_run(1, 0.01));
  CHECK(world.link->settle_run(2, 0.01));
  CHECK(world.engine.complete(request, 9).ok());
  CHECK(world.link->settle_run(1, 10));
  CHECK(says(world.pull(1), "jmo_pull without its jmo_push"));
  CHECK(world.push(3).ok());
  CHECK(world.push(3).ok());  // both blocks are free
}

// The copies of ticket and hyperparameters, the first or the second of them: the pull tells of it.
void test_a_refused_push() {
  for (const int64_t nth : {0, 1}) {
    World world(1, {{EmulatedCall::kCopyToHost, 0, nth, false}});
    CHECK(world.push(1).ok());
    CHECK(says(world.next(EventKind::kLost).status, "device 0: copy_to_host was refused"));
    CHECK(world.pull(1).ok());
    CHECK(world.runtime.synchronize(0, world.stream).ok());
    CHECK(world.ticket_out == 0xFFFFFFFF && world.grad[0] == 0);
    CHECK(world.push(1).ok());
    world.update(1);
  }
  World failing(1, {{EmulatedCall::kRecord, 0, 0, false}});
  CHECK(failing.push(1).ok());
  CHECK(says(failing.next(EventKind::kLost).status, "device 0: record failed"));
  CHECK(says(failing.pull(1), "device 0: record failed"));
  World closed(1);
  closed.engine.close();
  CHECK(says(closed.push(1), "closed"));
  CHECK(says(closed.pull(1), "jmo_pull without its jmo_push"));
}

// Of a refused copy in an update the driver is told; what the op then gives back is zeros.
void test_a_refused_update() {
  for (const EmulatedCall call : {EmulatedCall::kCopyToHost, EmulatedCall::kCopyToDevice}) {
    World world(1, {{call, 0, call == EmulatedCall::kCopyToHost ? 2 : 0, false}});
    CHECK(world.push(1).ok());
    const uint64_t request = world.next(EventKind::kArrived).token;
    CHECK(world.engine.update(request, 0, nullptr, true, 1).ok());
    CHECK(says(world.next(EventKind::kUpdated).status, "was refused"));
    CHECK(world.engine.hand_back(request).ok());
    (void)world.next(EventKind::kHandedBack);
    CHECK(world.engine.complete(request, 0xFFFFFFFF).ok());
    CHECK(world.pull(1).ok());
    CHECK(world.runtime.synchronize(0, world.stream).ok());
    CHECK(world.ticket_out == 0xFFFFFFFF && world.grad[0] == 0 && world.grad[kElements - 1] == 0);
  }
}

// Whichever stream or event cannot be made: the link says why, and gives back what was.
void test_set_up_that_fails() {
  for (const EmulatedCall call : {EmulatedCall::kMakeStream, EmulatedCall::kMakeEvent}) {
    bool works = false;
    int64_t nth = 0;
    for (; !works; ++nth) {
      EmulatedRuntime runtime(World::options({{call, 0, nth, false}}));
      {
        Engine engine(1);
        DeviceLink link(engine, runtime, link_options(2));
        works = link.status().ok();
        CHECK(works || says(link.status(), "was refused"));
      }
      const EmulatedRuntime::InUse left = runtime.in_use();
      CHECK_EQ(left.streams + left.events + left.pins, size_t{0});
    }
    CHECK(nth > 3);
  }
  EmulatedRuntime runtime({});
  Engine engine(1);
  LinkOptions bad = link_options(1);
  bad.copier.chunks = 0;
  CHECK(says(DeviceLink(engine, runtime, bad).status(), "0 chunks"));
  bad = link_options(1);
  bad.copier.chunk_bytes = 100;
  CHECK(says(DeviceLink(engine, runtime, bad).status(), "100 bytes"));
}

// Whichever memory could not be pinned: it works, says so, and gives no update to the device, which could
// not reach it.
void test_memory_that_is_not_pinned() {
  for (const int64_t nth : {0, 1, -1}) {
    World world(1, {{EmulatedCall::kPin, 0, nth, false}});
    CHECK(says(world.link->pinned(), "was refused"));
    world.link->set_on_device(true);
    CHECK(world.push(1).ok());
    world.update(1);
    CHECK(world.grad[0] == -2.0f);
  }
}

}  // namespace
}  // namespace jmo

int main() {
  jmo::set_flush_denormals();
  jmo::test_an_update();
  jmo::test_ops_that_do_not_belong_together();
  jmo::test_too_many_ops();
  jmo::test_ops_left_behind();
  jmo::test_only_others_are_dropped();
  jmo::test_settling_a_run();
  jmo::test_a_refused_push();
  jmo::test_a_refused_update();
  jmo::test_set_up_that_fails();
  jmo::test_memory_that_is_not_pinned();
  return 0;
}
