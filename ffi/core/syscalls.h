// System calls on files and memory: the only place of ffi/core that makes them.
//
// What always holds: EINTR is retried, a short transfer is continued, and every failure is a Status (kIo)
// that says what was being done to which path, at which offset, with the text and the number of errno. No
// call takes a lock.
// Thread contract: a File's transfers may run on many threads at once over disjoint ranges; the rest of it
// on one thread while there are no transfers. Hooks are installed by tests, before the threads that are to
// see them start.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/core/status.h"

namespace jmo {

// What O_DIRECT needs of file offset, length and memory on every file system that we know of.
constexpr size_t kDirectAlign = 4096;
constexpr size_t round_down_direct(size_t bytes) { return bytes / kDirectAlign * kDirectAlign; }

// One method per class of system call, with its return value and errno. The methods here make the real call;
// a test derives from this class and fails, shortens or interrupts those that it wants.
class SyscallHooks {
 public:
  virtual ~SyscallHooks() = default;
  virtual int open(const char* path, int flags, mode_t mode);
  virtual int close(int fd);
  virtual ssize_t pread(int fd, void* memory, size_t size, off_t offset);
  virtual ssize_t pwrite(int fd, const void* memory, size_t size, off_t offset);
  virtual int fstat(int fd, struct stat* info);
  virtual int fstatvfs(int fd, struct statvfs* info);
  virtual int ftruncate(int fd, off_t size);
  virtual int fallocate(int fd, off_t offset, off_t size);
  virtual int set_status_flags(int fd, int flags);
  virtual int syncfs(int fd);
  virtual int lock(int fd, int command, struct flock* range);  // F_OFD_SETLK or F_OFD_GETLK
  virtual void* mmap(size_t size);                             // anonymous, private, readable and writable
  virtual int munmap(void* memory, size_t size);
  virtual int madvise(void* memory, size_t size, int advice);
  virtual int prefer_node(void* memory, size_t size, int node);  // mbind(MPOL_PREFERRED)
};

// Process-wide; null (as in production) for the real calls. The caller keeps the object alive until it is
// replaced.
void install_syscall_hooks(SyscallHooks* hooks);
// The installed hooks or the real calls, never null.
SyscallHooks& syscalls();

// The one helper that makes a Status of an errno: "`what`: TEXT (errno N)".
Status errno_status(const std::string& what, int error_number);

// Makes everything durable that was written to the file system of this folder. Where many files are new that
// is one commit of its journal, and so many times faster than an fsync of each.
Status sync_file_system(const std::string& path);

// An open file, closed at the latest by its destructor.
class File {
 public:
  enum class Access { kRead, kWrite };

  File() = default;
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // kWrite creates the file with mode 0600 where it is missing and leaves an existing one as it is. With
  // `direct` it is opened with O_DIRECT, or without where the file system refuses that.
  Status open(const std::string& path, Access access, bool direct);
  // Reports what a file system says only now (quota, network). No-op on a closed file.
  Status close();

  // Transfers all of [offset, offset + size). Where O_DIRECT is on, memory, offset and size are multiples of
  // kDirectAlign; if it is refused here, the file goes on without it. `*moved` < size with an ok status: end
  // of file.
  Status read(char* memory, size_t size, uint64_t offset, size_t* moved);
  Status write(const char* memory, size_t size, uint64_t offset);

  Status size(uint64_t* size) const;
  // Bytes that the file system still has for this user; -1: unknown, or the file is not open.
  int64_t free_bytes() const;
  Status truncate(uint64_t size);
  // Makes the file `size` bytes long (it is shorter now), with its blocks allocated where the file system can
  // do that. On failure what was taken is given back.
  Status extend(uint64_t size);
  // Goes on without O_DIRECT.
  Status drop_direct();

  bool direct() const { return direct_.load(std::memory_order_acquire); }
  // Whether the file system has refused O_DIRECT (at open or at a transfer).
  bool direct_refused() const { return direct_refused_.load(std::memory_order_acquire); }

 private:
  Status transfer(char* memory, size_t size, uint64_t offset, size_t* moved);
  Status continue_short(size_t start, size_t* moved);
  Status error(const std::string& what, int error_number) const;

  std::string path_;
  int fd_ = -1;
  int flags_ = 0;
  Access access_ = Access::kRead;
  std::atomic<bool> direct_{false};  // false is set after the descriptor's flag is gone
  std::atomic<bool> direct_refused_{false};
};

// A file whose bytes, also those beyond its end, serve as exclusive locks. They belong to this open file
// description, so they exclude other LockFiles of the same process as well as other processes, and the kernel
// frees them when the process ends, however it does. A fork would share the description and keep the locks of
// a parent that dies, so the child's copies are closed in it. No call waits.
class LockFile {
 public:
  LockFile();
  ~LockFile();
  LockFile(const LockFile&) = delete;
  LockFile& operator=(const LockFile&) = delete;

  // Creates the file with mode 0600 where it is missing.
  Status open(const std::string& path);
  // Frees all locks.
  void close();
  // `*locked`: whether this LockFile has the byte now.
  Status try_lock(int64_t byte, bool* locked);
  Status unlock(int64_t byte);
  // A byte of [begin, end) that another LockFile has locked (not always the first), or -1.
  Status find_locked(int64_t begin, int64_t end, int64_t* byte) const;

 private:
  Status error(const std::string& what, int64_t byte, int error_number) const;

  std::string path_;
  int fd_ = -1;
};

}  // namespace jmo
