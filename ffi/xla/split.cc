// The ops `jmo_push` and `jmo_pull`, and `jmo_agree` on devices: an update in two halves where gradients and
// params are an accelerator's (ffi/device/link.h says how).
//
//   jmo_push: ticket, hyper, grads, params if they are read -> token, results, grads of `apart`, params of
//   `kept` jmo_pull: token, results, grads of `apart`, params      -> ticket, results
//
// All results of both are aliased to operands, but for the push's where a gradient lies `apart`: it has
// another dtype than its param, so the result has a buffer of its own. `apart` and `kept` are attributes,
// indices of leaves. XLA may compute a value twice, but not a push: so what the push reads comes back from it
// for the pull, where it is no input of the program. The token has no content.
//
// For CUDA they use XLA's stream, and the pull waits on the calling thread. For the CPU, where an emulated
// device takes the place of CUDA's in tests, the link's own stream stands for XLA's: the push returns once
// that has got so far, and the pull is a future.
//
// Thread contract: as handlers.h.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/core/engine.h"
#include "ffi/device/link.h"
#include "ffi/xla/handlers.h"
#include "ffi/xla/operands.h"

namespace jmo {
namespace {

using Ticket = xffi::BufferR1<xffi::DataType::U32>;
using TicketOut = xffi::ResultBufferR1<xffi::DataType::U32>;
using Hyper = xffi::BufferR1<xffi::DataType::F32>;
using Leaves = xffi::Span<const int64_t>;
using Stream = std::optional<DeviceRuntime::Stream>;  // XLA's; none: the link's own

constexpr double kSettleTimeoutS = 60;

// Which call it is.
struct Call {
  int64_t run_id = 0;
  int32_t device = 0;
  int64_t store = 0, instance = 0, bucket = 0;
};

Status invalid(const std::string& what) { return Status(Code::kInvalid, "jax_mlp_offload: " + what); }

Status ours(const Status& status) {
  return status.ok() ? status : Status(status.code(), "jax_mlp_offload: " + status.message());
}

std::shared_ptr<DeviceLink> link_of(const Engine& engine, int32_t device, bool on_host, Status* status) {
  // No other kind is given to an engine.
  auto link = std::static_pointer_cast<DeviceLink>(engine.accelerator(device));
  if (!link) {
    *status = invalid("device " + std::to_string(device) +
                      " is not one of the optimizer's devices; pass mesh= and param_specs=");
  } else if (on_host != link->runtime().is_emulated()) {
    *status = invalid("a program for the " + std::string(on_host ? "CPU" : "GPU") +
                      " has an optimizer whose params were on the " + (on_host ? "GPU" : "CPU") +
                      "; trace the step with the params that init saw");
    link = nullptr;
  }
  return link;
}

// XLA takes a program's buffers away when it is told of an error: first all of the run's updates on the
// device, of whatever store, have to end.
xffi::Error failed(const Call& call, Status status) {
  for (const auto& engine : all_engines()) {
    const auto link = std::static_pointer_cast<DeviceLink>(engine->accelerator(call.device));
    if (link && !link->settle_run(call.run_id, kSettleTimeoutS))
      status = Status(status.code(), status.message() +
                                         "; other updates of the program have not ended, and what "
                                         "they write to may be other arrays' memory by now");
  }
  return error_of(status);
}

// ---- push

// What comes back beside the results is where it came from.
Status check_kept(const BucketSpec& spec, xffi::RemainingRets& rets, Leaves apart, Leaves kept,
                  const std::vector<LeafBuffers>& leaves) {
  std::vector<bool> is_apart(leaves.size());
  for (size_t i = 0; i < apart.size() + kept.size(); ++i) {
    const bool is_grad = i < apart.size();
    const int64_t leaf = is_grad ? apart[i] : kept[i - apart.size()];
    auto back = rets.get<xffi::AnyBuffer>(leaves.size() + i);
    if (!back || leaf < 0 || leaf >= static_cast<int64_t>(leaves.size()))
      return invalid("jmo_push: no such leaf");
    if (is_grad) is_apart[leaf] = true;
    if ((*back)->untyped_data() != (is_grad ? leaves[leaf].grad : leaves[leaf].param))
      return invalid("XLA did not alias what jmo_push hands back to its operand");
  }
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    if (is_apart[leaf] != (leaves[leaf].grad_type != spec.rule.param))
      return invalid("jmo_push: gradients of other dtypes than their params have to come back");
    if (!is_apart[leaf] && leaves[leaf].grad != leaves[leaf].out)
      return invalid("XLA did not alias a result of jmo_push to its gradient");
  }
  return Status();
}

Status push(Stream stream, const Call& call, const Ticket& ticket, const Hyper& hyper,
            xffi::RemainingArgs& args, xffi::RemainingRets& rets, Leaves apart, Leaves kept) {
  const Target target = find_target(call.store, call.instance, call.bucket);
  if (!target.status.ok()) return target.status;
  const BucketSpec& spec = *target.spec;
  const size_t leaves = spec.leaves.size();
  if (args.size() != leaves * (spec.reads_params ? 2 : 1) ||
      rets.size() != leaves + apart.size() + kept.size() ||
      hyper.element_count() != static_cast<size_t>(spec.hyper_count) + 1)
    return wrong_operands(call.instance, call.bucket);
  Request request;
  request.instance = call.instance;
  request.bucket = call.bucket;
  request.device = call.device;
  request.run_id = call.run_id;
  Status status = check_leaves(spec, args, rets, &request.leaves);
  if (status.ok()) status = check_kept(spec, rets, apart, kept, request.leaves);
  const auto link = status.ok() ? link_of(*target.engine, call.device, !stream, &status) : nullptr;
  if (!status.ok()) return status;
  return ours(link->push(std::move(request), ticket.typed_data(), hyper.typed_data(), spec.hyper_count + 1,
                         stream.value_or(link->own_stream()), !stream));
}

xffi::Error push_cuda(void* stream, xffi::RunId run_id, int32_t device, Ticket ticket, Hyper hyper,
                      xffi::RemainingArgs args, TicketOut, xffi::RemainingRets rets, int64_t store,
                      int64_t instance, int64_t bucket, Leaves apart, Leaves kept) {
  return guarded([&] {
    const Call call{run_id.run_id, device, store, instance, bucket};
    const Status status = push(stream, call, ticket, hyper, args, rets, apart, kept);
    return status.ok() ? xffi::Error::Success() : failed(call, status);
  });
}

xffi::Error push_cpu(xffi::RunId run_id, int32_t device, Ticket ticket, Hyper hyper, xffi::RemainingArgs args,
                     TicketOut, xffi::RemainingRets rets, int64_t store, int64_t instance, int64_t bucket,
                     Leaves apart, Leaves kept) {
  return guarded([&] {
    const Call call{run_id.run_id, device, store, instance, bucket};
    const Status status = push(std::nullopt, call, ticket, hyper, args, rets, apart, kept);
    return status.ok() ? xffi::Error::Success() : failed(call, status);
  });
}

// ---- pull

struct Pull {
  Call call;
  std::shared_ptr<const BucketSpec> spec;
  std::shared_ptr<DeviceLink> link;
  std::shared_ptr<DeviceLink::Pushed> pushed;
  Status status;
};

// The operands' addresses, as the push saw them.
Status pulled_leaves(const BucketSpec& spec, xffi::RemainingArgs& args, xffi::RemainingRets& rets,
                     Leaves apart, std::vector<LeafBuffers>* leaves) {
  const size_t count = spec.leaves.size();
  leaves->resize(count);
  for (size_t leaf = 0; leaf < count; ++leaf) {
    const auto in = args.get<xffi::AnyBuffer>(leaf);
    auto out = rets.get<xffi::AnyBuffer>(leaf);
    if (!in || !out || !is_param(spec, leaf, *in) || in->untyped_data() != (*out)->untyped_data())
      return invalid("XLA did not alias a result of jmo_pull to its operand");
    (*leaves)[leaf].out = (*out)->untyped_data();
    if (!spec.reads_params) continue;
    const auto param = args.get<xffi::AnyBuffer>(count + apart.size() + leaf);
    if (!param) return invalid("jmo_pull: a param is no array");
    (*leaves)[leaf].param = param->untyped_data();
  }
  for (size_t i = 0; i < apart.size(); ++i) {
    const auto grad = args.get<xffi::AnyBuffer>(count + i);
    if (!grad || apart[i] < 0 || apart[i] >= static_cast<int64_t>(count))
      return invalid("jmo_pull: a gradient is no array");
    (*leaves)[apart[i]].grad = grad->untyped_data();
  }
  return Status();
}

Pull find_pushed(const Call& call, bool on_host, xffi::RemainingArgs& args, xffi::RemainingRets& rets,
                 Leaves apart) {
  const Target target = find_target(call.store, call.instance, call.bucket);
  Pull pull{call, target.spec, nullptr, nullptr, target.status};
  if (!pull.status.ok()) return pull;
  const size_t leaves = pull.spec->leaves.size();
  if (args.size() != leaves * (pull.spec->reads_params ? 2 : 1) + apart.size() || rets.size() != leaves) {
    pull.status = wrong_operands(call.instance, call.bucket);
    return pull;
  }
  std::vector<LeafBuffers> buffers;
  pull.status = pulled_leaves(*pull.spec, args, rets, apart, &buffers);
  if (pull.status.ok()) pull.link = link_of(*target.engine, call.device, on_host, &pull.status);
  if (!pull.link) return pull;
  pull.pushed = pull.link->find(call.instance, call.bucket, call.run_id, buffers, &pull.status);
  pull.status = ours(pull.status);
  return pull;
}

xffi::Error pull_cuda(void* stream, xffi::RunId run_id, int32_t device, Ticket, xffi::RemainingArgs args,
                      TicketOut ticket, xffi::RemainingRets rets, int64_t store, int64_t instance,
                      int64_t bucket, Leaves apart) {
  return guarded([&] {
    const Call call{run_id.run_id, device, store, instance, bucket};
    const Pull pull = find_pushed(call, false, args, rets, apart);
    if (!pull.status.ok()) return failed(call, pull.status);
    pull.link->wait(pull.pushed);
    const Status status = pull.link->finish(pull.pushed, *pull.spec, ticket->typed_data(), stream, false);
    return status.ok() ? xffi::Error::Success() : failed(call, ours(status));
  });
}

void pull_later(const Pull& pull, uint32_t* ticket, xffi::Promise promise) {
  pull.link->when_ended(pull.pushed, [pull, promise, ticket]() mutable {
    const xffi::Error error = guarded([&] {
      const Status status = pull.link->finish(pull.pushed, *pull.spec, ticket, pull.link->own_stream(), true);
      return status.ok() ? xffi::Error::Success() : failed(pull.call, ours(status));
    });
    if (error.success()) {
      promise.SetAvailable();
    } else {
      promise.SetError(error);
    }
  });
}

xffi::Future pull_cpu(xffi::RunId run_id, int32_t device, Ticket, xffi::RemainingArgs args, TicketOut ticket,
                      xffi::RemainingRets rets, int64_t store, int64_t instance, int64_t bucket,
                      Leaves apart) {
  xffi::Promise promise;
  xffi::Future future(promise);
  const xffi::Error error = guarded([&] {
    const Call call{run_id.run_id, device, store, instance, bucket};
    const Pull pull = find_pushed(call, true, args, rets, apart);
    if (!pull.status.ok()) return failed(call, pull.status);
    pull_later(pull, ticket->typed_data(), promise);
    return xffi::Error::Success();
  });
  if (error.failure()) promise.SetError(error);
  return future;
}

// ---- agree

// The result is the agreed ticket's own buffer. Returns at once. Where the store was closed since its ops
// ended, nobody needs to know.
xffi::Error agree_cuda(void* stream, int32_t device, Ticket mine, Ticket agreed, TicketOut ticket,
                       int64_t store, int64_t instance) {
  return guarded([&] {
    if (agreed.typed_data() != ticket->typed_data())
      return error_of(invalid("XLA did not alias the result of jmo_agree to its operand"));
    const auto engine = find_engine(store);
    if (!engine) return xffi::Error::Success();
    Status status;
    const auto link = link_of(*engine, device, false, &status);
    if (link) status = ours(link->agree(instance, mine.typed_data(), agreed.typed_data(), stream, false));
    return status.code() == Code::kClosed ? xffi::Error::Success() : error_of(status);
  });
}

}  // namespace

