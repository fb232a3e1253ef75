#include "direct_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <system_error>

namespace poplar {
namespace {

#if defined(O_DIRECT)
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

}  // namespace

Buffer make_buffer() {
  auto* memory = static_cast<unsigned char*>(std::aligned_alloc(kBlock, kBufferBytes));
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return Buffer(memory);
}

DirectFile::DirectFile(int descriptor) : descriptor_(descriptor) { set_direct(true); }

DirectFile::~DirectFile() { close(); }

void DirectFile::write(const unsigned char* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, data, bytes);
    if (written < 0) {
      if (errno == EINTR || is_refused(errno)) {
        continue;
      }
      fail(errno);
    }
    data += written;
    bytes -= static_cast<std::size_t>(written);
    if (static_cast<std::size_t>(written) % kBlock != 0) {
      use_cache();
    }
  }
}

std::size_t DirectFile::read(unsigned char* target, std::size_t bytes, off_t offset) {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t count =
        ::pread(descriptor_, target + done, bytes - done, offset + static_cast<off_t>(done));
    if (count < 0) {
      if (errno == EINTR || is_refused(errno)) {
        continue;
      }
      fail(errno);
    }
    done += static_cast<std::size_t>(count);
    // A direct read ends within a block only at the end of the file.
    if (count == 0 || (is_direct_ && static_cast<std::size_t>(count) % kBlock != 0)) {
      break;
    }
  }
  return done;
}

void DirectFile::sync() {
  while (::fsync(descriptor_) != 0) {
    if (errno != EINTR) {
      fail(errno);
    }
  }
}

void DirectFile::close() noexcept {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
    descriptor_ = -1;
  }
}

// A file system may accept the flag and refuse the first read or write.
bool DirectFile::is_refused(int error) {
  if (error != EINVAL || !is_direct_) {
    return false;
  }
  use_cache();
  return true;
}

void DirectFile::set_direct(bool on) {
  is_direct_ = false;
  if (kDirect == 0) {
    return;
  }
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0) {
    fail(errno);
  }
  const int wanted = on ? flags | kDirect : flags & ~kDirect;
  // Refused for files in memory, which have no other place than the page cache.
  is_direct_ = ::fcntl(descriptor_, F_SETFL, wanted) == 0 && on;
}

}  // namespace poplar
