// Python's view of ffi/core and ffi/xla: thin, no logic of its own. Only jax_mlp_offload/native.py imports
// it. Every call that can wait or copy much releases the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/crc32c.h"
#include "ffi/core/engine.h"
#include "ffi/core/fault.h"
#include "ffi/core/syscalls.h"
#include "ffi/python/device.h"
#include "ffi/python/errors.h"
#include "ffi/xla/handlers.h"

namespace nb = nanobind;

namespace jmo {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Leaf = std::pair<int64_t, bool>;
using Range = std::pair<int64_t, int64_t>;

// As OSError with its errno, so that Python names its subclass.
void raise_os_error_if(const Status& status) {
  if (status.ok()) return;
  PyObject* const values = Py_BuildValue("(is)", status.error_number(), status.message().c_str());
  if (values != nullptr) PyErr_SetObject(PyExc_OSError, values);
  Py_XDECREF(values);
  throw nb::python_error();
}

// (kind, token, instance, bucket, device, run_id, ticket, skip)          kArrived
// (kind, token, error, errno, crc, size, start_s, end_s, free_bytes)     kRead, kWritten
// (kind, token, start_s, end_s, adopted leaves, error)                   kUpdated
// (kind, mine, instance, device, ticket)                                 kAgreed
// (kind, token)                                                          kHandedBack, kWoken
// (kind, instance, bucket, device, run_id, error)                        kLost
nb::tuple event_tuple(const Event& event) {
  const int kind = static_cast<int>(event.kind);
  switch (event.kind) {
    case EventKind::kArrived:
      return nb::make_tuple(kind, event.token, event.instance, event.bucket, event.device, event.run_id,
                            event.ticket, event.skip);
    case EventKind::kRead:
    case EventKind::kWritten:
      return nb::make_tuple(kind, event.token, event.status.message(), event.status.error_number(), event.crc,
                            event.size, event.start_s, event.end_s, event.free_bytes);
    case EventKind::kUpdated:
      return nb::make_tuple(kind, event.token, event.start_s, event.end_s, event.adopted_leaves,
                            event.status.message());
    case EventKind::kAgreed:
      return nb::make_tuple(kind, event.token, event.instance, event.device, event.ticket);
    case EventKind::kLost:
      return nb::make_tuple(kind, event.instance, event.bucket, event.device, event.run_id,
                            event.status.message());
    default:
      return nb::make_tuple(kind, event.token);
  }
}

nb::list wait(Engine& engine, double timeout_s, size_t most) {
  std::vector<Event> events;
  {
    nb::gil_scoped_release release;
    events = engine.wait(timeout_s, most);
  }
  nb::list result;
  for (const Event& event : events) result.append(event_tuple(event));
  return result;
}

char* slot_memory(Engine& engine, size_t slot) {
  char* memory = engine.slot(slot);
  if (!memory) throw std::invalid_argument("no slot " + std::to_string(slot));
  return memory;
}

IoJob make_job(Engine& engine, const std::string& path, size_t slot, size_t size, uint64_t token) {
  IoJob job;
  job.path = path;
  job.memory = slot_memory(engine, slot);
  job.size = size;
  job.token = token;
  return job;
}

// The bytes of a slot, not copied; they keep the engine alive.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> slot_view(nb::handle self, size_t slot, size_t size) {
  char* memory = slot_memory(*nb::cast<Engine*>(self), slot);
  return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory, {size}, self);
}

// A transfer that Python carried out has ended; errno 0 with a message: it came back wrong.
void post(Engine& engine, bool is_write, uint64_t token, const std::string& error, int error_number,
          uint32_t crc, size_t size, double start_s, double end_s) {
  IoResult result;
  result.is_write = is_write;
  result.token = token;
  if (!error.empty()) result.status = Status(error_number ? Code::kIo : Code::kCorrupt, error, error_number);
  result.crc = crc;
  result.size = size;
  result.start_s = start_s;
  result.end_s = end_s;
  engine.post(result);
}

// {"read": (count, waited_s, held_s), "write": as read, "error": why turns cannot be taken, or ""}
nb::dict turns(const Engine& engine, int tier) {
  nb::dict result;
  for (bool is_write : {false, true}) {
    const TurnStats stats = engine.turns(tier, is_write);
    result[is_write ? "write" : "read"] = nb::make_tuple(stats.count, stats.waited_s, stats.held_s);
  }
  result["error"] = engine.turn_error(tier);
  return result;
}

