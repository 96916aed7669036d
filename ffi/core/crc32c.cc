// CRC32C by the processor's instruction (x86-64 SSE4.2, ARMv8), else by tables, eight bytes at a time.
//
// 1. A "raw" CRC is the shift register itself; the public functions invert it before and after, as the
// standard says.
// 2. The instruction takes three cycles and one can start in each, so three strips are taken at once and
// joined:
//    raw(A B) = raw(A) * x^(8 |B|) + raw(B) over GF(2) modulo the polynomial. For the fixed length of a strip
//    that product is four table look-ups.
// What always holds: hardware and tables give the same CRC for every length and alignment.
// Thread contract: pure functions; the tables are built once, before main() or on first use, and never
// change.
#include "ffi/core/crc32c.h"

#include <array>
#include <cstring>

#include "ffi/core/crc32c_internal.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define JMO_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define JMO_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace jmo {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as the stream orders them");

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected: bit 31 is x^0
constexpr size_t kStrip = 4096;               // bytes of each of the three strips

// a * b modulo the polynomial, both reflected.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// x^(8 * bytes) modulo the polynomial.
constexpr uint32_t power_of_bytes(size_t bytes) {
  uint32_t result = 1u << 31;        // x^0
  uint32_t square = 1u << (31 - 8);  // x^8
  for (; bytes != 0; bytes >>= 1) {
    if (bytes & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

using ByteTables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: the raw CRC of byte b followed by k zero bytes.
constexpr ByteTables make_byte_tables() {
  ByteTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xFF];
    }
  }
  return tables;
}
constexpr ByteTables kTables = make_byte_tables();

uint64_t load64(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

uint32_t raw_table(uint32_t crc, const unsigned char* at, size_t size) {
  for (; size >= 8; at += 8, size -= 8) {
    const uint64_t word = load64(at) ^ crc;
    crc = kTables[7][word & 0xFF] ^ kTables[6][(word >> 8) & 0xFF] ^ kTables[5][(word >> 16) & 0xFF] ^
          kTables[4][(word >> 24) & 0xFF] ^ kTables[3][(word >> 32) & 0xFF] ^
          kTables[2][(word >> 40) & 0xFF] ^ kTables[1][(word >> 48) & 0xFF] ^ kTables[0][word >> 56];
  }
  for (; size > 0; ++at, --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xFF];
  return crc;
}

#ifdef JMO_CRC_TARGET

using StripTables = std::array<std::array<uint32_t, 256>, 4>;

// The product of a raw CRC with x^(8 kStrip), a byte of the CRC at a time.
StripTables make_strip_tables() {
  StripTables tables{};
  const uint32_t power = power_of_bytes(kStrip);
  for (size_t k = 0; k < 4; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) tables[k][byte] = multiply(byte << (8 * k), power);
  }
  return tables;
}

uint32_t shift_strip(const StripTables& tables, uint32_t crc) {
  return tables[0][crc & 0xFF] ^ tables[1][(crc >> 8) & 0xFF] ^ tables[2][(crc >> 16) & 0xFF] ^
         tables[3][crc >> 24];
}

#if defined(__x86_64__)
JMO_CRC_TARGET inline uint64_t step64(uint64_t crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
JMO_CRC_TARGET inline uint32_t step8(uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }
bool detect_hardware() { return __builtin_cpu_supports("sse4.2"); }
#else
JMO_CRC_TARGET inline uint64_t step64(uint64_t crc, uint64_t word) {
  return __crc32cd(static_cast<uint32_t>(crc), word);
}
JMO_CRC_TARGET inline uint32_t step8(uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
bool detect_hardware() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

JMO_CRC_TARGET uint32_t raw_hardware(uint32_t crc, const unsigned char* at, size_t size) {
  static const StripTables tables = make_strip_tables();
  uint64_t first = crc;
  for (; size >= 3 * kStrip; at += 3 * kStrip, size -= 3 * kStrip) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kStrip; i += 8) {
      first = step64(first, load64(at + i));
      second = step64(second, load64(at + kStrip + i));
      third = step64(third, load64(at + 2 * kStrip + i));
    }
    first = shift_strip(tables, static_cast<uint32_t>(first)) ^ second;
    first = shift_strip(tables, static_cast<uint32_t>(first)) ^ third;
  }
  for (; size >= 8; at += 8, size -= 8) first = step64(first, load64(at));
  crc = static_cast<uint32_t>(first);
  for (; size > 0; ++at, --size) crc = step8(crc, *at);
  return crc;
}

#else
bool detect_hardware() { return false; }
uint32_t raw_hardware(uint32_t crc, const unsigned char* at, size_t size) { return raw_table(crc, at, size); }
#endif

}  // namespace

namespace internal {

uint32_t crc32c_table(const void* data, size_t size, uint32_t seed) {
  return ~raw_table(~seed, static_cast<const unsigned char*>(data), size);
}

bool crc32c_has_hardware() {
  static const bool has = detect_hardware();
  return has;
}

}  // namespace internal

uint32_t crc32c(const void* data, size_t size, uint32_t seed) {
  if (!internal::crc32c_has_hardware()) return internal::crc32c_table(data, size, seed);
  return ~raw_hardware(~seed, static_cast<const unsigned char*>(data), size);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, size_t second_size) {
  // The inversions cancel: the one that begins B and the one that ends A are the same 32 ones, shifted alike.
  return multiply(first, power_of_bytes(second_size)) ^ second;
}

}  // namespace jmo
