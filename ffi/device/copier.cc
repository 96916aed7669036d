// See copier.h.
#include "ffi/device/copier.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "ffi/core/io.h"
#include "ffi/device/copier_parts.h"

namespace jmo {
namespace {

constexpr size_t kTables = 16;

// After a call that failed: what went before it may still be under way. (On a device that has failed as a
// whole nothing is, and so it may refuse.)
void settle(DeviceEvent& event, DeviceStream& stream) {
  if (event.record(stream.get()).ok()) (void)event.wait_on_host();
}

}  // namespace

void Copier::Busy::begins() {
  if (count++ == 0) since_s = now_s();
}
void Copier::Busy::ends() {
  if (--count == 0) total_s += now_s() - since_s;
}
double Copier::Busy::so_far_s() const { return total_s + (count > 0 ? now_s() - since_s : 0.0); }

Copier::Copier(DeviceRuntime& runtime, const CopierOptions& options, KernelPool& kernels)
    : runtime_(runtime), options_(options), kernels_(kernels) {
  status_ = set_up();
  if (!status_.ok()) return;
  try {
    down_thread_ = std::thread([this] { run_down(); });
    up_thread_ = std::thread([this] { run_up(); });
  } catch (const std::system_error& error) {
    status_ = Status(Code::kIo, std::string("threads for copies: ") + error.what());
    close();
  }
}

Copier::~Copier() { close(); }

Status Copier::set_up() {
  const int device = options_.device;
  if (options_.chunk_bytes < kLeastChunkBytes || options_.chunks == 0)
    return Status(Code::kInvalid, std::to_string(options_.chunks) + " chunks of " +
                                      std::to_string(options_.chunk_bytes) + " bytes: give at least one of " +
                                      std::to_string(kLeastChunkBytes));
  const size_t chunk_bytes = whole_pages(options_.chunk_bytes),
               table_bytes = whole_pages(sizeof(Table::Columns));
  memory_ =
      std::make_unique<PinnedMemory>(runtime_, device, options_.chunks * chunk_bytes + kTables * table_bytes);
  if (!memory_->status().ok()) return memory_->status();
  pinned_ = memory_->pinned();
  down_ = std::make_unique<DeviceStream>(runtime_, device);
  up_ = std::make_unique<DeviceStream>(runtime_, device);
  for (const auto& stream : {down_.get(), up_.get()})
    if (!stream->status().ok()) return stream->status();
  char* memory = memory_->get();
  for (size_t index = 0; index < options_.chunks; ++index, memory += chunk_bytes) {
    chunks_.push_back(std::make_unique<Chunk>(runtime_, device, memory));
    free_chunks_.push_back(chunks_.back().get());
    if (!chunks_.back()->down.status().ok()) return chunks_.back()->down.status();
    if (!chunks_.back()->up.status().ok()) return chunks_.back()->up.status();
  }
  for (size_t index = 0; index < kTables; ++index, memory += table_bytes) {
    tables_.push_back(std::make_unique<Table>(runtime_, device, memory));
    free_tables_.push_back(tables_.back().get());
    if (!tables_.back()->up.status().ok()) return tables_.back()->up.status();
  }
  return Status();
}

void Copier::update(UpdateJob job, KernelPool::Done done) {
  auto entry = std::make_shared<Job>();
  entry->result.adopted_cells.resize(job.segments.size());
  entry->result.start_s = now_s();
  entry->update = std::move(job);
  entry->done = std::move(done);
  entry->on_device = on_device_ && pinned_.ok();
  bool taken;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    taken = !closing_;
    if (taken) {
      ++open_;
      jobs_.push_back(entry);
    }
  }
  if (taken) {
    for_down_.notify_one();
    return;
  }
  entry->result.status = Status(Code::kClosed, "the store of this program is closed");
  entry->result.end_s = now_s();
  entry->done(std::move(entry->result));
}

