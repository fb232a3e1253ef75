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

using Tables = std::array<std::array<std::uint32_t, 256>, kWord>;

// tables[k][b]: the effect of byte b followed by k zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    }
    tables[0][byte] = crc;
  }
  for (std::size_t zeros = 1; zeros < kWord; ++zeros) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[zeros - 1][byte];
      tables[zeros][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t word_by_tables(std::uint32_t crc, const unsigned char* bytes) {
  std::uint32_t next = 0;
  for (std::size_t place = 0; place < kWord; ++place) {
    const std::uint32_t before = place < sizeof(crc) ? (crc >> (8 * place)) & 0xFF : 0;
    next ^= kTables[kWord - 1 - place][bytes[place] ^ before];
  }
  return next;
}

std::uint32_t byte_by_tables(std::uint32_t crc, unsigned char byte) {
  return (crc >> 8) ^ kTables[0][(crc ^ byte) & 0xFF];
}

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
  for (; bytes >= kWord; next += kWord, bytes -= kWord) {
    crc = word_by_tables(crc, next);
  }
  for (; bytes > 0; ++next, --bytes) {
    crc = byte_by_tables(crc, *next);
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
