// The ops `jmo_push` and `jmo_pull`, and `jmo_agree` on devices: an update in two halves where gradients and
// params are an accelerator's (ffi/device/link.h says how).
//
//   jmo_push: ticket, hyper, grads, params where they are read       -> token, results
//   jmo_pull: token, results, grads that lie apart, params as above  -> ticket, results
//
// Results are aliased throughout; where gradient and param have one dtype the push's result is its gradient's
// buffer, else the gradient lies apart (attribute `apart`: the leaves' indices).
//
// For CUDA they use XLA's stream, and the pull waits on the calling thread. For the CPU, where an emulated
// device takes the place of CUDA's in tests, the link's own stream stands for XLA's: the push returns once
// that has got so far, and the pull is a future.
#include <algorithm>
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

Status ours(const Status& status) {
  return status.ok() ? status : Status(status.code(), "jax_mlp_offload: " + status.message());
}

std::shared_ptr<DeviceLink> link_of(const Engine& engine, int32_t device, Status* status) {
  auto accelerator = engine.accelerator(device);
  if (!accelerator)
    *status =
        Status(Code::kInvalid, "jax_mlp_offload: device " + std::to_string(device) +
                                   " is not one of the optimizer's devices; pass mesh= and param_specs=");
  return std::static_pointer_cast<DeviceLink>(accelerator);  // no other kind is given to an engine
}

// ---- push

// `stream`: XLA's; null: the link's own.
Status push(DeviceRuntime::Stream stream, int64_t run_id, int32_t device, const Ticket& ticket,
            const Hyper& hyper, xffi::RemainingArgs& args, TicketOut& token, xffi::RemainingRets& rets,
            int64_t store, int64_t instance, int64_t bucket) {
  const Target target = find_target(store, instance, bucket);
  if (!target.status.ok()) return target.status;
  const BucketSpec& spec = *target.spec;
  const size_t leaves = spec.leaves.size();
  if (args.size() != leaves * (spec.reads_params ? 2 : 1) || rets.size() != leaves ||
      hyper.element_count() != static_cast<size_t>(spec.hyper_count) + 1)
    return wrong_operands(instance, bucket);
  Request request;
  request.instance = instance;
  request.bucket = bucket;
  request.device = device;
  request.run_id = run_id;
  Status status = check_leaves(spec, args, rets, &request.leaves);
  const auto link = status.ok() ? link_of(*target.engine, device, &status) : nullptr;
  if (!status.ok()) return status;
  for (const LeafBuffers& leaf : request.leaves)
    if (leaf.grad_type == spec.rule.param && leaf.grad != leaf.out)
      return Status(Code::kInvalid,
                    "jax_mlp_offload: XLA did not alias a result of jmo_push to its gradient");
  const bool wait = stream == nullptr;
  if (wait) stream = link->own_stream();
  // What is in the token does not matter, but it has to be something.
  status = link->runtime().set_u32(link->device(), stream, token->typed_data(), 0);
  if (status.ok())
    status = link->push(std::move(request), ticket.typed_data(), hyper.typed_data(), spec.hyper_count + 1,
                        stream, wait);
  return ours(status);
}

xffi::Error push_cuda(void* stream, xffi::RunId run_id, int32_t device, Ticket ticket, Hyper hyper,
                      xffi::RemainingArgs args, TicketOut token, xffi::RemainingRets rets, int64_t store,
                      int64_t instance, int64_t bucket) {
  const Status status =
      push(stream, run_id.run_id, device, ticket, hyper, args, token, rets, store, instance, bucket);
  return status.ok() ? xffi::Error::Success() : error_of(status);
}

xffi::Error push_cpu(xffi::RunId run_id, int32_t device, Ticket ticket, Hyper hyper, xffi::RemainingArgs args,
                     TicketOut token, xffi::RemainingRets rets, int64_t store, int64_t instance,
                     int64_t bucket) {
  const Status status =
      push(nullptr, run_id.run_id, device, ticket, hyper, args, token, rets, store, instance, bucket);
  return status.ok() ? xffi::Error::Success() : error_of(status);
}

// ---- pull

