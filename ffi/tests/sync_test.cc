// What is written and made durable outside of a step: write_now and sync_file_system.
// Usage: sync_test [FOLDER]
#include "ffi/tests/io_fixture.h"

namespace jmo_test {
namespace {

using jmo::IoResult;

// Counts syncs; the first one is interrupted, and `error_number` ends the second.
class CountedSyncs : public jmo::SyscallHooks {
 public:
  int syncfs(int fd) override {
    CHECK(::fcntl(fd, F_GETFD) >= 0);
    errno = calls++ == 0 ? EINTR : error_number;
    return errno == 0 ? jmo::SyscallHooks::syncfs(fd) : -1;
  }
  int calls = 0;
  int error_number = 0;
};

void test_what_is_written_is_read_back(const TempDir& folder) {
  for (size_t size : {size_t{0}, size_t{100}, size_t{4096}, size_t{3 << 20}, size_t{(9 << 20) + 77}}) {
    for (size_t misalign : {size_t{0}, size_t{8}}) {
      Memory out(size, misalign), in(size);
      out.fill(size + misalign);
      const IoResult written = jmo::write_now(make_job(folder.file("record"), &out, 7), true);
      check_ok(written);
      CHECK(written.is_write);
      CHECK_EQ(written.token, uint64_t{7});
      CHECK_EQ(written.crc, out.crc());
      CHECK_EQ(size_on_disk(folder.file("record")), size);
      check_ok(jmo::read_now(make_job(folder.file("record"), &in, 0, out.crc()), true));
      CHECK(std::memcmp(in.data(), out.data(), size) == 0);
    }
  }
}

void test_a_write_that_fails(const TempDir& folder) {
  Memory memory(5000);
  const IoResult missing = jmo::write_now(make_job(folder.file("missing/record"), &memory), true);
  CHECK_EQ(missing.status.error_number(), ENOENT);
  check_contains(missing.status.message(), folder.file("missing/record"));
}

void test_syncs(const TempDir& folder) {
  const size_t files = open_files();
  CHECK(jmo::sync_file_system(folder.file("")).ok());
  for (int error_number : {0, ENOSPC}) {
    CountedSyncs hooks;
    hooks.error_number = error_number;
    InstalledHooks installed(&hooks);
    const jmo::Status status = jmo::sync_file_system(folder.file(""));
    CHECK_EQ(hooks.calls, 2);
    CHECK_EQ(status.error_number(), error_number);
    if (error_number != 0) check_contains(status.message(), "sync the file system of " + folder.file(""));
  }
  const jmo::Status missing = jmo::sync_file_system(folder.file("missing"));
  CHECK_EQ(missing.error_number(), ENOENT);
  check_contains(missing.message(), folder.file("missing"));
  CHECK_EQ(open_files(), files);
}

}  // namespace
}  // namespace jmo_test

int main(int argc, char** argv) {
  using namespace jmo_test;
  const TempDir folder(test_folder(argc, argv));
  test_what_is_written_is_read_back(folder);
  test_a_write_that_fails(folder);
  test_syncs(folder);
  return 0;
}
