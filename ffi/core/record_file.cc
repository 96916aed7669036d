// See record_file.h, also for the thread contract.
#include "ffi/core/record_file.h"

#include <algorithm>
#include <cstdio>

#include "ffi/core/crc32c.h"

namespace jmo {
namespace {

bool is_aligned(const char* memory) { return reinterpret_cast<uintptr_t>(memory) % kDirectAlign == 0; }

std::string hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", static_cast<unsigned>(value));
  return text;
}

}  // namespace

RecordFile::RecordFile(const IoJob& job, bool is_write, size_t block_size, std::atomic<bool>* direct)
    : job_(job),
      is_write_(is_write),
      block_size_(block_size),
      direct_(direct),
      block_crcs_(std::max<size_t>((job.size + block_size - 1) / block_size, 1)) {}

size_t RecordFile::block_bytes(size_t block) const {
  return std::min(job_.size, (block + 1) * block_size_) - block * block_size_;
}

Status RecordFile::open() {
  const bool direct =
      direct_->load(std::memory_order_relaxed) && is_aligned(job_.memory) && job_.size >= kDirectAlign;
  const auto access = is_write_ ? File::Access::kWrite : File::Access::kRead;
  if (Status status = file_.open(job_.path, access, direct); !status.ok()) return status;
  if (file_.direct_refused()) direct_->store(false, std::memory_order_relaxed);
  body_ = file_.direct() ? round_down_direct(job_.size) : job_.size;
  uint64_t found = 0;
  if (Status status = file_.size(&found); !status.ok()) return status;
  if (!is_write_) return found < job_.size ? too_short(found) : Status();
  if (found > job_.size) return file_.truncate(job_.size);
  return found < job_.size ? file_.extend(job_.size) : Status();
}

Status RecordFile::transfer(size_t block) {
  const size_t begin = std::min(block * block_size_, body_);
  return move(begin, std::min(begin + block_size_, body_), &block_crcs_[block]);
}

Status RecordFile::finish(uint32_t* crc) {
  uint32_t tail_crc = 0;
  if (body_ < job_.size) {
    if (Status status = file_.drop_direct(); !status.ok()) return status;
    if (Status status = move(body_, job_.size, &tail_crc); !status.ok()) return status;
  }
  if (Status status = close(); !status.ok()) return status;
  uint32_t whole = block_crcs_[0];
  for (size_t block = 1; block < block_crcs_.size(); ++block) {
    const size_t begin = std::min(block * block_size_, body_);
    whole = crc32c_combine(whole, block_crcs_[block], std::min(begin + block_size_, body_) - begin);
  }
  *crc = crc32c_combine(whole, tail_crc, job_.size - body_);
  if (is_write_ || !job_.check_crc || *crc == job_.expected_crc) return Status();
  return Status(Code::kCorrupt, what() + " (" + std::to_string(job_.size) + " bytes): CRC32C is " +
                                    hex(*crc) + ", expected " + hex(job_.expected_crc));
}

void RecordFile::abandon() { (void)close(); }

Status RecordFile::close() {
  if (const int64_t found = file_.free_bytes(); found >= 0) free_bytes_ = found;
  return file_.close();
}

Status RecordFile::move(size_t begin, size_t end, uint32_t* crc) {
  char* memory = job_.memory + begin;
  const size_t size = end - begin;
  *crc = 0;
  if (size == 0) return Status();
  Status status;
  if (is_write_) {
    *crc = crc32c(memory, size);
    status = file_.write(memory, size, begin);
  } else {
    size_t moved = 0;
    status = file_.read(memory, size, begin, &moved);
    if (status.ok() && moved < size) status = too_short(begin + moved);  // cut by someone while we read
    if (status.ok()) *crc = crc32c(memory, size);
  }
  if (file_.direct_refused()) direct_->store(false, std::memory_order_relaxed);
  return status;
}

Status RecordFile::too_short(uint64_t found) const {
  return Status(Code::kCorrupt, what() + " at offset " + std::to_string(found) +
                                    ": the file ends there; expected " + std::to_string(job_.size) +
                                    " bytes, found " + std::to_string(found));
}

}  // namespace jmo
