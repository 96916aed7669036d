// The native engine with many devices and threads, without XLA: what is handed in ends exactly once, on the
// completion thread of its device, with the numbers that one pass over all elements gives; closing ends what
// is open.

#include "ffi/core/engine.h"

#include <atomic>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "ffi/tests/check.h"

namespace jmo {
namespace {

constexpr int kDevices = 4;
constexpr int kBuckets = 3;
constexpr int64_t kElements = 30000;  // two leaves of 20000 and 10000, three subgroups
const float kHyper[kAdamHyperCount + 1] = {-1e-2f, 0.9f, 0.1f,   0.999f, 0.001f, 1e-8f, 0,
                                           0,      0.1f, 0.001f, 0.19f,  0.9f,   0};

BucketSpec make_bucket() {
  BucketSpec spec;
  spec.hyper_count = kAdamHyperCount;
  spec.leaves = {{20000, false}, {10000, false}};
  spec.subgroups = {{0, 12288}, {12288, 12288}, {24576, 5424}};
  spec.nu_offset = 12288 * 4;
  spec.master_offset = spec.cells_offset = 2 * 12288 * 4;
  spec.record_bytes = 2 * 12288 * 4;
  return spec;
}

struct Call {
  std::vector<float> grad, out;
  uint32_t ticket = 0;
  std::atomic<int> ended{0};
  Status status;
  std::thread::id thread;
};

Request make_request(Call& call, int64_t bucket, int64_t device) {
  call.grad.resize(kElements);
  call.out.assign(kElements, -7.0f);
  for (int64_t i = 0; i < kElements; ++i)
    call.grad[i] = static_cast<float>((i * 37 + bucket * 11 + device) % 101) - 50;
  Request request;
  request.bucket = bucket;
  request.device = device;
  request.hyper = kHyper;
  request.ticket_out = &call.ticket;
  request.leaves = {{call.grad.data(), DType::kF32, nullptr, call.out.data()},
                    {call.grad.data() + 20000, DType::kF32, nullptr, call.out.data() + 20000}};
  request.finish = [&call](const Status& status) {
    call.status = status;
    call.thread = std::this_thread::get_id();
    ++call.ended;
  };
  return request;
}

void check_updates(const Call& call) {
  // Adam's first step: mu_hat = g, nu_hat = g * g, to a rounding
  for (int64_t i = 0; i < kElements; ++i) {
    const float g = call.grad[i];
    const float expected = g == 0 ? 0.0f : (g > 0 ? -1e-2f : 1e-2f);
    CHECK(call.out[i] > expected - 1e-6f && call.out[i] < expected + 1e-6f);
  }
}

// Runs every request that comes, each over slots of its own, until `wanted` of them are complete.
void drive(Engine& engine, int wanted) {
  std::map<uint64_t, int> left;
  int complete = 0;
  while (complete < wanted) {
    for (const Event& event : engine.wait(0.1, 16)) {
      if (event.kind == EventKind::kArrived) {
        left[event.token] = 3;
        for (int64_t subgroup = 0; subgroup < 3; ++subgroup) {
          const size_t slot = (event.device * kBuckets + event.bucket) * 3 + subgroup;
          CHECK(engine.update(event.token, subgroup, engine.slot(slot), true, event.token).ok());
        }
      } else if (event.kind == EventKind::kUpdated && --left[event.token] == 0) {
        CHECK(engine.complete(event.token, 5).ok());
        ++complete;
      }
    }
  }
}

void set_up(Engine& engine) {
  CHECK(engine.add_slots(20, 2 * 12288 * 4).ok());
  CHECK(engine.add_slots(kDevices * kBuckets * 3 - 20, 2 * 12288 * 4).ok());
  CHECK_EQ(engine.slot_count(), size_t{kDevices * kBuckets * 3});
  CHECK(engine.slot(kDevices * kBuckets * 3) == nullptr);
  for (int device = 0; device < kDevices; ++device) engine.add_device(device);
  for (int bucket = 0; bucket < kBuckets; ++bucket) CHECK(engine.add_bucket(0, bucket, make_bucket()).ok());
}

void test_many_devices() {
  Engine engine(3);
  set_up(engine);
  std::vector<Call> calls(kDevices * kBuckets);
  std::vector<std::thread> programs;
  for (int device = 0; device < kDevices; ++device) {
    programs.emplace_back([&, device] {
      for (int bucket = 0; bucket < kBuckets; ++bucket)
        CHECK(engine.submit(make_request(calls[device * kBuckets + bucket], bucket, device)).ok());
    });
  }
  drive(engine, kDevices * kBuckets);
  for (auto& program : programs) program.join();
  engine.close();
  CHECK_EQ(engine.open_requests(), size_t{0});
  for (const Call& call : calls) {
    CHECK_EQ(call.ended.load(), 1);
    CHECK(call.status.ok());
    CHECK_EQ(call.ticket, 5u);
    check_updates(call);
  }
  for (int device = 0; device < kDevices; ++device)
    for (int bucket = 1; bucket < kBuckets; ++bucket)
      CHECK(calls[device * kBuckets].thread == calls[device * kBuckets + bucket].thread);
  CHECK(calls[0].thread != calls[kBuckets].thread);
}

void test_hand_back_and_fail() {
  Engine engine(2);
  set_up(engine);
  Call back, failing;
  CHECK(engine.submit(make_request(back, 0, 0)).ok());
  CHECK(engine.submit(make_request(failing, 1, 1)).ok());
  std::vector<uint64_t> tokens;
  while (tokens.size() < 2)
    for (const Event& event : engine.wait(0.1, 16)) tokens.push_back(event.token);
  CHECK(engine.hand_back(tokens[0]).ok());
  CHECK(engine.fail(tokens[1], "no room").ok());
  CHECK(!engine.fail(tokens[1], "twice").ok());
  bool handed_back = false;
  while (!handed_back)
    for (const Event& event : engine.wait(0.1, 16)) handed_back = event.kind == EventKind::kHandedBack;
  CHECK(engine.complete(tokens[0], 0xFFFFFFFFu).ok());
  engine.close();
  CHECK_EQ(back.ticket, 0xFFFFFFFFu);
  for (float value : back.out) CHECK(value == 0.0f);
  CHECK(!failing.status.ok());
  CHECK(failing.status.message() == "no room");
}

void test_close_ends_what_is_open() {
  Call open, late;
  {
    Engine engine(1);
    set_up(engine);
    CHECK(engine.submit(make_request(open, 0, 2)).ok());
    engine.close();
    CHECK(!engine.submit(make_request(late, 0, 2)).ok());
    engine.close();
  }
  CHECK_EQ(open.ended.load(), 1);
  CHECK(open.status.code() == Code::kIo);
  CHECK_EQ(late.ended.load(), 0);
}

void test_bad_plans_and_devices() {
  Engine engine(1);
  set_up(engine);
  BucketSpec gap = make_bucket();
  gap.subgroups[1].begin += 1;
  CHECK(!engine.add_bucket(0, 9, gap).ok());
  BucketSpec rest = make_bucket();
  rest.subgroups.pop_back();
  CHECK(!engine.add_bucket(0, 9, rest).ok());
  Call call;
  CHECK(!engine.submit(make_request(call, 0, 77)).ok());
  CHECK(engine.bucket(0, 9) == nullptr);
  register_engine(3, nullptr);
  CHECK(find_engine(3) == nullptr && find_engine(4) == nullptr);
  unregister_engine(3);
}

}  // namespace
}  // namespace jmo

int main() {
  jmo::test_many_devices();
  jmo::test_hand_back_and_fail();
  jmo::test_close_ends_what_is_open();
  jmo::test_bad_plans_and_devices();
  return 0;
}