void add_bucket(Engine& engine, int64_t instance, int64_t bucket, nb::dict spec) {
  BucketSpec result;
  result.rule.rule = static_cast<Rule>(nb::cast<int>(spec["rule"]));
  result.rule.param = static_cast<DType>(nb::cast<int>(spec["param"]));
  result.rule.mu = static_cast<DType>(nb::cast<int>(spec["mu"]));
  result.rule.nu = static_cast<DType>(nb::cast<int>(spec["nu"]));
  result.rule.has_mu = nb::cast<bool>(spec["has_mu"]);
  result.rule.nesterov = nb::cast<bool>(spec["nesterov"]);
  result.reads_params = nb::cast<bool>(spec["reads_params"]);
  result.hyper_count = nb::cast<int>(spec["hyper_count"]);
  for (const Leaf& leaf : nb::cast<std::vector<Leaf>>(spec["leaves"]))
    result.leaves.push_back({leaf.first, leaf.second});
  for (const Range& range : nb::cast<std::vector<Range>>(spec["subgroups"]))
    result.subgroups.push_back({range.first, range.second});
  result.mu_offset = nb::cast<int64_t>(spec["mu_offset"]);
  result.nu_offset = nb::cast<int64_t>(spec["nu_offset"]);
  result.master_offset = nb::cast<int64_t>(spec["master_offset"]);
  result.cells_offset = nb::cast<int64_t>(spec["cells_offset"]);
  result.record_bytes = nb::cast<int64_t>(spec["record_bytes"]);
  raise_if(engine.add_bucket(instance, bucket, std::move(result)));
}

void bind_engine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<int>(), nb::arg("kernel_threads"))
      .def(
          "add_slots",
          [](Engine& engine, size_t count, size_t size) { raise_if(engine.add_slots(count, size)); },
          nb::arg("count"), nb::arg("slot_size"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "add_tier",
          [](Engine& engine, bool direct, double read_limit_bps, double write_limit_bps, int threads,
             size_t block_size, const std::string& turn_path) {
            TierOptions options;
            options.direct = direct;
            options.read_limit_bps = read_limit_bps;
            options.write_limit_bps = write_limit_bps;
            options.threads = threads;
            options.block_size = block_size;
            options.turn.path = turn_path;
            return engine.add_tier(options);
          },
          nb::arg("direct"), nb::arg("read_limit_bps"), nb::arg("write_limit_bps"), nb::arg("threads"),
          nb::arg("block_size"), nb::arg("turn_path") = "")
      .def("slot_count", &Engine::slot_count)
      .def("direct_in_use", &Engine::direct_in_use)
      .def("set_exclusive", &Engine::set_exclusive, nb::arg("tier"), nb::arg("on"))
      .def("turns", &turns, nb::arg("tier"))
      .def("add_device", [](Engine& engine, int64_t ordinal) { engine.add_device(ordinal); })
      .def("add_bucket", &add_bucket)
      .def("wait", &wait, nb::arg("timeout_s"), nb::arg("most"))
      .def("wake", &Engine::wake)
      .def("read",
           [](Engine& engine, int tier, const std::string& path, size_t slot, size_t size, uint32_t crc,
              uint64_t token) {
             IoJob job = make_job(engine, path, slot, size, token);
             job.expected_crc = crc;
             engine.read(tier, std::move(job));
           })
      .def("write", [](Engine& engine, int tier, const std::string& path, size_t slot, size_t size,
                       uint64_t token) { engine.write(tier, make_job(engine, path, slot, size, token)); })
      .def("post", &post, nb::arg("is_write"), nb::arg("token"), nb::arg("error"), nb::arg("errno"),
           nb::arg("crc"), nb::arg("size"), nb::arg("start_s"), nb::arg("end_s"))
      .def("slot_view", &slot_view)
      .def("update",
           [](Engine& engine, uint64_t request, int64_t subgroup, size_t slot, bool fresh, uint64_t token) {
             raise_if(engine.update(request, subgroup, slot_memory(engine, slot), fresh, token));
           })
      .def("hand_back", [](Engine& engine, uint64_t request) { raise_if(engine.hand_back(request)); })
      .def("complete", [](Engine& engine, uint64_t request,
                          uint32_t ticket) { raise_if(engine.complete(request, ticket)); })
      .def("fail", [](Engine& engine, uint64_t request,
                      const std::string& message) { raise_if(engine.fail(request, message)); })
      .def("fail_all", &Engine::fail_all, nb::call_guard<nb::gil_scoped_release>())
      .def("open_requests", &Engine::open_requests)
      .def("copy_slot",
           [](Engine& engine, size_t slot, Bytes target) {
             const char* memory = slot_memory(engine, slot);
             nb::gil_scoped_release release;
             std::memcpy(target.data(), memory, target.size());
           })
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());
  m.def("register_engine", &register_engine);
  m.def("unregister_engine", &unregister_engine);
}

