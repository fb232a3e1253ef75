#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace poplar {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected
constexpr std::size_t kWord = sizeof(std::uint64_t);

// The effect of each byte.
constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    }
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(const unsigned char* bytes,
                                                               std::size_t count,
                                                               std::uint32_t crc) {
  std::uint64_t wide = crc;
  for (; count >= kWord; bytes += kWord, count -= kWord) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, kWord);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<std::uint32_t>(wide);
  for (; count > 0; ++bytes, --count) {
    crc = _mm_crc32_u8(crc, *bytes);
  }
  return crc;
}

bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && (defined(__linux__) || defined(__ARM_FEATURE_CRC32))
// As assembly, because the intrinsics need a compiler that targets the CRC extension.
std::uint32_t by_instruction(const unsigned char* bytes, std::size_t count, std::uint32_t crc) {
  for (; count >= kWord; bytes += kWord, count -= kWord) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, kWord);
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  }
  for (; count > 0; ++bytes, --count) {
    const std::uint32_t byte = *bytes;
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte));
  }
  return crc;
}

#if defined(__ARM_FEATURE_CRC32)
bool has_instruction() { return true; }
#else
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif
#else
std::uint32_t by_instruction(const unsigned char*, std::size_t, std::uint32_t crc) { return crc; }

bool has_instruction() { return false; }
#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc) {
  const auto* next = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; bytes > 0; ++next, --bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ *next) & 0xFF];
  }
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc) {
  static const bool one_instruction = has_instruction();
  if (!one_instruction) {
    return crc32c_portable(data, bytes, crc);
  }
  return ~by_instruction(static_cast<const unsigned char*>(data), bytes, ~crc);
}

}  // namespace poplar
