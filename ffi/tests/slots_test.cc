// The slot arena: alignment, content, no slots at all, and failures to map that name the bytes.
#include "ffi/core/slots.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <vector>

#include "ffi/tests/io_fixture.h"

namespace jmo_test {
namespace {

using jmo::Code;
using jmo::Slots;

// Fails the calls that it is told to; counts mapped bytes, which must come back to zero.
class MemoryHooks : public jmo::SyscallHooks {
 public:
  void* mmap(size_t size) override {
    if (mmap_error != 0) {
      errno = mmap_error;
      return MAP_FAILED;
    }
    mapped += size;
    return SyscallHooks::mmap(size);
  }
  int munmap(void* memory, size_t size) override {
    mapped -= size;
    return SyscallHooks::munmap(memory, size);
  }
  int madvise(void* memory, size_t size, int advice) override {
    if (interruptions > 0) {
      --interruptions;
      errno = EINTR;
      return -1;
    }
    if (madvise_error != 0) {
      errno = madvise_error;
      return -1;
    }
    return SyscallHooks::madvise(memory, size, advice);
  }

  int prefer_node(void* memory, size_t size, int node) override {
    nodes.push_back(node);
    if (node_error == 0) return SyscallHooks::prefer_node(memory, size, node);
    errno = node_error;
    return -1;
  }

  std::vector<int> nodes;
  int node_error = 0;
  int mmap_error = 0;
  int madvise_error = 0;
  int interruptions = 0;
  size_t mapped = 0;
};

void use_slots(const Slots& slots) {
  for (size_t i = 0; i < slots.count(); ++i) {
    CHECK_EQ(reinterpret_cast<uintptr_t>(slots.slot(i)) % 4096, uintptr_t{0});
    for (size_t byte = 0; byte < slots.slot_size(); byte += 4096) CHECK_EQ(slots.slot(i)[byte], 0);
    std::memset(slots.slot(i), static_cast<int>(i + 1), slots.slot_size());
  }
  for (size_t i = 0; i < slots.count(); ++i) {
    CHECK_EQ(slots.slot(i)[0], static_cast<char>(i + 1));
    CHECK_EQ(slots.slot(i)[slots.slot_size() - 1], static_cast<char>(i + 1));
  }
}

void test_slots_are_disjoint_and_aligned() {
  for (int threads : {0, 1, 2, 7}) {
    for (size_t slot_size : {size_t{4096}, size_t{12288}, size_t{3} << 20}) {
      const Slots slots(5, slot_size, threads);
      CHECK(slots.status().ok());
      CHECK_EQ(slots.count(), size_t{5});
      CHECK_EQ(slots.slot_size(), slot_size);
      CHECK_EQ(slots.slot(4) - slots.slot(0), static_cast<ptrdiff_t>(4 * slot_size));
      CHECK(slots.slot(5) == nullptr);
      use_slots(slots);
    }
  }
}

void test_all_pages_are_there() {
  const Slots slots(3, 1u << 20, 2);
  std::vector<unsigned char> resident(3 * (1u << 20) / 4096);
  CHECK_EQ(::mincore(slots.slot(0), 3u << 20, resident.data()), 0);
  for (unsigned char page : resident) CHECK_EQ(page & 1, 1);
}

void test_no_slots() {
  const Slots slots(0, 4096, 2);
  CHECK(slots.status().ok());
  CHECK_EQ(slots.count(), size_t{0});
  CHECK(slots.slot(0) == nullptr);
  CHECK(Slots(0, 0, 0).status().ok());
}

void test_bad_sizes() {
  for (size_t slot_size : {size_t{0}, size_t{1}, size_t{4097}}) {
    const Slots slots(2, slot_size, 1);
    CHECK_EQ(slots.status().code(), Code::kInvalid);
    CHECK_EQ(slots.count(), size_t{0});
    check_contains(slots.status().message(), "2 slots of " + std::to_string(slot_size) + " bytes");
  }
  CHECK_EQ(Slots(SIZE_MAX / 4096, 4096, 1).status().code(), Code::kInvalid);
  CHECK_EQ(Slots(SIZE_MAX / 2, 1u << 20, 1).status().code(), Code::kInvalid);
}

void test_failure_names_the_bytes() {
  const Slots huge(size_t{1} << 20, size_t{1} << 40, 2);  // 2^60: more than any machine maps
  CHECK_EQ(huge.status().code(), Code::kIo);
  CHECK_EQ(huge.status().error_number(), ENOMEM);
  CHECK_EQ(huge.count(), size_t{0});
  CHECK(huge.slot(0) == nullptr);
  check_contains(huge.status().message(), std::to_string(size_t{1} << 60));

  MemoryHooks hooks;
  const InstalledHooks installed(&hooks);
  hooks.mmap_error = EPERM;
  CHECK_EQ(Slots(2, 4096, 1).status().error_number(), EPERM);
  hooks.mmap_error = 0;
  hooks.madvise_error = ENOMEM;  // mapped, but there are no pages
  const Slots unpopulated(2, 8u << 20, 2);
  CHECK_EQ(unpopulated.status().error_number(), ENOMEM);
  check_contains(unpopulated.status().message(), "16777216 bytes");
  CHECK_EQ(hooks.mapped, size_t{0});
}

void test_kernels_without_populate() {
  MemoryHooks hooks;
  const InstalledHooks installed(&hooks);
  {
    hooks.madvise_error = EINVAL;
    const Slots slots(4, 3u << 20, 2);
    CHECK(slots.status().ok());
    use_slots(slots);
  }
  hooks.madvise_error = 0;
  hooks.interruptions = 5;
  CHECK(Slots(4, 4096, 1).status().ok());
  CHECK_EQ(hooks.interruptions, 0);
  CHECK_EQ(hooks.mapped, size_t{0});
}

// Node 0 is on every machine, and its pages are those that were asked for. Where the system refuses, any do.
void test_node() {
  MemoryHooks hooks;
  jmo::install_syscall_hooks(&hooks);
  {
    const Slots anywhere(2, 4096, 1);
    CHECK_EQ(hooks.nodes.size(), size_t{0});
    const Slots near(2, 4096, 1, 0);
    CHECK(near.status().ok());
    use_slots(near);
    CHECK_EQ(hooks.nodes.size(), size_t{1});
    CHECK_EQ(hooks.prefer_node(near.slot(0), 4096, 0), 0);
    CHECK_EQ(hooks.prefer_node(near.slot(0), 4096, 1024), -1);
    CHECK_EQ(errno, EINVAL);
    hooks.node_error = ENOSYS;
    const Slots refused(2, 4096, 1, 3);
    CHECK(refused.status().ok());
    CHECK_EQ(hooks.nodes.back(), 3);
    use_slots(refused);
  }
  CHECK_EQ(hooks.mapped, size_t{0});
  jmo::install_syscall_hooks(nullptr);
}

}  // namespace
}  // namespace jmo_test

int main() {
  jmo_test::test_slots_are_disjoint_and_aligned();
  jmo_test::test_all_pages_are_there();
  jmo_test::test_no_slots();
  jmo_test::test_bad_sizes();
  jmo_test::test_failure_names_the_bytes();
  jmo_test::test_kernels_without_populate();
  jmo_test::test_node();
  return 0;
}
