#include "disk_reader.h"

#include <algorithm>

#include "crc32c.h"

namespace poplar {

DiskReader::DiskReader(int descriptor) : file_(descriptor), buffer_(make_buffer()) {}

std::uint32_t DiskReader::read(std::size_t offset, std::size_t bytes, void* target,
                               std::uint32_t crc) {
  auto* next = static_cast<unsigned char*>(target);
  while (bytes > 0) {
    if (offset < start_ || offset >= stop_) {
      fill(offset, std::max(until_, offset + bytes));
    }
    const std::size_t count = std::min(bytes, stop_ - offset);
    const unsigned char* found = buffer_.get() + (offset - start_);
    if (next == nullptr) {
      crc = crc32c(found, count, crc);
    } else {
      crc = crc32c_copy(next, found, count, crc);
      next += count;
    }
    offset += count;
    bytes -= count;
  }
  return crc;
}

void DiskReader::fill(std::size_t offset, std::size_t until) {
  start_ = offset / kBlock * kBlock;
  stop_ = start_;  // if reading fails, there is no content
  const std::size_t blocks = (until - start_ + kBlock - 1) / kBlock * kBlock;
  const std::size_t count =
      file_.read(buffer_.get(), std::min(blocks, kBufferBytes), static_cast<off_t>(start_));
  stop_ = start_ + count;
  if (offset >= stop_) {
    throw EndOfFile(offset);
  }
}

}  // namespace poplar
