// A Status as a Python exception.
#pragma once

#include <stdexcept>

#include "ffi/core/status.h"

namespace jmo {

inline void raise_if(const Status& status) {
  if (status.ok()) return;
  if (status.code() == Code::kInvalid) throw std::invalid_argument(status.message());
  throw std::runtime_error(status.message());
}

}  // namespace jmo
