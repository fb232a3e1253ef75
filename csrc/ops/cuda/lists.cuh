// Many tensors in one launch: what a kernel needs of each is an item in its parameters.
//
// A thread block works on one tile of one tensor. Its number leads to the item: every item knows
// the number of its first block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "launch.cuh"
#include "poplar/elementwise.h"

namespace poplar::cuda {

// 32,764 bytes of kernel parameters (CUDA 12.1, compute capability 7.0), less those of scalars.
constexpr std::size_t kTableBytes = 32764 - 64;

// `Item` has a member `numel`.
template <typename Item>
struct ItemTable {
  static constexpr int kItems = (kTableBytes - 8) / (sizeof(Item) + sizeof(unsigned));
  Item items[kItems];
  unsigned first_blocks[kItems];
  int count;
};

// Calls launch(table, blocks), which returns an error code, for as many tables as the items need.
// Each block processes `per_block` elements. Items without elements are left out.
template <typename Item, typename Launch>
cudaError_t for_each_item_table(const std::vector<Item>& items, std::int64_t per_block,
                                const Launch& launch) {
  using Table = ItemTable<Item>;
  static_assert(sizeof(Table) <= kTableBytes, "kernel parameters are limited");
  Table table;
  std::size_t next = 0;
  while (next < items.size()) {
    std::int64_t blocks = 0;
    table.count = 0;
    for (; next < items.size() && table.count < Table::kItems; ++next) {
      if (items[next].numel > 0) {
        table.items[table.count] = items[next];
        table.first_blocks[table.count] = static_cast<unsigned>(blocks);
        blocks += (items[next].numel + per_block - 1) / per_block;
        ++table.count;
      }
    }
    const cudaError_t error = launch(static_cast<const Table&>(table), blocks);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// The index of the item that a block works on.
template <typename Item>
POPLAR_HOST_DEVICE int item_of(const ItemTable<Item>& table, unsigned block) {
  int low = 0;
  int high = table.count - 1;
  while (low < high) {  // binary search for the last item whose first block is not after `block`
    const int middle = (low + high + 1) / 2;
    if (table.first_blocks[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace poplar::cuda
