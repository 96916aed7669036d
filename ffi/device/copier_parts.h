// What a Copier keeps of jobs and of what is on its way; for copier.cc only.
//
// Thread contract: whoever has a flight has its chunk or table; a job's `left` and `result` are under the
// copier's mutex.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include "ffi/device/copier.h"

namespace jmo {

constexpr int kTableSegments = 256;

struct Copier::Job {
  UpdateJob update;
  KernelPool::Done done;
  bool on_device = false;
  size_t left = 0;  // flights
  UpdateResult result;
};

struct Copier::Chunk {
  Chunk(DeviceRuntime& runtime, int device, char* chunk_memory)
      : memory(chunk_memory), down(runtime, device), up(runtime, device) {}
  char* const memory;
  DeviceEvent down, up;
};

// What the device reads of segments, in pinned memory.
struct Copier::Table {
  struct Columns {
    Segment segments[kTableSegments];
    int64_t first_cell[kTableSegments + 1];
    int64_t adopted[kTableSegments];
  };
  Table(DeviceRuntime& runtime, int device, char* memory)
      : columns(new (memory) Columns), up(runtime, device) {}
  Columns* const columns;
  DeviceEvent up;
};

struct Copier::Flight {
  std::shared_ptr<Job> job;
  Part part;
  size_t first_segment = 0;  // of those in the table
  int segments = 0;
  Chunk* chunk = nullptr;
  Table* table = nullptr;
  std::vector<int64_t> adopted_cells;  // of each piece
};

}  // namespace jmo
