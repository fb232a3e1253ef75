#include "disk_writer.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "crc32c.h"

namespace poplar {

DiskWriter::DiskWriter(int descriptor) : file_(descriptor) {
  for (Buffer& buffer : buffers_) {
    buffer = make_buffer();
  }
  thread_ = std::thread(&DiskWriter::write_buffers, this);
}

DiskWriter::~DiskWriter() { abandon(); }

std::uint32_t DiskWriter::append(const void* data, std::size_t bytes, std::uint32_t crc) {
  if (!thread_.joinable()) {
    throw std::system_error(EBADF, std::generic_category());
  }
  const auto* next = static_cast<const unsigned char*>(data);
  while (bytes > 0) {
    if (filled_ == 0) {
      wait_until_written(filled_buffers_ < kBuffers ? 0 : filled_buffers_ - kBuffers + 1);
    }
    const std::size_t count = std::min(bytes, kBufferBytes - filled_);
    crc = crc32c_copy(filling().get() + filled_, next, count, crc);
    filled_ += count;
    next += count;
    bytes -= count;
    if (filled_ == kBufferBytes) {
      {
        const std::lock_guard lock(mutex_);
        ++filled_buffers_;
      }
      changed_.notify_all();
      filled_ = 0;
    }
  }
  return crc;
}

void DiskWriter::close() {
  try {
    wait_until_written(filled_buffers_);
    const std::size_t blocks = filled_ / kBlock * kBlock;
    file_.write(filling().get(), blocks);
    file_.use_cache();
    file_.write(filling().get() + blocks, filled_ - blocks);
    file_.sync();
  } catch (...) {
    abandon();
    throw;
  }
  abandon();
}

void DiskWriter::abandon() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      is_stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  for (Buffer& buffer : buffers_) {
    buffer.reset();
  }
  file_.close();
}

// Waits until the thread has written so many buffers.
void DiskWriter::wait_until_written(std::size_t buffers) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || written_buffers_ >= buffers; });
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

// What the thread does.
void DiskWriter::write_buffers() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_stopped_ || written_buffers_ < filled_buffers_; });
    if (is_stopped_) {
      return;
    }
    const Buffer& buffer = buffers_[written_buffers_ % kBuffers];
    lock.unlock();
    std::exception_ptr failure;
    try {
      file_.write(buffer.get(), kBufferBytes);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    failure_ = failure;
    if (failure_) {
      changed_.notify_all();
      return;
    }
    ++written_buffers_;
    changed_.notify_all();
  }
}

}  // namespace poplar