std::deque<std::shared_ptr<Copier::Flight>> Copier::flights_of(const std::shared_ptr<Job>& job) const {
  std::deque<std::shared_ptr<Flight>> flights;
  const auto add = [&] {
    flights.push_back(std::make_shared<Flight>());
    flights.back()->job = job;
    return flights.back().get();
  };
  if (!job->on_device) {
    for (Part& part : cut(job->update, whole_pages(options_.chunk_bytes))) add()->part = std::move(part);
    return flights;
  }
  size_t first = 0;
  do {
    Flight* flight = add();
    flight->first_segment = first;
    flight->segments =
        static_cast<int>(std::min<size_t>(kTableSegments, job->update.segments.size() - first));
    first += flight->segments;
  } while (first < job->update.segments.size());
  return flights;
}

// ---- the down thread

void Copier::run_down() {
  Lock lock(mutex_);
  for (;;) {
    if (waiting_.empty() && !jobs_.empty()) {
      const std::shared_ptr<Job> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      auto flights = flights_of(job);
      lock.lock();
      job->left = flights.size();
      waiting_ = std::move(flights);
    }
    if (const std::shared_ptr<Flight> flight = next_to_issue()) {
      lock.unlock();
      issue(flight);
      lock.lock();
    } else if (!landing_.empty()) {
      const std::shared_ptr<Flight> oldest = std::move(landing_.front());
      landing_.pop_front();
      lock.unlock();
      land(oldest);
      lock.lock();
    } else if (closing_ && open_ == 0) {
      return;
    } else {
      for_down_.wait(lock);
    }
  }
}

// The next flight that waits, if there is a chunk or a table for it.
std::shared_ptr<Copier::Flight> Copier::next_to_issue() {
  if (waiting_.empty()) return nullptr;
  std::shared_ptr<Flight> flight = waiting_.front();
  if (flight->job->on_device) {
    if (free_tables_.empty()) return nullptr;
    flight->table = free_tables_.back();
    free_tables_.pop_back();
    device_busy_.begins();
  } else {
    if (free_chunks_.empty()) return nullptr;
    flight->chunk = free_chunks_.back();
    free_chunks_.pop_back();
    down_busy_.begins();
  }
  waiting_.pop_front();
  return flight;
}

void Copier::issue(const std::shared_ptr<Flight>& flight) {
  const bool on_device = flight->table != nullptr;
  const Status status = on_device ? give_table(*flight) : copy_down(*flight);
  if (!status.ok()) {
    settle(on_device ? flight->table->up : flight->chunk->down, on_device ? *up_ : *down_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      (on_device ? device_busy_ : down_busy_).ends();
    }
    end(flight, status);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    (on_device ? returning_ : landing_).push_back(flight);
  }
  if (on_device) for_up_.notify_one();
}

Status Copier::copy_down(Flight& flight) {
  const UpdateJob& job = flight.job->update;
  size_t bytes = 0;
  const auto copy = [&](size_t to, const void* from, int64_t begin, int64_t count, DType type) {
    const size_t size = count * size_of(type);
    bytes += size;
    return runtime_.copy_to_host(options_.device, down_->get(), flight.chunk->memory + to,
                                 at(from, begin, type), size);
  };
  for (const Piece& piece : flight.part) {
    const Segment& segment = job.segments[piece.segment];
    Status status = copy(piece.grad_at, segment.grad, piece.begin, piece.count, segment.grad_type);
    if (status.ok() && segment.param != nullptr)
      status = copy(piece.param_at, segment.param, piece.begin, piece.count, job.spec.param);
    if (!status.ok()) return status;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    to_host_bytes_ += static_cast<int64_t>(bytes);
  }
  return flight.chunk->down.record(down_->get());
}

Status Copier::give_table(Flight& flight) {
  const UpdateJob& job = flight.job->update;
  Table::Columns& columns = *flight.table->columns;
  int64_t cells = 0;
  for (int i = 0; i < flight.segments; ++i) {
    columns.segments[i] = job.segments[flight.first_segment + i];
    columns.first_cell[i] = cells;
    columns.adopted[i] = 0;
    cells += cells_of(columns.segments[i].count);
  }
  columns.first_cell[flight.segments] = cells;
  DeviceUpdate update;
  update.spec = job.spec;
  update.hyper = job.hyper;
  update.segments = columns.segments;
  update.first_cell = columns.first_cell;
  update.adopted_cells = columns.adopted;
  update.count = flight.segments;
  update.fresh = job.fresh;
  const Status status = runtime_.update(options_.device, up_->get(), update);
  return status.ok() ? flight.table->up.record(up_->get()) : status;
}

