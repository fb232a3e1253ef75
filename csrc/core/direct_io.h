// Reads and writes past the page cache (O_DIRECT), where the file system can do that.
//
// Copying through the page cache takes more CPU than checksums, and where memory is full of other
// files it waits until their pages are free.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <memory>

namespace poplar {

// Offsets, sizes and addresses must be multiples of a block of the disk, of at most so many bytes.
constexpr std::size_t kBlock = 4096;
constexpr std::size_t kBufferBytes = std::size_t{1} << 20;  // larger ones are not faster

struct FreeMemory {
  void operator()(unsigned char* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<unsigned char, FreeMemory>;

// `kBufferBytes` at a multiple of `kBlock`. Throws std::bad_alloc.
Buffer make_buffer();

// An open file, which is closed with this object. All methods throw std::system_error.
class DirectFile {
 public:
  // Takes over the descriptor.
  explicit DirectFile(int descriptor);
  ~DirectFile();
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  // Writes at the file's position. After a write that ends within a block, as on a disk that is
  // nearly full, all others go through the page cache.
  void write(const unsigned char* data, std::size_t bytes);

  // Reads up to so many bytes, fewer only at the end of the file.
  std::size_t read(unsigned char* target, std::size_t bytes, off_t offset);

  // Waits until what was written is on the disk.
  void sync();

  // Reads and writes through the page cache from now on.
  void use_cache() { set_direct(false); }

  bool is_direct() const { return is_direct_; }

  void close() noexcept;

 private:
  void set_direct(bool on);
  bool is_refused(int error);

  int descriptor_;
  std::atomic<bool> is_direct_ = false;
};

}  // namespace poplar
