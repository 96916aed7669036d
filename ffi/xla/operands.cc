// See operands.h.
#include "ffi/xla/operands.h"

namespace jmo {
namespace {

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

}  // namespace

Target find_target(int64_t store, int64_t instance, int64_t bucket) {
  Target target;
  target.engine = find_engine(store);
  if (!target.engine) {
    target.status = Status(Code::kClosed, "jax_mlp_offload: store " + std::to_string(store) +
                                              " of this program is closed, or was made in another process; "
                                              "make a store and the optimizer, and trace the step again");
    return target;
  }
  target.spec = target.engine->bucket(instance, bucket);
  if (!target.spec)
    target.status =
        Status(Code::kInvalid, "jax_mlp_offload: store " + std::to_string(store) +
                                   " does not know optimizer " + std::to_string(instance) + ", bucket " +
                                   std::to_string(bucket) + " of this program; trace the step again");
  return target;
}

bool is_param(const BucketSpec& spec, size_t leaf, const xffi::AnyBuffer& buffer) {
  DType type;
  return dtype_of(buffer.element_type(), &type) && type == spec.rule.param &&
         buffer.element_count() == static_cast<size_t>(spec.leaves[leaf].elements);
}

Status check_leaf(const BucketSpec& spec, size_t leaf, const xffi::AnyBuffer& grad,
                  const xffi::AnyBuffer& out, const xffi::AnyBuffer* param, LeafBuffers* buffers) {
  const std::string name = "jax_mlp_offload: leaf " + std::to_string(leaf) + ": ";
  const auto elements = static_cast<size_t>(spec.leaves[leaf].elements);
  if (!dtype_of(grad.element_type(), &buffers->grad_type))
    return Status(Code::kInvalid, name + "the gradient's dtype is not float32, bfloat16 or float16");
  if (grad.element_count() != elements)
    return Status(Code::kInvalid, name + "this device's shard has " + std::to_string(grad.element_count()) +
                                      " elements where the plan has " + std::to_string(elements));
  if (!is_param(spec, leaf, out))
    return Status(Code::kInvalid, name + "the result has another dtype or shape than planned");
  if (param != nullptr && !is_param(spec, leaf, *param))
    return Status(Code::kInvalid, name + "the param has another dtype or shape than planned");
  buffers->grad = grad.untyped_data();
  buffers->out = out.untyped_data();
  if (param != nullptr) buffers->param = param->untyped_data();
  return Status();
}

Status check_leaves(const BucketSpec& spec, xffi::RemainingArgs& args, xffi::RemainingRets& rets,
                    std::vector<LeafBuffers>* leaves) {
  const size_t count = spec.leaves.size();
  leaves->resize(count);
  for (size_t leaf = 0; leaf < count; ++leaf) {
    const auto grad = args.get<xffi::AnyBuffer>(leaf);
    auto out = rets.get<xffi::AnyBuffer>(leaf);
    const auto param = args.get<xffi::AnyBuffer>(spec.reads_params ? count + leaf : leaf);
    if (!grad || !out || !param)
      return Status(Code::kInvalid, "jax_mlp_offload: leaf " + std::to_string(leaf) + " is no array");
    const Status status =
        check_leaf(spec, leaf, *grad, **out, spec.reads_params ? &*param : nullptr, &(*leaves)[leaf]);
    if (!status.ok()) return status;
  }
  return Status();
}

Status wrong_operands(int64_t instance, int64_t bucket) {
  return Status(Code::kInvalid, "jax_mlp_offload: optimizer " + std::to_string(instance) + ", bucket " +
                                    std::to_string(bucket) +
                                    " has other operands than planned; trace the step again");
}

}  // namespace jmo