struct Pull {
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
      return Status(Code::kInvalid, "jax_mlp_offload: XLA did not alias a result of jmo_pull to its operand");
    (*leaves)[leaf].out = (*out)->untyped_data();
    if (!spec.reads_params) continue;
    const auto param = args.get<xffi::AnyBuffer>(count + apart.size() + leaf);
    if (!param) return Status(Code::kInvalid, "jax_mlp_offload: a param is no array");
    (*leaves)[leaf].param = param->untyped_data();
  }
  for (size_t i = 0; i < apart.size(); ++i) {
    const auto grad = args.get<xffi::AnyBuffer>(count + i);
    if (!grad || apart[i] < 0 || apart[i] >= static_cast<int64_t>(count))
      return Status(Code::kInvalid, "jax_mlp_offload: a gradient is no array");
    (*leaves)[apart[i]].grad = grad->untyped_data();
  }
  return Status();
}

Pull find_pushed(int64_t run_id, int32_t device, xffi::RemainingArgs& args, xffi::RemainingRets& rets,
                 Leaves apart, int64_t store, int64_t instance, int64_t bucket) {
  Target target = find_target(store, instance, bucket);
  Pull pull{target.spec, nullptr, nullptr, target.status};
  if (!pull.status.ok()) return pull;
  const size_t leaves = pull.spec->leaves.size();
  if (args.size() != leaves * (pull.spec->reads_params ? 2 : 1) + apart.size() || rets.size() != leaves) {
    pull.status = wrong_operands(instance, bucket);
    return pull;
  }
  std::vector<LeafBuffers> buffers;
  pull.status = pulled_leaves(*pull.spec, args, rets, apart, &buffers);
  if (pull.status.ok()) pull.link = link_of(*target.engine, device, &pull.status);
  if (pull.link) pull.pushed = pull.link->find(instance, bucket, run_id, buffers, &pull.status);
  return pull;
}

xffi::Error pull_cuda(void* stream, xffi::RunId run_id, int32_t device, Ticket, xffi::RemainingArgs args,
                      TicketOut ticket, xffi::RemainingRets rets, int64_t store, int64_t instance,
                      int64_t bucket, Leaves apart) {
  const Pull pull = find_pushed(run_id.run_id, device, args, rets, apart, store, instance, bucket);
  if (!pull.status.ok()) return error_of(pull.status);
  pull.link->wait(pull.pushed);
  const Status status = pull.link->finish(pull.pushed, *pull.spec, ticket->typed_data(), stream, false);
  return status.ok() ? xffi::Error::Success() : error_of(ours(status));
}

xffi::Future pull_cpu(xffi::RunId run_id, int32_t device, Ticket, xffi::RemainingArgs args, TicketOut ticket,
                      xffi::RemainingRets rets, int64_t store, int64_t instance, int64_t bucket,
                      Leaves apart) {
  const Pull pull = find_pushed(run_id.run_id, device, args, rets, apart, store, instance, bucket);
  xffi::Promise promise;
  xffi::Future future(promise);
  if (!pull.status.ok()) {
    promise.SetError(error_of(pull.status));
    return future;
  }
  pull.link->when_ended(pull.pushed, [pull, promise, out = ticket->typed_data()]() mutable {
    const Status status = pull.link->finish(pull.pushed, *pull.spec, out, pull.link->own_stream(), true);
    if (status.ok()) {
      promise.SetAvailable();
    } else {
      promise.SetError(error_of(ours(status)));
    }
  });
  return future;
}

// ---- agree

// Returns at once. Where the store was closed since its ops ended, nobody needs to know.
xffi::Error agree_cuda(void* stream, int32_t device, Ticket mine, Ticket agreed, TicketOut ticket,
                       int64_t store, int64_t instance) {
  auto engine = find_engine(store);
  Status status =
      engine ? Status() : Status(Code::kClosed, "jax_mlp_offload: the store of this program is closed");
  const auto link = engine ? link_of(*engine, device, &status) : nullptr;
  if (link)
    status = ours(
        link->agree(instance, mine.typed_data(), agreed.typed_data(), ticket->typed_data(), stream, false));
  return status.ok() ? xffi::Error::Success() : error_of(status);
}

}  // namespace

#define JMO_PUSH(binding)                         \
  (binding)                                       \
      .Ctx<xffi::RunId>()                         \
      .Ctx<xffi::DeviceOrdinal>()                 \
      .Arg<Ticket>()                              \
      .Arg<Hyper>()                               \
      .RemainingArgs()                            \
      .Ret<xffi::BufferR1<xffi::DataType::U32>>() \
      .RemainingRets()                            \
      .Attr<int64_t>("store")                     \
      .Attr<int64_t>("instance")                  \
      .Attr<int64_t>("bucket")

#define JMO_PULL(binding)                         \
  (binding)                                       \
      .Ctx<xffi::RunId>()                         \
      .Ctx<xffi::DeviceOrdinal>()                 \
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
