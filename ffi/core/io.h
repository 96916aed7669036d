// Asynchronous transfers of whole records between slots and the files of one tier.
//
// 1. A job is one file of `size` bytes and one slot. It is cut into blocks; the blocks go to the queue of its
// direction.
// 2. `threads` threads per direction take blocks in order, so that several are in flight. Each block is
// transferred
//    with O_DIRECT where file offset, length and memory allow it and the file system accepts it, else
//    buffered.
// 3. Writes: CRC32C is taken from memory. Reads: it is taken from what was read and compared with
// `expected_crc`.
// 4. When the last block of a job has ended (all of them, also after an error), `done` is called once, from
// an I/O thread.
// 5. Bandwidth limits are smooth token buckets, one a direction.
// 6. While exclusive access is on, blocks are transferred only in a turn on the device (turn.h). Opening
//    files, injected delays and waiting for bandwidth are done before it. A record's unaligned tail and
//    read_now() and write_now() take no turn.
// Thread contract: read/write may be called from any thread; `done` must not block. close() ends all queued
// jobs with kClosed, waits for those in flight, and joins the threads; it is idempotent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ffi/core/status.h"
#include "ffi/core/turn.h"

namespace jmo {

struct IoJob {
  std::string path;
  char* memory = nullptr;
  size_t size = 0;            // any size; the unaligned tail is handled
  uint64_t token = 0;         // comes back in the result
  uint32_t expected_crc = 0;  // reads
  bool check_crc = true;      // reads
};

struct IoResult {
  uint64_t token = 0;
  bool is_write = false;
  Status status;     // message: what failed, path, offset, errno text
  uint32_t crc = 0;  // CRC32C of the whole record
  size_t size = 0;
  // Monotonic clock; when a thread took up the job or, where it took turns, when its first block had its
  // turn.
  double start_s = 0;
  double end_s = 0;
  int64_t free_bytes = -1;  // left on the file system for this user when the file was closed; -1: unknown
};

struct TierOptions {
  bool direct = true;         // try O_DIRECT
  double read_limit_bps = 0;  // bytes/s; 0 = unlimited
  double write_limit_bps = 0;
  int threads = 2;               // per direction
  size_t block_size = 4u << 20;  // bytes; rounded up to 4096
  DeviceTurn::Options turn;      // is_write is not used
};

class TierIo {
 public:
  using Done = std::function<void(const IoResult&)>;
  TierIo(const TierOptions& options, Done done);
  ~TierIo();
  TierIo(const TierIo&) = delete;
  TierIo& operator=(const TierIo&) = delete;

  void read(IoJob job);
  void write(IoJob job);  // creates the file (mode 0600) where it is missing
  void close();
  bool direct_in_use() const;  // false once the file system has refused O_DIRECT

  // Exclusive access to the device, at any time; off at first. Without a lock file, or where that fails, it
  // stays off.
  void set_exclusive(bool on);
  TurnStats turns(bool is_write) const;
  std::string turn_error() const;  // why turns cannot be taken; empty: they can, or there is no lock file

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The same transfers, done by the calling thread (outside of a step).
IoResult read_now(const IoJob& job, bool direct);
IoResult write_now(const IoJob& job, bool direct);

// Seconds of the monotonic clock that all results use.
double now_s();

}  // namespace jmo
