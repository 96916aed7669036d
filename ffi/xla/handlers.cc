// The ops `jmo_update` and `jmo_agree` for the CPU, where XLA's buffers are the host's memory. Thread
// contract: as handlers.h.
#include "ffi/xla/handlers.h"

#include <string>
#include <utility>

#include "ffi/core/engine.h"
#include "ffi/xla/operands.h"

namespace jmo {
namespace {

// Queues the request; `promise` is completed when it ends, unless this fails.
Status submit_update(Request request, const xffi::BufferR1<xffi::DataType::F32>& hyper,
                     xffi::RemainingArgs& args, xffi::RemainingRets& rets, int64_t store,
                     xffi::Promise promise) {
  const Target target = find_target(store, request.instance, request.bucket);
  if (!target.status.ok()) return target.status;
  const BucketSpec& spec = *target.spec;
  const size_t leaves = spec.leaves.size();
  if (args.size() != leaves * (spec.reads_params ? 2 : 1) || rets.size() != leaves ||
      hyper.element_count() != static_cast<size_t>(spec.hyper_count) + 1)
    return wrong_operands(request.instance, request.bucket);
  request.hyper = hyper.typed_data();
  const Status checked = check_leaves(spec, args, rets, &request.leaves);
  if (!checked.ok()) return checked;
  request.finish = [promise](const Status& status) mutable {
    if (status.ok()) {
      promise.SetAvailable();
    } else {
      promise.SetError(error_of(status));
    }
  };
  const Status status = target.engine->submit(std::move(request));
  return status.ok() ? status : Status(status.code(), "jax_mlp_offload: " + status.message());
}

xffi::Future update_cpu(xffi::RunId run_id, int32_t device, xffi::BufferR1<xffi::DataType::U32> ticket,
                        xffi::BufferR1<xffi::DataType::F32> hyper, xffi::RemainingArgs args,
                        xffi::ResultBufferR1<xffi::DataType::U32> ticket_out, xffi::RemainingRets rets,
                        int64_t store, int64_t instance, int64_t bucket) {
  xffi::Promise promise;
  xffi::Future future(promise);
  const xffi::Error error = guarded([&] {
    Request request;
    request.instance = instance;
    request.bucket = bucket;
    request.device = device;
    request.run_id = run_id.run_id;
    request.ticket = ticket.typed_data()[0];
    request.ticket_out = ticket_out->typed_data();
    return error_of(submit_update(std::move(request), hyper, args, rets, store, promise));
  });
  if (error.failure()) promise.SetError(error);
  return future;
}

// Tells the engine what all processes made of the ticket that its ops gave, and hands it on. Waits for
// nothing.
xffi::Error agree_cpu(int32_t device, xffi::BufferR1<xffi::DataType::U32> mine,
                      xffi::BufferR1<xffi::DataType::U32> agreed,
                      xffi::ResultBufferR1<xffi::DataType::U32> ticket_out, int64_t store, int64_t instance) {
  const uint32_t ticket = agreed.typed_data()[0];
  // where the store was closed since its ops ended, nobody needs to know
  if (auto engine = find_engine(store)) engine->agree(instance, device, mine.typed_data()[0], ticket);
  ticket_out->typed_data()[0] = ticket;
  return xffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmo_update_cpu, update_cpu,
                              xffi::Ffi::Bind()
                                  .Ctx<xffi::RunId>()
                                  .Ctx<xffi::DeviceOrdinal>()
                                  .Arg<xffi::BufferR1<xffi::DataType::U32>>()
                                  .Arg<xffi::BufferR1<xffi::DataType::F32>>()
                                  .RemainingArgs()
                                  .Ret<xffi::BufferR1<xffi::DataType::U32>>()
                                  .RemainingRets()
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("instance")
                                  .Attr<int64_t>("bucket"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmo_agree_cpu, agree_cpu,
                              xffi::Ffi::Bind()
                                  .Ctx<xffi::DeviceOrdinal>()
                                  .Arg<xffi::BufferR1<xffi::DataType::U32>>()
                                  .Arg<xffi::BufferR1<xffi::DataType::U32>>()
                                  .Ret<xffi::BufferR1<xffi::DataType::U32>>()
                                  .Attr<int64_t>("store")
                                  .Attr<int64_t>("instance"));

}  // namespace jmo
