// TierIo when things go wrong: interrupted and short calls, O_DIRECT refused, full and broken disks, damaged
// files, injected faults. Usage: io_fault_test [FOLDER]
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>

#include "ffi/core/fault.h"
#include "ffi/tests/io_fixture.h"

namespace jmo_test {
namespace {

using jmo::Code;
using jmo::IoResult;
using jmo::TierIo;
using jmo::TierOptions;

constexpr size_t kBlock = 64u << 10;
constexpr size_t kSize = 5 * kBlock + 1234;

// Interferes with calls as told, from any thread.
class FaultyCalls : public jmo::SyscallHooks {
 public:
  int open(const char* path, int flags, mode_t mode) override {
    if (interrupted()) return -1;
    if (refuse_direct_open && (flags & O_DIRECT) != 0) return with_errno(EINVAL);
    return SyscallHooks::open(path, flags, mode);
  }
  int close(int fd) override {
    SyscallHooks::close(fd);
    return close_error != 0 ? with_errno(close_error) : 0;
  }
  ssize_t pread(int fd, void* memory, size_t size, off_t offset) override {
    if (const int error = refusal(fd, offset); error != 0) return with_errno(error);
    return shortened(SyscallHooks::pread(fd, memory, size, offset));
  }
  ssize_t pwrite(int fd, const void* memory, size_t size, off_t offset) override {
    if (const int error = refusal(fd, offset); error != 0) return with_errno(error);
    return shortened(SyscallHooks::pwrite(fd, memory, size, offset));
  }
  int fstat(int fd, struct stat* info) override { return interrupted() ? -1 : SyscallHooks::fstat(fd, info); }
  int ftruncate(int fd, off_t size) override {
    return interrupted() ? -1 : SyscallHooks::ftruncate(fd, size);
  }
  int fallocate(int fd, off_t offset, off_t size) override {
    if (interrupted()) return -1;
    return fallocate_error != 0 ? with_errno(fallocate_error) : SyscallHooks::fallocate(fd, offset, size);
  }

  int storm = 0;               // every call is interrupted so many times
  uint64_t short_modulus = 0;  // transfers report a part, between 1 byte and this
  bool refuse_direct_open = false;
  bool refuse_direct_transfer = false;
  int transfer_error = 0;  // of transfers at or beyond error_offset
  off_t error_offset = 0;
  int fallocate_error = 0;
  int close_error = 0;
  std::atomic<int> direct_transfers{0};

