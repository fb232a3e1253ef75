// Reads ranges of a file, past the page cache where the file system can do that, with checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "direct_io.h"

namespace poplar {

struct EndOfFile : std::runtime_error {
  explicit EndOfFile(std::size_t offset)
      : std::runtime_error("it has no byte " + std::to_string(offset)) {}
};

// For one thread. The buffer keeps what was read last, so that ranges that follow each other are
// read in large pieces.
class DiskReader {
 public:
  // Takes over the descriptor.
  explicit DiskReader(int descriptor);

  // Bytes before this one will be read next, so that they may be read together.
  void expect(std::size_t until) { until_ = until; }

  // Copies bytes from `offset` on to `target`, or nowhere if it is null. Continues `crc`, the
  // checksum of the bytes before. Throws EndOfFile or std::system_error.
  std::uint32_t read(std::size_t offset, std::size_t bytes, void* target, std::uint32_t crc);

  bool is_direct() const { return file_.is_direct(); }

 private:
  void fill(std::size_t offset, std::size_t until);

  DirectFile file_;
  Buffer buffer_;
  std::size_t start_ = 0;  // of the buffer's content in the file
  std::size_t stop_ = 0;
  std::size_t until_ = 0;
};

}  // namespace poplar
