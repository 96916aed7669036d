// The parts of crc32c.cc that its test compares with each other. Thread contract: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jmo::internal {

// As crc32c(), by tables alone: what runs on a processor without the instruction.
uint32_t crc32c_table(const void* data, size_t size, uint32_t seed);
// Whether crc32c() uses the processor's instruction here.
bool crc32c_has_hardware();

}  // namespace jmo::internal