void bind_tools(nb::module_& m) {
  m.def(
      "crc32c",
      [](ConstBytes data, uint32_t seed) {
        nb::gil_scoped_release release;
        return crc32c(data.data(), data.size(), seed);
      },
      nb::arg("data"), nb::arg("seed") = 0);
  m.def(
      "read_file",
      [](const std::string& path, Bytes target, uint32_t crc, bool direct) {
        IoJob job;
        job.path = path;
        job.memory = reinterpret_cast<char*>(target.data());
        job.size = target.size();
        job.expected_crc = crc;
        IoResult result;
        {
          nb::gil_scoped_release release;
          result = read_now(job, direct);
        }
        raise_if(result.status);
      },
      nb::arg("path"), nb::arg("target"), nb::arg("crc"), nb::arg("direct"));
  m.def(
      "write_file",
      [](const std::string& path, ConstBytes source, bool direct) {
        IoJob job;
        job.path = path;
        job.memory = const_cast<char*>(reinterpret_cast<const char*>(source.data()));  // only read from
        job.size = source.size();
        IoResult result;
        {
          nb::gil_scoped_release release;
          result = write_now(job, direct);
        }
        raise_os_error_if(result.status);
        return result.crc;
      },
      nb::arg("path"), nb::arg("source"), nb::arg("direct"));
  m.def(
      "sync_file_system",
      [](const std::string& path) {
        Status status;
        {
          nb::gil_scoped_release release;
          status = sync_file_system(path);
        }
        raise_os_error_if(status);
      },
      nb::arg("path"));
  m.def(
      "measure_stream",
      [](size_t bytes, int threads, int repeats) {
        StreamResult result;
        {
          nb::gil_scoped_release release;
          result = measure_stream(bytes, threads, repeats);
        }
        return nb::make_tuple(result.triad_bps, result.copy_bps, result.update_bps);
      },
      nb::arg("bytes"), nb::arg("threads"), nb::arg("repeats"));
  m.def("time_kernel", &time_kernel, nb::arg("elements"), nb::arg("param"), nb::arg("grad"),
        nb::arg("threads"), nb::arg("repeats"), nb::arg("decay"), nb::call_guard<nb::gil_scoped_release>());
  m.def("isa_in_use", &isa_in_use);
  m.def("force_isa", &force_isa);
  m.def("now_s", &now_s);
  m.def(
      "inject_fault",
      [](const std::string& path_prefix, bool is_write, int64_t after_count, int64_t fail_count,
         int error_number, double min_delay_s, double max_delay_s, uint64_t seed) {
        FaultSpec spec;
        spec.path_prefix = path_prefix;
        spec.is_write = is_write;
        spec.after_count = after_count;
        spec.fail_count = fail_count;
        spec.error_number = error_number;
        spec.min_delay_s = min_delay_s;
        spec.max_delay_s = max_delay_s;
        spec.seed = seed;
        inject_fault(spec);
      },
      nb::arg("path_prefix"), nb::arg("is_write"), nb::arg("after_count") = 0, nb::arg("fail_count") = -1,
      nb::arg("error_number") = 0, nb::arg("min_delay_s") = 0.0, nb::arg("max_delay_s") = 0.0,
      nb::arg("seed") = 0);
  m.def("clear_faults", &clear_faults);
}

NB_MODULE(_native, m) {
  m.attr("FFI_API_VERSION") = nb::make_tuple(kFfiApiMajor, kFfiApiMinor);
  m.attr("CELL_ELEMENTS") = kCellElements;
  m.attr("CELL_OF_ANY_PARAMS") = kCellOfAnyParams;
  m.attr("CELL_WITHOUT_MASTERS") = kCellWithoutMasters;
  m.attr("ADAM_HYPER_COUNT") = static_cast<int>(kAdamHyperCount);
  m.attr("SGD_HYPER_COUNT") = static_cast<int>(kSgdHyperCount);
  m.def("registrations", [] {
    const auto capsule = [](auto* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
    nb::dict cpu, cuda;
    cpu["jmo_update"] = capsule(jmo_update_cpu);
    cpu["jmo_agree"] = capsule(jmo_agree_cpu);
    cpu["jmo_push"] = capsule(jmo_push_cpu);
    cpu["jmo_pull"] = capsule(jmo_pull_cpu);
    cuda["jmo_agree"] = capsule(jmo_agree_cuda);
    cuda["jmo_push"] = capsule(jmo_push_cuda);
    cuda["jmo_pull"] = capsule(jmo_pull_cuda);
    nb::dict platforms;
    platforms["cpu"] = cpu;
    platforms["CUDA"] = cuda;
    return platforms;
  });
  bind_engine(m);
  bind_tools(m);
  bind_devices(m);
}

}  // namespace
}  // namespace jmo
