// CRC32C: known vectors, hardware against tables against bits, every alignment and length around the strips,
// combine.
#include <cstdint>
#include <vector>

#include "ffi/core/crc32c.h"
#include "ffi/core/crc32c_internal.h"
#include "ffi/tests/check.h"

namespace {

using jmo::crc32c;
using jmo::crc32c_combine;
using jmo::internal::crc32c_table;

// The definition, a bit at a time.
uint32_t by_bits(const unsigned char* at, size_t size) {
  uint32_t crc = 0xFFFFFFFF;
  for (size_t i = 0; i < size; ++i) {
    crc ^= at[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

std::vector<unsigned char> noise(size_t size) {
  std::vector<unsigned char> bytes(size);
  uint64_t state = 88172645463325252u;
  for (auto& byte : bytes) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    byte = static_cast<unsigned char>(state >> 32);
  }
  return bytes;
}

// RFC 3720, B.4, and the usual check value.
void test_known_vectors() {
  CHECK_EQ(crc32c("", 0), 0u);
  CHECK_EQ(crc32c(nullptr, 0, 17u), 17u);
  CHECK_EQ(crc32c("123456789", 9), 0xE3069283u);
  std::vector<unsigned char> bytes(32, 0);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x8A9136AAu);
  bytes.assign(32, 0xFF);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x62A8AB43u);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(i);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x46DD794Eu);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(31 - i);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x113FDB5Cu);
}

void test_alignments_and_lengths() {
  const std::vector<unsigned char> bytes = noise(64 + 4 * 3 * 4096);
  std::vector<size_t> sizes;
  for (size_t size = 0; size < 80; ++size) sizes.push_back(size);
  for (size_t strip : {4096u, 3u * 4096u, 2u * 3u * 4096u, 3u * 3u * 4096u}) {
    for (size_t size = strip - 9; size <= strip + 9; size += 3) sizes.push_back(size);
  }
  for (size_t offset = 0; offset < 17; ++offset) {
    for (size_t size : sizes) {
      const uint32_t expected = crc32c_table(bytes.data() + offset, size, 0);
      CHECK_EQ(crc32c(bytes.data() + offset, size), expected);
      if (offset == 3) CHECK_EQ(by_bits(bytes.data() + offset, size), expected);
    }
  }
}

void test_seed_and_combine() {
  const std::vector<unsigned char> bytes = noise(100000);
  const uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (size_t cut :
       {size_t{0}, size_t{1}, size_t{7}, size_t{4096}, size_t{50001}, size_t{99999}, size_t{100000}}) {
    const uint32_t first = crc32c(bytes.data(), cut);
    CHECK_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, first), whole);
    CHECK_EQ(crc32c_table(bytes.data() + cut, bytes.size() - cut, first), whole);
    const uint32_t second = crc32c(bytes.data() + cut, bytes.size() - cut);
    CHECK_EQ(crc32c_combine(first, second, bytes.size() - cut), whole);
  }
}

}  // namespace

int main() {
  test_known_vectors();
  test_alignments_and_lengths();
  test_seed_and_combine();
  std::printf("crc_test: ok (hardware: %s)\n", jmo::internal::crc32c_has_hardware() ? "yes" : "no");
  return 0;
}
