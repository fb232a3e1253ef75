#include "gather.h"

#include <cstdint>
#include <cstring>

#include "poplar/stream.h"

namespace poplar {

void gather(void* target, const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    char* to = static_cast<char*>(target) + piece.offset;
    const char* from = static_cast<const char*>(piece.source);
    const std::size_t streamed =
        is_stream_target(to) ? piece.bytes / kStreamWidth * kStreamWidth : 0;
    stream(to, from, static_cast<std::int64_t>(streamed));
    std::memcpy(to + streamed, from + streamed, piece.bytes - streamed);
  }
  end_streaming();
}

}  // namespace poplar
