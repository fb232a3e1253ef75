// CRC-32C (Castagnoli), the checksum of checkpoints. x86 and 64-bit ARM compute it in one
// instruction; whether the processor has it is found out when the program runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace poplar {

// Continues `crc`, the checksum of the bytes before; 0 at the start.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc);

// The same without special instructions.
std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc);

}  // namespace poplar
