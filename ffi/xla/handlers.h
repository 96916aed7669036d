// The handlers of our ops: `jmo_update` and `jmo_agree` for the CPU, `jmo_push`, `jmo_pull` and `jmo_agree`
// for devices. Thread contract: XLA calls them from its own threads, several at once.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jmo {

XLA_FFI_DECLARE_HANDLER_SYMBOL(jmo_update_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jmo_agree_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jmo_push_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jmo_pull_cpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jmo_push_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jmo_pull_cuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(jmo_agree_cuda);
// The FFI API version that this library was compiled against.
constexpr int kFfiApiMajor = XLA_FFI_API_MAJOR;
constexpr int kFfiApiMinor = XLA_FFI_API_MINOR;

}  // namespace jmo
