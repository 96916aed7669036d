// See syscalls.h. Thread contract: as stated there; the state of the process here is the hooks pointer and
// the list of lock files, which has a mutex of its own.
#include "ffi/core/syscalls.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>

namespace jmo {
namespace {

std::atomic<SyscallHooks*> installed_hooks{nullptr};

template <typename Call>
auto retry_interrupted(Call call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

bool refuses_direct(int error_number) { return error_number == EINVAL || error_number == EOPNOTSUPP; }

std::string at(uint64_t offset, size_t size) {
  return " at offset " + std::to_string(offset) + " (" + std::to_string(size) + " bytes)";
}

}  // namespace

int SyscallHooks::open(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
int SyscallHooks::close(int fd) { return ::close(fd); }
ssize_t SyscallHooks::pread(int fd, void* memory, size_t size, off_t offset) {
  return ::pread(fd, memory, size, offset);
}
ssize_t SyscallHooks::pwrite(int fd, const void* memory, size_t size, off_t offset) {
  return ::pwrite(fd, memory, size, offset);
}
int SyscallHooks::fstat(int fd, struct stat* info) { return ::fstat(fd, info); }
int SyscallHooks::fstatvfs(int fd, struct statvfs* info) { return ::fstatvfs(fd, info); }
int SyscallHooks::ftruncate(int fd, off_t size) { return ::ftruncate(fd, size); }
int SyscallHooks::fallocate(int fd, off_t offset, off_t size) { return ::fallocate(fd, 0, offset, size); }
int SyscallHooks::set_status_flags(int fd, int flags) { return ::fcntl(fd, F_SETFL, flags); }
int SyscallHooks::syncfs(int fd) { return ::syncfs(fd); }
int SyscallHooks::lock(int fd, int command, struct flock* range) { return ::fcntl(fd, command, range); }
void* SyscallHooks::mmap(size_t size) {
  return ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}
int SyscallHooks::munmap(void* memory, size_t size) { return ::munmap(memory, size); }
int SyscallHooks::madvise(void* memory, size_t size, int advice) { return ::madvise(memory, size, advice); }
int SyscallHooks::prefer_node(void* memory, size_t size, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED; libnuma is not everywhere
  constexpr size_t kBits = 8 * sizeof(unsigned long), kNodes = 1024;
  if (node < 0 || static_cast<size_t>(node) >= kNodes) {
    errno = EINVAL;
    return -1;
  }
  unsigned long nodes[kNodes / kBits] = {};
  nodes[node / kBits] = 1ul << (node % kBits);
  return static_cast<int>(::syscall(SYS_mbind, memory, size, kPreferred, nodes, kNodes + 1, 0));
}

void install_syscall_hooks(SyscallHooks* hooks) { installed_hooks.store(hooks, std::memory_order_release); }

SyscallHooks& syscalls() {
  static SyscallHooks real;
  SyscallHooks* hooks = installed_hooks.load(std::memory_order_acquire);
  return hooks != nullptr ? *hooks : real;
}

Status errno_status(const std::string& what, int error_number) {
  char buffer[128];
  const char* text =
      ::strerror_r(error_number, buffer, sizeof buffer);  // the GNU one: thread-safe, returns the text
  return Status(Code::kIo, what + ": " + text + " (errno " + std::to_string(error_number) + ")",
                error_number);
}

Status sync_file_system(const std::string& path) {
  const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
  const int fd = retry_interrupted([&] { return syscalls().open(path.c_str(), flags, 0); });
  if (fd < 0) return errno_status("open " + path, errno);
  const bool done = retry_interrupted([&] { return syscalls().syncfs(fd); }) == 0;
  const int error_number = errno;
  (void)syscalls().close(fd);  // nothing was written through it
  return done ? Status() : errno_status("sync the file system of " + path, error_number);
}

File::~File() { (void)close(); }

Status File::error(const std::string& what, int error_number) const {
  return errno_status(what + " " + path_, error_number);
}

Status File::open(const std::string& path, Access access, bool direct) {
  path_ = path;
  access_ = access;
  flags_ = O_CLOEXEC | (access == Access::kWrite ? O_WRONLY | O_CREAT : O_RDONLY);
  const auto attempt = [&](int extra) {
    return retry_interrupted([&] { return syscalls().open(path.c_str(), flags_ | extra, 0600); });
  };
  if (direct) {
    fd_ = attempt(O_DIRECT);
    if (fd_ >= 0) {
      direct_.store(true, std::memory_order_release);
      return Status();
    }
    if (!refuses_direct(errno)) return error("open", errno);
  }
  fd_ = attempt(0);
  if (fd_ < 0) return error("open", errno);
  if (direct) direct_refused_.store(true, std::memory_order_release);
  return Status();
}

Status File::close() {
  if (fd_ < 0) return Status();
  const int fd = fd_;
  fd_ = -1;
  // Linux has released the descriptor even if the call was interrupted; a retry might close someone else's.
  if (syscalls().close(fd) != 0 && errno != EINTR) return error("close", errno);
  return Status();
}

Status File::read(char* memory, size_t size, uint64_t offset, size_t* moved) {
  return transfer(memory, size, offset, moved);
}

Status File::write(const char* memory, size_t size, uint64_t offset) {
  size_t moved = 0;
  return transfer(const_cast<char*>(memory), size, offset, &moved);  // only read from: access_ is kWrite
}

Status File::transfer(char* memory, size_t size, uint64_t offset, size_t* moved) {
  const bool is_write = access_ == Access::kWrite;
  const std::string what = is_write ? "write" : "read";
  *moved = 0;
  while (*moved < size) {
    const size_t start = *moved;
    const bool was_direct = direct();
    const ssize_t count = retry_interrupted([&] {
      const off_t position = static_cast<off_t>(offset + start);
      return is_write ? syscalls().pwrite(fd_, memory + start, size - start, position)
                      : syscalls().pread(fd_, memory + start, size - start, position);
    });
    if (count < 0 && was_direct && refuses_direct(errno)) {
      if (Status status = drop_direct(); !status.ok()) return status;
      direct_refused_.store(true, std::memory_order_release);
      continue;
    }
    if (count == 0 && !is_write) return Status();
    // Linux never writes nothing without an error; a loop over it would hang.
    if (count <= 0) return error(what + at(offset + start, size - start) + " of", count < 0 ? errno : EIO);
    *moved += static_cast<size_t>(count);
    if (*moved < size && was_direct) {
      if (Status status = continue_short(start, moved); !status.ok()) return status;
    }
  }
  return Status();
}

// A short O_DIRECT transfer from `start` is taken up again at the last whole page. Where not even one page
// was moved (the end of a file; a file system that stops in mid-page), O_DIRECT cannot go on and the rest
// goes without it.
Status File::continue_short(size_t start, size_t* moved) {
  const size_t whole = round_down_direct(*moved);
  if (whole <= start && *moved != whole) return drop_direct();
  *moved = whole;
  return Status();
}

Status File::size(uint64_t* size) const {
  struct stat info;
  if (retry_interrupted([&] { return syscalls().fstat(fd_, &info); }) != 0) return error("stat of", errno);
  *size = static_cast<uint64_t>(info.st_size);
  return Status();
}

int64_t File::free_bytes() const {
  struct statvfs info;
  if (fd_ < 0 || retry_interrupted([&] { return syscalls().fstatvfs(fd_, &info); }) != 0) return -1;
  if (info.f_blocks == 0) return -1;  // one that does not count its space
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

Status File::truncate(uint64_t size) {
  const auto call = [&] { return syscalls().ftruncate(fd_, static_cast<off_t>(size)); };
  if (retry_interrupted(call) != 0) return error("truncate to " + std::to_string(size) + " bytes of", errno);
  return Status();
}

Status File::extend(uint64_t size) {
  uint64_t old_size = 0;
  if (Status status = this->size(&old_size); !status.ok()) return status;
  const auto call = [&] { return syscalls().fallocate(fd_, 0, static_cast<off_t>(size)); };
  if (retry_interrupted(call) == 0) return Status();
  const int error_number = errno;
  if (error_number == EOPNOTSUPP || error_number == ENOSYS) return truncate(size);
  (void)truncate(old_size);  // the error worth reporting is the first
  return error("allocate" + at(0, size) + " of", error_number);
}

Status File::drop_direct() {
  // Transfers that other threads have under way keep the mode that they began with.
  if (retry_interrupted([&] { return syscalls().set_status_flags(fd_, flags_ & ~O_DIRECT); }) != 0)
    return error("clear O_DIRECT of", errno);
  direct_.store(false, std::memory_order_release);
  return Status();
}

namespace {

struct OpenLockFiles {
  std::mutex mutex;
  std::set<int*> descriptors;
};

// Never destroyed: a LockFile may outlive the statics of this file.
OpenLockFiles& open_lock_files() {
  static auto* files = [] {
    auto* made = new OpenLockFiles;
    (void)::pthread_atfork([] { open_lock_files().mutex.lock(); }, [] { open_lock_files().mutex.unlock(); },
                           [] {
                             for (int* fd : open_lock_files().descriptors) {
                               if (*fd >= 0) (void)::close(*fd);
                               *fd = -1;
                             }
                             open_lock_files().mutex.unlock();
                           });
    return made;
  }();
  return *files;
}

struct flock range_of(int64_t begin, int64_t end, short type) {
  struct flock range = {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = begin;
  range.l_len = end - begin;
  return range;
}

}  // namespace

LockFile::LockFile() {
  std::lock_guard<std::mutex> lock(open_lock_files().mutex);
  open_lock_files().descriptors.insert(&fd_);
}

LockFile::~LockFile() {
  close();
  std::lock_guard<std::mutex> lock(open_lock_files().mutex);
  open_lock_files().descriptors.erase(&fd_);
}

Status LockFile::error(const std::string& what, int64_t byte, int error_number) const {
  return errno_status(what + " byte " + std::to_string(byte) + " of " + path_, error_number);
}

Status LockFile::open(const std::string& path) {
  path_ = path;
  std::lock_guard<std::mutex> lock(open_lock_files().mutex);  // no fork between the call and the assignment
  fd_ = retry_interrupted([&] { return syscalls().open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600); });
  return fd_ < 0 ? errno_status("open " + path, errno) : Status();
}

void LockFile::close() {
  std::lock_guard<std::mutex> lock(open_lock_files().mutex);
  if (fd_ >= 0) (void)syscalls().close(fd_);  // nothing was written to it that could still fail
  fd_ = -1;
}

Status LockFile::try_lock(int64_t byte, bool* locked) {
  struct flock range = range_of(byte, byte + 1, F_WRLCK);
  *locked = retry_interrupted([&] { return syscalls().lock(fd_, F_OFD_SETLK, &range); }) == 0;
  if (*locked || errno == EAGAIN || errno == EACCES) return Status();
  return error("lock", byte, errno);
}

Status LockFile::unlock(int64_t byte) {
  struct flock range = range_of(byte, byte + 1, F_UNLCK);
  if (retry_interrupted([&] { return syscalls().lock(fd_, F_OFD_SETLK, &range); }) == 0) return Status();
  return error("unlock", byte, errno);
}

Status LockFile::find_locked(int64_t begin, int64_t end, int64_t* byte) const {
  *byte = -1;
  if (begin >= end) return Status();  // to the kernel, a length of 0 means up to the end
  struct flock range = range_of(begin, end, F_WRLCK);
  if (retry_interrupted([&] { return syscalls().lock(fd_, F_OFD_GETLK, &range); }) != 0)
    return error("look for locks from", begin, errno);
  if (range.l_type != F_UNLCK) *byte = range.l_start;
  return Status();
}

}  // namespace jmo
