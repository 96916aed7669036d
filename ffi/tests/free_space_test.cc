// What a transfer reports of the space that is left on its file system: exactly, on a small tmpfs of our own.
// Usage: free_space_test [FOLDER]
#include <sched.h>
#include <sys/mount.h>

#include <cerrno>

#include "ffi/tests/io_fixture.h"
#include "ffi/tests/turn_fixture.h"

namespace jmo_test {
namespace {

using jmo::IoResult;
using jmo::TierOptions;

constexpr int64_t kMiB = 1 << 20;

// A file system of 1000 fragments of 512 bytes, 300 of them for this user; or one that does not say.
class OtherSpace : public jmo::SyscallHooks {
 public:
  int fstatvfs(int fd, struct statvfs* info) override {
    CHECK(::fcntl(fd, F_GETFD) >= 0);
    if (calls.fetch_add(1) % 2 == 0) {
      errno = EINTR;
      return -1;
    }
    *info = {};
    info->f_bsize = 4096;
    info->f_frsize = 512;
    info->f_blocks = 1000;
    info->f_bfree = 400;
    info->f_bavail = 300;
    errno = EIO;
    return unknown ? -1 : 0;
  }
  std::atomic<int> calls{0};
  bool unknown = false;
};

void test_what_is_counted(const TempDir& folder) {
  OtherSpace hooks;
  InstalledHooks installed(&hooks);
  Memory memory(10000);
  const jmo::IoJob job = make_job(folder.file("record"), &memory, 0, memory.crc());
  for (bool unknown : {false, true}) {
    hooks.unknown = unknown;
    const int64_t expected = unknown ? -1 : 300 * 512;
    for (bool is_write : {true, false}) {
      const IoResult result = run_one(TierOptions(), job, is_write);
      check_ok(result);
      CHECK_EQ(result.free_bytes, expected);
    }
    CHECK_EQ(jmo::read_now(job, true).free_bytes, expected);
  }
  const IoResult missing = run_one(TierOptions(), make_job(folder.file("missing"), &memory), false);
  CHECK_EQ(missing.status.error_number(), ENOENT);
  CHECK_EQ(missing.free_bytes, int64_t{-1});
}

void check_real_space(const std::string& folder) {
  Memory small(3 * kMiB), large(16 * kMiB);
  const jmo::IoJob job = make_job(folder + "/record", &small, 0, small.crc());
  const IoResult written = run_one(TierOptions(), job, true);
  check_ok(written);
  CHECK_EQ(written.free_bytes, 5 * kMiB);
  CHECK_EQ(run_one(TierOptions(), job, false).free_bytes, 5 * kMiB);
  const IoResult full = run_one(TierOptions(), make_job(folder + "/large", &large), true);
  CHECK_EQ(full.status.error_number(), ENOSPC);
  CHECK_EQ(full.free_bytes, 5 * kMiB);  // a failed transfer says so as well, and has given back what it took
}

bool write_text(const std::string& path, const std::string& text) {
  const int fd = ::open(path.c_str(), O_WRONLY);
  const bool written = fd >= 0 && ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  ::close(fd);
  return written;
}

// In user and mount namespaces of this process's own, where it is root. False: that is not allowed here.
bool mount_tmpfs(const std::string& path) {
  const std::string user = "0 " + std::to_string(::getuid()) + " 1",
                    group = "0 " + std::to_string(::getgid()) + " 1";
  return ::mkdir(path.c_str(), 0700) == 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 &&
         write_text("/proc/self/setgroups", "deny") && write_text("/proc/self/uid_map", user) &&
         write_text("/proc/self/gid_map", group) && ::mount("none", path.c_str(), "tmpfs", 0, "size=8m") == 0;
}

// In a child, with which the file system ends.
void test_real_space(const TempDir& folder) {
  check_exited(run_in_child([&] {
    if (mount_tmpfs(folder.file("tmpfs"))) {
      check_real_space(folder.file("tmpfs"));
    } else {
      std::fprintf(stderr, "free_space_test: no tmpfs can be mounted here (errno %d); left out\n", errno);
    }
  }));
  (void)::rmdir(folder.file("tmpfs").c_str());
}

}  // namespace
}  // namespace jmo_test

int main(int argc, char** argv) {
  using namespace jmo_test;
  const TempDir folder(test_folder(argc, argv));
  test_real_space(folder);
  test_what_is_counted(folder);
  return 0;
}
