// CRC32C (Castagnoli), as iSCSI, ext4 and Zarr use it. Thread contract: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jmo {

// CRC of `size` bytes, continuing `seed` (0 to begin). Uses the processor's instruction where there is one.
uint32_t crc32c(const void* data, size_t size, uint32_t seed = 0);
// CRC of A followed by B, from crc(A), crc(B) and the length of B in bytes.
uint32_t crc32c_combine(uint32_t first, uint32_t second, size_t second_size);

}  // namespace jmo
