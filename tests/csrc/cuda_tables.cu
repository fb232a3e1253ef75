// Runs on the host, without a GPU: divides many tensors into launches and tiles as the CUDA
// operators do, and checks that every element of the buffer is visited exactly once, by the right
// tensor.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "../../csrc/ops/cuda/segments.cuh"

namespace {

using poplar::Dtype;
using poplar::cuda::kSegments;
using poplar::cuda::kTile;
using poplar::cuda::SegmentTable;

struct Count {
  std::vector<int>* visits;
  std::vector<std::int64_t>* owners;
  const SegmentTable* table;

  __host__ __device__ void gap(std::int64_t begin, std::int64_t end) const {
#ifndef __CUDA_ARCH__
    for (std::int64_t i = begin; i < end; ++i) {
      ++(*visits)[i];
    }
#endif
  }

  __host__ __device__ void piece(std::int64_t segment, std::int64_t start, std::int64_t begin,
                                 std::int64_t end) const {
#ifndef __CUDA_ARCH__
    for (std::int64_t i = begin; i < end; ++i) {
      ++(*visits)[i];
      // The tensor's number is stored as its address; a wrong start gives a wrong owner.
      const auto number = reinterpret_cast<std::intptr_t>(table->data[segment]);
      (*owners)[i] = start + (i - begin) == i - table->offsets[segment] ? number : -2;
    }
#endif
  }
};

void expect(bool holds, const char* what, std::int64_t segments) {
  if (!holds) {
    std::printf("%s (%lld segments)\n", what, static_cast<long long>(segments));
    std::exit(1);
  }
}

void check(std::int64_t segments, std::int64_t tail) {
  std::vector<std::int64_t> offsets, numels;
  std::vector<const void*> data;
  std::int64_t end = 0;
  for (std::int64_t i = 0; i < segments; ++i) {
    offsets.push_back(end + (i % 7 == 3 ? 5000 : i % 3));
    numels.push_back(i % 11 == 5 ? 9001 : i % 13);
    data.push_back(reinterpret_cast<const void*>(static_cast<std::intptr_t>(i)));
    end = offsets.back() + numels.back();
  }
  const std::int64_t numel = end + tail;
  std::vector<int> visits(numel);
  std::vector<std::int64_t> owners(numel, -1), expected(numel, -1);
  for (std::int64_t i = 0; i < segments; ++i) {
    std::fill_n(expected.begin() + offsets[i], numels[i], i);
  }
  int launches = 0;
  const std::vector<Dtype> dtypes(segments, Dtype::kFloat);
  poplar::cuda::for_each_table(
      numel, offsets, numels, data, dtypes, [&](const SegmentTable& table) {
        ++launches;
        for (std::int64_t block = 0; block * kTile < table.end - table.begin; ++block) {
          poplar::cuda::walk_tile(table, poplar::cuda::tile_of(table, block),
                                  Count{&visits, &owners, &table});
        }
        expect(table.begin % 64 == 0, "a block of 64 is cut", segments);
        return cudaSuccess;
      });
  expect(std::all_of(visits.begin(), visits.end(), [](int count) { return count == 1; }),
         "an element was missed or visited twice", segments);
  expect(owners == expected, "an element went to the wrong tensor", segments);
  // Cut at multiples of 64, so some of a table's last tensors are repeated in the next table.
  expect(launches <= 1 + segments / (kSegments - 64), "too many launches", segments);
}

}  // namespace

int main() {
  for (const std::int64_t segments :
       {0, 1, 2, 100, kSegments - 1, kSegments, kSegments + 1, 3000}) {
    for (const std::int64_t tail : {0, 1, 20000}) {
      check(segments, tail);
    }
  }
  std::printf("every element once\n");
}
