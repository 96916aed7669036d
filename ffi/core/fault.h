// Injected faults, FOR TESTS ONLY: makes transfers of files under a path prefix fail or answer late, so
// that a test (also a Python one) can have a tier whose third write fails, a full disk, or a device that
// answers out of order.
//
// What always holds: with no fault injected a job costs one atomic load. Faults count jobs (whole records),
// not blocks, in the order in which the I/O threads take them up. The state is the process's;
// clear_faults() empties it.
// Thread contract: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/core/status.h"

namespace jmo {

struct FaultSpec {
  std::string path_prefix;  // jobs whose path begins so
  bool is_write = false;    // the direction that the fault is for
  int64_t after_count = 0;  // so many jobs pass first
  int64_t fail_count = 1;   // then so many fail; < 0: all that follow
  int error_number = 0;     // errno of the failure; 0: none fails, the jobs are only delayed
  double min_delay_s = 0;   // every job under the prefix waits for a random time before its first transfer,
  double max_delay_s = 0;   // drawn evenly from [min, max]
  uint64_t seed = 0;        // of those times
};

void inject_fault(const FaultSpec& spec);
void clear_faults();

// What the job just taken up has to suffer. Counts the job.
struct FaultOutcome {
  double delay_s = 0;
  int error_number = 0;
};
FaultOutcome draw_fault(const std::string& path, bool is_write);
// The failure of that outcome as the status of `what` ("write of PATH"), or ok.
Status fault_status(const FaultOutcome& fault, const std::string& what);

}  // namespace jmo
