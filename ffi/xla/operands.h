// What the ops' handlers have in common: XLA's operands checked against the plan, and our errors as XLA's.
//
// Thread contract: pure functions.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "ffi/core/engine.h"
#include "xla/ffi/api/ffi.h"

namespace jmo {

namespace xffi = xla::ffi;

inline xffi::Error error_of(const Status& status) {
  if (status.ok()) return xffi::Error::Success();
  const auto code =
      status.code() == Code::kInvalid ? XLA_FFI_Error_Code_INVALID_ARGUMENT : XLA_FFI_Error_Code_ABORTED;
  return xffi::Error(code, status.message());
}

// The engine and the bucket that a call is for; what is wrong where there are none.
struct Target {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<const BucketSpec> spec;
  Status status;
};
Target find_target(int64_t store, int64_t instance, int64_t bucket);

// Whether an operand has the dtype and the elements that the plan gives a param of this leaf.
bool is_param(const BucketSpec& spec, size_t leaf, const xffi::AnyBuffer& buffer);
// A leaf's gradient, result and param (null where the op reads none), and whether they are as planned.
Status check_leaf(const BucketSpec& spec, size_t leaf, const xffi::AnyBuffer& grad,
                  const xffi::AnyBuffer& out, const xffi::AnyBuffer* param, LeafBuffers* buffers);
// All leaves of an op whose remaining operands are gradients, then params if the bucket reads them, and whose
// remaining results begin with one a leaf.
Status check_leaves(const BucketSpec& spec, xffi::RemainingArgs& args, xffi::RemainingRets& rets,
                    std::vector<LeafBuffers>* leaves);
// What `handler` returns; an exception of it, which XLA could not catch, as an error.
template <typename Handler>
auto guarded(Handler handler) -> decltype(handler()) {
  try {
    return handler();
  } catch (const std::exception& error) {
    return xffi::Error(XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                       std::string("jax_mlp_offload: a handler failed: ") + error.what());
  }
}

// That an op has other operands than planned.
Status wrong_operands(int64_t instance, int64_t bucket);

}  // namespace jmo
