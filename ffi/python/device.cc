// See device.h. Every call that can wait or copy much releases the GIL.
#include "ffi/python/device.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ffi/core/engine.h"
#include "ffi/device/emulated.h"
#include "ffi/device/link.h"
#include "ffi/device/measure.h"
#include "ffi/device/runtime.h"
#include "ffi/python/errors.h"

namespace nb = nanobind;

namespace jmo {
namespace {

// (what, device, nth, later): see EmulatedFailure
using Failure = std::tuple<int, int, int64_t, bool>;

std::shared_ptr<DeviceRuntime> of_capsule(nb::capsule capsule, int version) {
  if (version != DeviceRuntime::kVersion)
    throw std::invalid_argument("the extension has version " + std::to_string(version) +
                                " of the device interface, this one " +
                                std::to_string(DeviceRuntime::kVersion) + "; build the package again");
  auto* runtime = static_cast<DeviceRuntime*>(PyCapsule_GetPointer(capsule.ptr(), kRuntimeCapsule));
  if (runtime == nullptr) throw nb::python_error();
  return std::shared_ptr<DeviceRuntime>(runtime, [](DeviceRuntime*) {});  // it is never destroyed
}

std::shared_ptr<DeviceRuntime> emulated(int devices, uint64_t seed, int longest_delay_us,
                                        const std::vector<Failure>& failures) {
  EmulatedOptions options;
  options.devices = devices;
  options.seed = seed;
  options.longest_delay_us = longest_delay_us;
  for (const auto& [call, device, nth, later] : failures)
    options.failures.push_back({static_cast<EmulatedCall>(call), device, nth, later});
  return std::make_shared<EmulatedRuntime>(std::move(options));
}

int count(const DeviceRuntime& runtime) {
  int devices = 0;
  raise_if(runtime.devices(&devices));
  return devices;
}

// Slots near a device, pinned if that works; returns why they are not.
std::string add_slots(Engine& engine, const std::shared_ptr<DeviceRuntime>& runtime, int device, size_t slots,
                      size_t slot_size) {
  nb::gil_scoped_release release;
  const size_t first = engine.slot_count();
  raise_if(engine.add_slots(slots, slot_size, runtime->numa_node(device)));
  if (slots == 0) return "";
  auto pin = std::make_shared<Pin>(*runtime, engine.slot(first), slots * slot_size);
  const std::string why = pin->status().message();
  // the runtime has to outlive what is pinned with it
  engine.keep(std::make_shared<std::pair<std::shared_ptr<DeviceRuntime>, std::shared_ptr<Pin>>>(
      runtime, std::move(pin)));
  return why;
}

DeviceLink& link_of(const Engine& engine, int64_t ordinal) {
  const auto accelerator = engine.accelerator(ordinal);
  if (!accelerator) throw std::invalid_argument("device " + std::to_string(ordinal) + " has no link");
  return static_cast<DeviceLink&>(*accelerator);
}

// The runtime has to outlive the link, which the engine keeps.
struct LinkOf {
  LinkOf(std::shared_ptr<DeviceRuntime> runtime_of, Engine& engine, const LinkOptions& options)
      : runtime(std::move(runtime_of)), link(engine, *runtime, options) {}
  const std::shared_ptr<DeviceRuntime> runtime;
  DeviceLink link;
};

// Returns why its memory is not pinned.
std::string add_device(Engine& engine, int64_t ordinal, const std::shared_ptr<DeviceRuntime>& runtime,
                       int device, size_t chunk_bytes, size_t chunks) {
  nb::gil_scoped_release release;
  LinkOptions options;
  options.ordinal = ordinal;
  options.copier.device = device;
  options.copier.chunk_bytes = chunk_bytes;
  options.copier.chunks = chunks;
  auto made = std::make_shared<LinkOf>(runtime, engine, options);
  raise_if(made->link.status());
  const std::string why = made->link.pinned().message();
  engine.add_device(ordinal, std::shared_ptr<DeviceLink>(made, &made->link));
  return why;
}

// As above.
std::string add_blocks(const Engine& engine, int64_t ordinal, size_t count) {
  nb::gil_scoped_release release;
  DeviceLink& link = link_of(engine, ordinal);
  raise_if(link.add_blocks(count));
  return link.pinned().message();
}

nb::dict link_stats(const Engine& engine, int64_t ordinal) {
  const CopierStats stats = link_of(engine, ordinal).stats();
  nb::dict result;
  result["bytes_to_host"] = stats.to_host_bytes;
  result["bytes_to_device"] = stats.to_device_bytes;
  result["to_host_busy_s"] = stats.to_host_busy_s;
  result["to_device_busy_s"] = stats.to_device_busy_s;
  result["on_device_busy_s"] = stats.on_device_busy_s;
  return result;
}

}  // namespace

void bind_devices(nb::module_& m) {
  nb::class_<DeviceRuntime>(m, "DeviceRuntime")
      .def_prop_ro("name", [](const DeviceRuntime& runtime) { return std::string(runtime.name()); })
      .def("devices", &count)
      .def("numa_node", &DeviceRuntime::numa_node, nb::arg("device"));
  const std::pair<const char*, EmulatedCall> calls[] = {
      {"pin", EmulatedCall::kPin},
      {"make_memory", EmulatedCall::kMakeMemory},
      {"make_stream", EmulatedCall::kMakeStream},
      {"make_event", EmulatedCall::kMakeEvent},
      {"copy_to_host", EmulatedCall::kCopyToHost},
      {"copy_to_device", EmulatedCall::kCopyToDevice},
      {"copy_on_device", EmulatedCall::kCopyOnDevice},
      {"set_zero", EmulatedCall::kSetZero},
      {"set_u32", EmulatedCall::kSetU32},
      {"update", EmulatedCall::kUpdate},
      {"record", EmulatedCall::kRecord},
      {"wait", EmulatedCall::kWait},
      {"wait_on_host", EmulatedCall::kWaitOnHost},
      {"any", EmulatedCall::kAny},
  };
  nb::dict numbers;
  for (const auto& [name, call] : calls) numbers[name] = static_cast<int>(call);
  m.attr("EMULATED_CALLS") = numbers;
  m.def("runtime_of_capsule", &of_capsule, nb::arg("capsule"), nb::arg("version"));
  m.def("emulated_runtime", &emulated, nb::arg("devices"), nb::arg("seed"), nb::arg("longest_delay_us"),
        nb::arg("failures"));
  m.def("add_device_slots", &add_slots, nb::arg("engine"), nb::arg("runtime"), nb::arg("device"),
        nb::arg("count"), nb::arg("slot_size"));
  m.def("add_linked_device", &add_device, nb::arg("engine"), nb::arg("ordinal"), nb::arg("runtime"),
        nb::arg("device"), nb::arg("chunk_bytes"), nb::arg("chunks"));
  m.def("add_blocks", &add_blocks, nb::arg("engine"), nb::arg("ordinal"), nb::arg("count"));
  m.def(
      "update_on_device",
      [](const Engine& engine, int64_t ordinal, bool on) { link_of(engine, ordinal).set_on_device(on); },
      nb::arg("engine"), nb::arg("ordinal"), nb::arg("on"));
  m.def("link_stats", &link_stats, nb::arg("engine"), nb::arg("ordinal"));
  m.def(
      "measure_link",
      [](DeviceRuntime& runtime, int device, size_t bytes, int repeats) {
        LinkSpeed speed;
        {
          nb::gil_scoped_release release;
          raise_if(measure_link(runtime, device, bytes, repeats, &speed));
        }
        return std::make_tuple(speed.to_host_bps, speed.to_device_bps, speed.both_bps);
      },
      nb::arg("runtime"), nb::arg("device"), nb::arg("bytes"), nb::arg("repeats"));
}

}  // namespace jmo