 private:
  static int with_errno(int number) {
    errno = number;
    return -1;
  }
  bool interrupted() {
    thread_local int left = 0;
    if (storm == 0) return false;
    left = left == 0 ? storm : left - 1;
    return left != 0 && with_errno(EINTR) != 0;
  }
  int refusal(int fd, off_t offset) {
    if (interrupted()) return EINTR;
    const bool direct = (::fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    direct_transfers += direct;
    if (direct && refuse_direct_transfer) return EINVAL;
    return transfer_error != 0 && offset >= error_offset ? transfer_error : 0;
  }
  ssize_t shortened(ssize_t count) {
    if (short_modulus == 0 || count <= 0) return count;
    const uint64_t draw = (random_ += 0x9E3779B97F4A7C15u) >> 20;
    return std::min<ssize_t>(count, static_cast<ssize_t>(1 + draw % short_modulus));
  }
  std::atomic<uint64_t> random_{1};
};

TierOptions small_blocks() {
  TierOptions options;
  options.block_size = kBlock;
  return options;
}

// Writes and reads one record; with any interference that is no error the bytes are right.
void check_round_trip(const std::string& path, size_t size, bool expect_direct) {
  Memory out(size), in(size);
  out.fill(size);
  Results results;
  TierIo tier(small_blocks(), results.collector());
  tier.write(make_job(path, &out, 1));
  const IoResult written = results.wait(1).at(0);
  check_ok(written);
  CHECK_EQ(written.crc, out.crc());
  CHECK(read_plain(path) == std::string(out.data(), size));
  tier.read(make_job(path, &in, 2, out.crc()));
  check_ok(results.wait(2).at(1));
  CHECK(std::memcmp(in.data(), out.data(), size) == 0);
  CHECK(in.guard_intact());
  CHECK_EQ(tier.direct_in_use(), expect_direct);
}

void test_interrupted_and_short_calls(const TempDir& folder, bool direct_works) {
  for (int storm : {0, 1, 17}) {
    for (uint64_t modulus : {uint64_t{0}, uint64_t{300}, uint64_t{5000}, uint64_t{50000}}) {
      FaultyCalls calls;
      calls.storm = storm;
      calls.short_modulus = modulus;
      const InstalledHooks installed(&calls);
      for (size_t size : {size_t{0}, size_t{511}, size_t{8192}, kSize})
        check_round_trip(folder.file("storm"), size, direct_works);
    }
  }
}

void test_refused_direct(const TempDir& folder, bool direct_works) {
  for (int where = 0; where < 3; ++where) {
    FaultyCalls calls;
    calls.refuse_direct_open = where == 1;
    calls.refuse_direct_transfer = where == 2;
    const InstalledHooks installed(&calls);
    check_round_trip(folder.file("refused"), kSize, where == 0 && direct_works);
    if (direct_works && where == 0) CHECK(calls.direct_transfers >= 10);  // 5 blocks each way
    if (where == 1) CHECK_EQ(calls.direct_transfers.load(), 0);
    if (where == 2) CHECK(calls.direct_transfers <= 4);  // each thread may find it out once
  }
}

void check_error(const IoResult& result, Code code, int error_number, const std::vector<std::string>& parts) {
  CHECK_EQ(result.status.code(), code);
  CHECK_EQ(result.status.error_number(), error_number);
  for (const std::string& part : parts) check_contains(result.status.message(), part);
  CHECK_EQ(result.crc, 0u + (code == Code::kCorrupt ? result.crc : 0u));
}

void test_errors_are_named(const TempDir& folder) {
  const std::string path = folder.file("broken");
  Memory memory(kSize);
  memory.fill(1);
  const size_t files_before = open_files();
  const auto run = [&](bool is_write) { return run_one(small_blocks(), make_job(path, &memory), is_write); };
  check_error(run(false), Code::kIo, ENOENT, {"open", path, "No such file", "errno 2"});
  check_ok(run(true));
  FaultyCalls calls;
  const InstalledHooks installed(&calls);
  calls.error_offset = 3 * kBlock;
  for (int number : {EIO, ENOSPC, EFBIG}) {
    calls.transfer_error = number;
    const std::string text = "errno " + std::to_string(number);
    const IoResult write = run(true), read = run(false);
    check_error(write, Code::kIo, number, {"write at offset ", path, text, std::strerror(number)});
    check_error(read, Code::kIo, number, {"read at offset ", path, text, std::strerror(number)});
  }
  calls.error_offset = 5 * kBlock;  // in the tail, or in the page that it is in
  check_error(run(true), Code::kIo, EFBIG, {"write at offset 327680", path});
  calls.transfer_error = 0;
  calls.close_error = EDQUOT;  // as NFS tells it
  check_error(run(true), Code::kIo, EDQUOT, {"close", path});
  calls.close_error = 0;
  check_ok(run(true));
  CHECK_EQ(open_files(), files_before);
  const std::string folder_path = folder.file("");
  check_error(run_one(small_blocks(), make_job(folder_path, &memory), true), Code::kIo, EISDIR,
              {folder_path});
}

void test_no_room_for_the_file(const TempDir& folder) {
  const std::string path = folder.file("full");
  Memory small(kBlock), memory(kSize);
  check_ok(run_one(small_blocks(), make_job(path, &small), true));
  FaultyCalls calls;
  const InstalledHooks installed(&calls);
  calls.fallocate_error = ENOSPC;
  const IoResult refused = run_one(small_blocks(), make_job(path, &memory), true);
  check_error(refused, Code::kIo, ENOSPC,
              {"allocate", path, std::to_string(kSize), "No space left", "errno 28"});
  CHECK_EQ(size_on_disk(path), kBlock);
  calls.fallocate_error = EOPNOTSUPP;  // then the file is only lengthened
  check_ok(run_one(small_blocks(), make_job(path, &memory), true));
  CHECK_EQ(size_on_disk(path), kSize);
}

// In a child, so that the limit ends with it. The signal is at its default, which would end the process.
void test_file_size_limit(const TempDir& folder) {
  const std::string existing = folder.file("limited-old"), fresh = folder.file("limited-new");
  Memory memory(8 * kBlock);
  check_ok(run_one(small_blocks(), make_job(existing, &memory), true));
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    const rlimit limit = {2 * kBlock + 100, 2 * kBlock + 100};
    CHECK_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    const IoResult created = run_one(small_blocks(), make_job(fresh, &memory), true);
    check_error(created, Code::kIo, EFBIG, {fresh, "File too large", "errno 27"});
    CHECK_EQ(size_on_disk(fresh), uint64_t{0});
    const IoResult overwritten = run_one(small_blocks(), make_job(existing, &memory), true);
    check_error(overwritten, Code::kIo, EFBIG, {"write at offset", existing, "File too large"});
    ::_exit(0);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void damage(const std::string& path, off_t offset) {
  const int fd = ::open(path.c_str(), O_RDWR);
  char byte = 0;
  CHECK_EQ(::pread(fd, &byte, 1, offset), ssize_t{1});
  byte = static_cast<char>(byte ^ 1);
  CHECK_EQ(::pwrite(fd, &byte, 1, offset), ssize_t{1});
  ::close(fd);
}

void test_damaged_files_are_refused(const TempDir& folder) {
  const std::string path = folder.file("damaged");
  Memory memory(kSize);
  memory.fill(9);
  const uint32_t crc = memory.crc();
  const auto read = [&] { return run_one(small_blocks(), make_job(path, &memory, 0, crc), false); };
  for (off_t offset : {off_t{0}, off_t{2 * kBlock + 5}, off_t{kSize - 1}}) {
    memory.fill(9);
    check_ok(run_one(small_blocks(), make_job(path, &memory), true));
    check_ok(read());
    damage(path, offset);
    char expected[16], found[16];
    const IoResult result = read();
    std::snprintf(expected, sizeof expected, "0x%08x", crc);
    std::snprintf(found, sizeof found, "0x%08x", result.crc);
    CHECK(result.crc != crc);
    check_error(result, Code::kCorrupt, 0, {path, expected, found});
    check_error(jmo::read_now(make_job(path, &memory, 0, crc), true), Code::kCorrupt, 0, {path, expected});
    jmo::IoJob unchecked = make_job(path, &memory, 0, crc);
    unchecked.check_crc = false;
    check_ok(run_one(small_blocks(), unchecked, false));
  }
  for (size_t length : {kSize - 1, 2 * kBlock, size_t{1}, size_t{0}}) {
    CHECK_EQ(::truncate(path.c_str(), static_cast<off_t>(length)), 0);
    const std::vector<std::string> parts = {path, "offset " + std::to_string(length),
                                            "expected " + std::to_string(kSize),
                                            "found " + std::to_string(length)};
    check_error(read(), Code::kCorrupt, 0, parts);
    check_error(jmo::read_now(make_job(path, &memory), false), Code::kCorrupt, 0, parts);
  }
}

void test_injected_faults(const TempDir& folder) {
  Memory memory(kSize);
  jmo::FaultSpec fault;
  fault.path_prefix = folder.file("fault");
  fault.is_write = true;
  fault.after_count = 2;
  fault.error_number = EIO;
  jmo::inject_fault(fault);
  const auto write = [&](const std::string& name) {
    return run_one(small_blocks(), make_job(folder.file(name), &memory), true);
  };
  check_ok(write("fault0"));
  check_ok(write("other"));
  check_ok(write("fault1"));
  check_error(write("fault2"), Code::kIo, EIO, {"write of", folder.file("fault2"), "offset 0", "errno 5"});
  check_ok(write("fault3"));
  fault.after_count = 0;
  fault.fail_count = -1;
  fault.is_write = false;
  jmo::inject_fault(fault);
  auto job = make_job(folder.file("fault0"), &memory);
  job.check_crc = false;
  for (int i = 0; i < 3; ++i) check_error(run_one(small_blocks(), job, false), Code::kIo, EIO, {job.path});
  check_error(jmo::read_now(job, true), Code::kIo, EIO, {job.path});
  jmo::clear_faults();
  check_ok(run_one(small_blocks(), job, false));
  fault.error_number = 0;
  fault.min_delay_s = fault.max_delay_s = 0.05;
  jmo::inject_fault(fault);
  const IoResult late = run_one(small_blocks(), job, false);
  check_ok(late);
  CHECK(late.end_s - late.start_s >= 0.05);
  jmo::clear_faults();
}

bool direct_works_in(const TempDir& folder) {
  const std::string path = folder.file("probe");
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

}  // namespace
}  // namespace jmo_test

int main(int argc, char** argv) {
  using namespace jmo_test;
  const TempDir folder(test_folder(argc, argv));
  const bool direct_works = direct_works_in(folder);
  test_file_size_limit(folder);  // first: it forks, and no thread is running
  test_interrupted_and_short_calls(folder, direct_works);
  test_refused_direct(folder, direct_works);
  test_errors_are_named(folder);
  test_no_room_for_the_file(folder);
  test_damaged_files_are_refused(folder);
  test_injected_faults(folder);
  return 0;
}
