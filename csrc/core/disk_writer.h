// Writes a file in order, past the page cache where the file system can do that: the caller fills
// one buffer, with checksums, while a thread writes another one.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#include "direct_io.h"

namespace poplar {

// For one thread. Methods throw std::system_error; that of a write may come from a later call.
class DiskWriter {
 public:
  // Takes over the descriptor of a new file.
  explicit DiskWriter(int descriptor);
  ~DiskWriter();
  DiskWriter(const DiskWriter&) = delete;
  DiskWriter& operator=(const DiskWriter&) = delete;

  // Appends bytes, which may change afterwards. Continues `crc`, the checksum of the bytes before.
  std::uint32_t append(const void* data, std::size_t bytes, std::uint32_t crc);

  // Closes the file once its content is on the disk.
  void close();

  // Closes the file without waiting for the disk, except for a write that has begun.
  void abandon();

  bool is_direct() const { return file_.is_direct(); }

 private:
  static constexpr std::size_t kBuffers = 2;

  Buffer& filling() { return buffers_[filled_buffers_ % kBuffers]; }
  void wait_until_written(std::size_t buffers);
  void write_buffers();

  DirectFile file_;
  std::array<Buffer, kBuffers> buffers_;
  std::size_t filled_ = 0;  // bytes of the buffer that is being filled

  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  std::size_t filled_buffers_ = 0;  // ever; the thread reads it, the caller changes it
  std::size_t written_buffers_ = 0;
  bool is_stopped_ = false;
  std::exception_ptr failure_;

  std::thread thread_;
};

}  // namespace poplar
