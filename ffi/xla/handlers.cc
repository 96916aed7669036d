#include "ffi/xla/handlers.h"

#include <string>
#include <utility>

#include "ffi/core/engine.h"

namespace jmo {
namespace {

namespace xffi = xla::ffi;

xffi::Error error_of(const Status& status) {
  const auto code =
      status.code() == Code::kInvalid ? XLA_FFI_Error_Code_INVALID_ARGUMENT : XLA_FFI_Error_Code_ABORTED;
  return xffi::Error(code, status.message());
}

xffi::Future failed(Status status) {
  xffi::Promise promise;
  xffi::Future future(promise);
  promise.SetError(error_of(status));
  return future;
}

bool dtype_of(xffi::DataType type, DType* result) {
  switch (type) {
    case xffi::DataType::F32:
      *result = DType::kF32;
      return true;
    case xffi::DataType::BF16:
      *result = DType::kBF16;
      return true;
    case xffi::DataType::F16:
      *result = DType::kF16;
      return true;
    default:
      return false;
  }
}

// One leaf's operands, checked against what the plan says of it.
Status take_leaf(const BucketSpec& spec, size_t leaf, xffi::RemainingArgs& args, xffi::RemainingRets& rets,
                 LeafBuffers* buffers) {
  const size_t leaves = spec.leaves.size();
  const std::string name = "leaf " + std::to_string(leaf) + ": ";
  const auto elements = static_cast<size_t>(spec.leaves[leaf].elements);
  auto grad = args.get<xffi::AnyBuffer>(leaf);
  if (!grad || !dtype_of(grad->element_type(), &buffers->grad_type))
    return Status(Code::kInvalid, name + "the gradient's dtype is not float32, bfloat16 or float16");
  auto out = rets.get<xffi::AnyBuffer>(leaf);
  DType out_type;
  if (!out || !dtype_of((*out)->element_type(), &out_type) || out_type != spec.rule.param)
    return Status(Code::kInvalid, name + "the result has another dtype than planned");
  if (grad->element_count() != elements || (*out)->element_count() != elements)
    return Status(Code::kInvalid, name + "this device's shard has " + std::to_string(grad->element_count()) +
                                      " elements where the plan has " + std::to_string(elements));
  buffers->grad = grad->untyped_data();
  buffers->out = (*out)->untyped_data();
  if (!spec.reads_params) return Status();
  auto param = args.get<xffi::AnyBuffer>(leaves + leaf);
  DType param_type;
  if (!param || !dtype_of(param->element_type(), &param_type) || param_type != spec.rule.param ||
      param->element_count() != elements)
    return Status(Code::kInvalid, name + "the param has another dtype or shape than planned");
  buffers->param = param->untyped_data();
  return Status();
}

xffi::Future update_cpu(xffi::RunId run_id, int32_t device, xffi::BufferR1<xffi::DataType::U32> ticket,
                        xffi::BufferR1<xffi::DataType::F32> hyper, xffi::RemainingArgs args,
                        xffi::ResultBufferR1<xffi::DataType::U32> ticket_out, xffi::RemainingRets rets,
                        int64_t store, int64_t instance, int64_t bucket) {
  auto engine = find_engine(store);
  if (!engine)
    return failed(Status(Code::kClosed, "jax_mlp_offload: store " + std::to_string(store) +
                                            " of this program is closed, or was made in another process; "
                                            "make a store and the optimizer, and trace the step again"));
  auto spec = engine->bucket(instance, bucket);
  if (!spec)
    return failed(Status(Code::kInvalid, "jax_mlp_offload: store " + std::to_string(store) +
                                             " does not know optimizer " + std::to_string(instance) +
                                             ", bucket " + std::to_string(bucket) +
                                             " of this program; trace the step again"));
  const size_t leaves = spec->leaves.size();
  if (args.size() != leaves * (spec->reads_params ? 2 : 1) || rets.size() != leaves ||
      hyper.element_count() != static_cast<size_t>(spec->hyper_count) + 1)
    return failed(Status(Code::kInvalid, "jax_mlp_offload: optimizer " + std::to_string(instance) +
                                             ", bucket " + std::to_string(bucket) +
                                             " has other operands than planned; trace the step again"));

  Request request;
  request.instance = instance;
  request.bucket = bucket;
  request.device = device;
  request.run_id = run_id.run_id;
  request.ticket = ticket.typed_data()[0];
  request.hyper = hyper.typed_data();
  request.ticket_out = ticket_out->typed_data();
  request.leaves.resize(leaves);
  for (size_t leaf = 0; leaf < leaves; ++leaf) {
    Status status = take_leaf(*spec, leaf, args, rets, &request.leaves[leaf]);
    if (!status.ok()) return failed(Status(status.code(), "jax_mlp_offload: " + status.message()));
  }
  xffi::Promise promise;
  xffi::Future future(promise);
  request.finish = [promise](const Status& status) mutable {
    if (status.ok()) {
      promise.SetAvailable();
    } else {
      promise.SetError(error_of(status));
    }
  };
  const Status status = engine->submit(std::move(request));
  if (!status.ok()) promise.SetError(error_of(Status(status.code(), "jax_mlp_offload: " + status.message())));
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
