// The one error type of ffi/core: a code, a message that says what was being done to what, and errno where a
// system call failed. Thread contract: a value; copy it freely.
#pragma once

#include <string>
#include <utility>

namespace jmo {

enum class Code { kOk, kInvalid, kIo, kCorrupt, kClosed };

class Status {
 public:
  Status() = default;
  Status(Code code, std::string message, int error_number = 0)
      : code_(code), error_number_(error_number), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  int error_number() const { return error_number_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  int error_number_ = 0;
  std::string message_;
};

}  // namespace jmo
