// What the native I/O tests share: a folder that goes away, results gathered from I/O threads, memory of any
// alignment. Thread contract: Results may be used from any thread; the rest belongs to the test's thread.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/core/crc32c.h"
#include "ffi/core/io.h"
#include "ffi/core/syscalls.h"
#include "ffi/tests/check.h"

namespace jmo_test {

// A fresh folder under `parent`, removed with the files in it.
class TempDir {
 public:
  explicit TempDir(const std::string& parent) : path_(parent + "/jmo-test-XXXXXX") {
    CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~TempDir() {
    DIR* folder = ::opendir(path_.c_str());
    while (const dirent* entry = ::readdir(folder)) ::unlink(file(entry->d_name).c_str());
    ::closedir(folder);
    ::rmdir(path_.c_str());
  }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// argv[1], else $TMPDIR, else /tmp: to be on a real file system (tmpfs takes O_DIRECT transfers that others
// refuse).
inline std::string test_folder(int argc, char** argv) {
  if (argc > 1) return argv[1];
  const char* folder = ::getenv("TMPDIR");
  return folder != nullptr ? folder : "/tmp";
}

class Results {
 public:
  jmo::TierIo::Done collector() {
    return [this](const jmo::IoResult& result) {
      std::lock_guard<std::mutex> lock(mutex_);
      in_order_.push_back(result);
      ++times_[result.token];
      changed_.notify_all();
    };
  }
  // The results so far, in the order in which they came, once there are `count` of them.
  std::vector<jmo::IoResult> wait(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(120), [&] { return in_order_.size() >= count; }));
    for (const auto& [token, times] : times_) CHECK_EQ(times, 1);
    CHECK_EQ(in_order_.size(), count);
    return in_order_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<jmo::IoResult> in_order_;
  std::map<uint64_t, int> times_;
};

// `size` bytes that begin `misalign` bytes after a page, with guard bytes behind them that must stay.
class Memory {
 public:
  explicit Memory(size_t size, size_t misalign = 0) : size_(size), misalign_(misalign) {
    const size_t pages = (size + misalign + kGuard) / jmo::kDirectAlign + 1;
    base_.reset(static_cast<char*>(std::aligned_alloc(jmo::kDirectAlign, pages * jmo::kDirectAlign)));
    CHECK(base_ != nullptr);
    std::memset(base_.get(), 0, pages * jmo::kDirectAlign);
    std::memset(data() + size_, 0x5A, kGuard);
  }
  char* data() { return base_.get() + misalign_; }
  size_t size() const { return size_; }
  void fill(uint64_t seed) {
    uint64_t state = seed * 2 + 1;
    for (size_t i = 0; i < size_; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      data()[i] = static_cast<char>(state >> 56);
    }
  }
  bool guard_intact() {
    for (size_t i = 0; i < kGuard; ++i)
      if (data()[size_ + i] != 0x5A) return false;
    return true;
  }
  uint32_t crc() { return jmo::crc32c(data(), size_); }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  static constexpr size_t kGuard = 64;
  const size_t size_;
  const size_t misalign_;
  std::unique_ptr<char, Free> base_;
};

inline jmo::IoJob make_job(const std::string& path, Memory* memory, uint64_t token = 0,
                           uint32_t expected = 0) {
  jmo::IoJob job;
  job.path = path;
  job.memory = memory->data();
  job.size = memory->size();
  job.token = token;
  job.expected_crc = expected;
  return job;
}

inline jmo::IoResult run_one(const jmo::TierOptions& options, const jmo::IoJob& job, bool is_write) {
  Results results;
  jmo::TierIo tier(options, results.collector());
  is_write ? tier.write(job) : tier.read(job);
  const jmo::IoResult result = results.wait(1).at(0);
  CHECK_EQ(result.token, job.token);
  CHECK_EQ(result.is_write, is_write);
  CHECK_EQ(result.size, job.size);
  CHECK(result.end_s >= result.start_s && result.start_s > 0);
  return result;
}

inline void check_ok(const jmo::IoResult& result) {
  if (!result.status.ok()) fail(__FILE__, __LINE__, result.status.message());
}

inline void check_contains(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) fail(__FILE__, __LINE__, "'" + text + "' lacks '" + part + "'");
}

inline uint64_t size_on_disk(const std::string& path) {
  struct stat info;
  CHECK_EQ(::stat(path.c_str(), &info), 0);
  return static_cast<uint64_t>(info.st_size);
}

inline std::string read_plain(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY);
  CHECK(fd >= 0);
  std::string bytes(size_on_disk(path), '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = ::read(fd, bytes.data() + done, bytes.size() - done);
    CHECK(count > 0);
    done += static_cast<size_t>(count);
  }
  ::close(fd);
  return bytes;
}

inline size_t open_files() {
  size_t count = 0;
  DIR* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

// Hooks for the length of a scope. No I/O thread may be running at its ends.
class InstalledHooks {
 public:
  explicit InstalledHooks(jmo::SyscallHooks* hooks) { jmo::install_syscall_hooks(hooks); }
  ~InstalledHooks() { jmo::install_syscall_hooks(nullptr); }
};

}  // namespace jmo_test
