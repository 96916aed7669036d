// See io.h. The work is done by IoQueue (order, threads, limits) and RecordFile (the file).
// Thread contract: as in io.h.
#include "ffi/core/io.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "ffi/core/fault.h"
#include "ffi/core/io_queue.h"
#include "ffi/core/record_file.h"

namespace jmo {
namespace {

// A limited direction moves at most this many seconds of its bandwidth in one block, that the traffic be
// even; but no blocks are cut below the size at which a device still streams.
constexpr double kLimitedBlockS = 0.01;
constexpr size_t kLeastLimitedBlock = 256u << 10;
constexpr size_t kTransferNowBlock = 4u << 20;

size_t round_up_direct(size_t size) { return round_down_direct(size + kDirectAlign - 1); }

IoQueue::Options queue_options(const TierOptions& tier, bool is_write) {
  IoQueue::Options options;
  options.is_write = is_write;
  options.limit_bps = is_write ? tier.write_limit_bps : tier.read_limit_bps;
  options.threads = std::max(tier.threads, 1);
  options.block_size = std::max(round_up_direct(tier.block_size), kDirectAlign);
  options.turn = tier.turn;
  options.turn.is_write = is_write;
  if (options.limit_bps > 0) {
    // Compared as doubles first: a huge limit has no size_t.
    const double even = std::min(options.limit_bps * kLimitedBlockS, static_cast<double>(options.block_size));
    const size_t most = std::max(round_up_direct(static_cast<size_t>(even)), kLeastLimitedBlock);
    options.block_size = std::min(options.block_size, most);
  }
  return options;
}

}  // namespace

class TierIo::Impl {
 public:
  Impl(const TierOptions& options, Done on_done)
      : done(std::move(on_done)),
        direct(options.direct),
        reads(queue_options(options, false), &direct, done),
        writes(queue_options(options, true), &direct, done) {}

  // The queues' threads use both until they are joined, so that these come first.
  const Done done;
  std::atomic<bool> direct;
  IoQueue reads;
  IoQueue writes;
};

TierIo::TierIo(const TierOptions& options, Done done)
    : impl_(std::make_unique<Impl>(options, std::move(done))) {}
TierIo::~TierIo() { close(); }

void TierIo::read(IoJob job) { impl_->reads.submit(job); }
void TierIo::write(IoJob job) { impl_->writes.submit(job); }
void TierIo::close() {
  impl_->reads.stop();  // both are told first, so that neither goes on while the other is joined
  impl_->writes.stop();
  impl_->reads.close();
  impl_->writes.close();
}
bool TierIo::direct_in_use() const { return impl_->direct.load(std::memory_order_relaxed); }
void TierIo::set_exclusive(bool on) {
  impl_->reads.set_exclusive(on);
  impl_->writes.set_exclusive(on);
}
TurnStats TierIo::turns(bool is_write) const {
  return is_write ? impl_->writes.turn().stats() : impl_->reads.turn().stats();
}
std::string TierIo::turn_error() const {
  const std::string error = impl_->reads.turn().error();
  return error.empty() ? impl_->writes.turn().error() : error;
}

namespace {

IoResult transfer_now(const IoJob& job, bool is_write, bool direct) {
  IoResult result;
  result.token = job.token;
  result.is_write = is_write;
  result.size = job.size;
  result.start_s = now_s();
  std::atomic<bool> direct_in_use{direct};
  RecordFile file(job, is_write, kTransferNowBlock, &direct_in_use);
  const FaultOutcome fault = draw_fault(job.path, is_write);
  if (fault.delay_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(fault.delay_s));
  result.status = file.open();
  if (result.status.ok()) result.status = fault_status(fault, file.what());
  for (size_t block = 0; result.status.ok() && block < file.block_count(); ++block)
    result.status = file.transfer(block);
  if (result.status.ok()) result.status = file.finish(&result.crc);
  file.abandon();
  result.free_bytes = file.free_bytes();
  result.end_s = now_s();
  return result;
}

}  // namespace

IoResult read_now(const IoJob& job, bool direct) { return transfer_now(job, false, direct); }

IoResult write_now(const IoJob& job, bool direct) { return transfer_now(job, true, direct); }

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace jmo
