// Copies pieces of memory into one buffer.
#pragma once

#include <cstddef>
#include <vector>

namespace poplar {

struct Piece {
  const void* source;
  std::size_t bytes;
  std::size_t offset;  // in the target
};

// With streaming stores, whatever the size of a piece: the target is read much later.
void gather(void* target, const std::vector<Piece>& pieces);

}  // namespace poplar
