// The file of one record while it is read or written: what is private to io.cc, apart from queues and
// threads.
//
// 1. open: a write creates the file where it is missing and brings it to the record's size once (a longer
//    one is cut, a shorter one extended with its blocks allocated), so that overwrites go in place. A read
//    refuses a file that is shorter than the record.
// 2. transfer: one block. With O_DIRECT on, what lies beyond the record's last whole page, the tail, is
//    left out. Memory that is not aligned to 4096 does not use O_DIRECT at all.
// 3. finish: with all transfers ended, O_DIRECT is dropped from the descriptor and the tail goes through
//    the page cache. Tail and body never share a page, and the kernel keeps O_DIRECT and the page cache of
//    a file coherent.
// 4. CRCs are taken a block at a time and joined in the order of the blocks.
// What always holds: one descriptor, open from open() until finish() or abandon() at the latest.
// Thread contract: transfer() on many threads over different blocks; the rest on one thread, with no
// transfer under way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/core/io.h"
#include "ffi/core/status.h"
#include "ffi/core/syscalls.h"

namespace jmo {

class RecordFile {
 public:
  // `block_size` is a positive multiple of 4096. `direct` is the tier's: whether to try O_DIRECT; false is
  // stored where the file system refuses it.
  RecordFile(const IoJob& job, bool is_write, size_t block_size, std::atomic<bool>* direct);

  const IoJob& job() const { return job_; }
  // At least one block, also for an empty record, so that the file is opened.
  size_t block_count() const { return block_crcs_.size(); }
  size_t block_bytes(size_t block) const;

  Status open();
  Status transfer(size_t block);
  // Ends the record after all blocks went well; `*crc` is of the whole record. A read compares it.
  Status finish(uint32_t* crc);
  // Closes the file after a failure.
  void abandon();
  // What the file system had left when the file was closed; -1: unknown.
  int64_t free_bytes() const { return free_bytes_; }

  // "write of /tier/record"
  std::string what() const { return (is_write_ ? "write of " : "read of ") + job_.path; }

 private:
  Status close();
  Status move(size_t begin, size_t end, uint32_t* crc);
  Status too_short(uint64_t found) const;

  const IoJob job_;
  const bool is_write_;
  const size_t block_size_;
  std::atomic<bool>* const direct_;
  File file_;
  size_t body_ = 0;  // the bytes that blocks transfer; the rest of job_.size is the tail
  std::vector<uint32_t> block_crcs_;
  int64_t free_bytes_ = -1;
};

}  // namespace jmo