#define JMO_SPLIT(binding) (binding).Ctx<xffi::RunId>().Ctx<xffi::DeviceOrdinal>()

#define JMO_PUSH(binding)                         \
  JMO_SPLIT(binding)                              \
      .Arg<Ticket>()                              \
      .Arg<Hyper>()                               \
      .RemainingArgs()                            \
      .Ret<xffi::BufferR1<xffi::DataType::U32>>() \
      .RemainingRets()                            \
      .Attr<int64_t>("store")                     \
      .Attr<int64_t>("instance")                  \
      .Attr<int64_t>("bucket")                    \
      .Attr<Leaves>("apart")                      \
      .Attr<Leaves>("kept")

#define JMO_PULL(binding)                         \
  JMO_SPLIT(binding)                              \
      .Arg<Ticket>()                              \
      .RemainingArgs()                            \
      .Ret<xffi::BufferR1<xffi::DataType::U32>>() \
      .RemainingRets()                            \
      .Attr<int64_t>("store")                     \
      .Attr<int64_t>("instance")                  \
      .Attr<int64_t>("bucket")                    \
      .Attr<Leaves>("apart")

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmo_push_cpu, push_cpu, JMO_PUSH(xffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmo_pull_cpu, pull_cpu, JMO_PULL(xffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmo_push_cuda, push_cuda,
                              JMO_PUSH(xffi::Ffi::Bind().Ctx<xffi::PlatformStream<void*>>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmo_pull_cuda, pull_cuda,
                              JMO_PULL(xffi::Ffi::Bind().Ctx<xffi::PlatformStream<void*>>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmo_agree_cuda, agree_cuda,
                              xffi::Ffi::Bind()
                                  .Ctx<xffi::PlatformStream<void*>>()
                                  .Ctx<xffi::DeviceOrdinal>()
                                  .Arg<Ticket>()
                                  .Arg<Ticket>()
                                  .Ret<xffi::BufferR1<xffi::DataType::U32>>()
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("instance"));

}  // namespace jmo