void Copier::land(const std::shared_ptr<Flight>& flight) {
  const Status status = flight->chunk->down.wait_on_host();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    down_busy_.ends();
  }
  if (!status.ok()) {
    end(flight, status);
    return;
  }
  kernels_.submit(staged(flight->job->update, flight->part, flight->chunk->memory),
                  [this, flight](const UpdateResult& result) { send_back(flight, result); });
}

// ---- kernel threads

void Copier::send_back(const std::shared_ptr<Flight>& flight, const UpdateResult& result) {
  flight->adopted_cells = result.adopted_cells;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    up_busy_.begins();
  }
  const Status status = copy_up(*flight);
  if (!status.ok()) {
    settle(flight->chunk->up, *up_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      up_busy_.ends();
    }
    end(flight, status);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    returning_.push_back(flight);
  }
  for_up_.notify_one();
}

Status Copier::copy_up(Flight& flight) {
  const UpdateJob& job = flight.job->update;
  size_t bytes = 0;
  for (const Piece& piece : flight.part) {
    const size_t size = piece.count * size_of(job.spec.param);
    const Status status = runtime_.copy_to_device(
        options_.device, up_->get(), at(job.segments[piece.segment].out, piece.begin, job.spec.param),
        flight.chunk->memory + piece.param_at, size);
    if (!status.ok()) return status;
    bytes += size;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    to_device_bytes_ += static_cast<int64_t>(bytes);
  }
  return flight.chunk->up.record(up_->get());
}

// ---- the up thread

void Copier::run_up() {
  Lock lock(mutex_);
  for (;;) {
    if (!returning_.empty()) {
      const std::shared_ptr<Flight> flight = std::move(returning_.front());
      returning_.pop_front();
      lock.unlock();
      const bool on_device = flight->table != nullptr;
      const Status status = (on_device ? flight->table->up : flight->chunk->up).wait_on_host();
      lock.lock();
      (on_device ? device_busy_ : up_busy_).ends();
      lock.unlock();
      end(flight, status);
      lock.lock();
    } else if (closing_ && open_ == 0) {
      return;
    } else {
      for_up_.wait(lock);
    }
  }
}

// A flight is over, well or not; after a job's last one it is done.
void Copier::end(const std::shared_ptr<Flight>& flight, const Status& status) {
  const std::shared_ptr<Job> job = flight->job;
  bool last;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int64_t>& adopted = job->result.adopted_cells;
    for (size_t i = 0; i < flight->adopted_cells.size(); ++i)
      adopted[flight->part[i].segment] += flight->adopted_cells[i];
    for (int i = 0; i < flight->segments && status.ok(); ++i)
      adopted[flight->first_segment + i] += flight->table->columns->adopted[i];
    if (flight->chunk != nullptr) free_chunks_.push_back(flight->chunk);
    if (flight->table != nullptr) free_tables_.push_back(flight->table);
    if (job->result.status.ok()) job->result.status = status;
    last = --job->left == 0;
  }
  for_down_.notify_one();
  if (!last) return;
  job->result.end_s = now_s();
  job->done(std::move(job->result));
  job->done = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --open_;
  }
  for_down_.notify_one();
  for_up_.notify_one();
}

// ----

CopierStats Copier::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {to_host_bytes_, to_device_bytes_, down_busy_.so_far_s(), up_busy_.so_far_s(),
          device_busy_.so_far_s()};
}

void Copier::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  for_down_.notify_one();
  for_up_.notify_one();
  if (down_thread_.joinable()) down_thread_.join();
  if (up_thread_.joinable()) up_thread_.join();
}

}  // namespace jmo
