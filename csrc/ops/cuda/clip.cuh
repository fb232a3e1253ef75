// Contract: exact_norm and clip_coefficient in poplar/ops. About a hundred bytes in, eight out. One
// block each, so two launches replace more than twenty.
#pragma once

#include "launch.cuh"
#include "poplar/clip.h"

namespace poplar::cuda {

template <int kWords>  // a template, so that any number of sources may include it
__global__ void __launch_bounds__(kThreads) norm_kernel(double* norm, const std::int64_t* totals,
                                                        std::int64_t rows, std::int64_t distance) {
  __shared__ std::int64_t words[kWords];
  const unsigned word = threadIdx.x;
  if (word < kWords) {
    std::int64_t sum = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      sum += totals[row * distance + word];
    }
    words[word] = sum;
  }
  __syncthreads();
  if (word == 0) {
    *norm = root_of(words);
  }
}

template <bool kScaled>
__global__ void clip_kernel(double* coefficient, const double* norm, const double* scale,
                            float max_norm) {
  if (threadIdx.x == 0) {
    *coefficient = clip_ratio(*norm, kScaled ? *scale : 1.0, max_norm);
  }
}

// `totals`: `rows` sums, `distance` elements apart.
inline cudaError_t norm(double* norm, const std::int64_t* totals, std::int64_t rows,
                        std::int64_t distance, cudaStream_t stream) {
  return launch(norm_kernel<kExactWords>, 1, 1, stream, norm, totals, rows, distance);
}

// `scale` may be null, for 1.
inline cudaError_t clip(double* coefficient, const double* norm, const double* scale,
                        float max_norm, cudaStream_t stream) {
  const auto kernel = scale ? clip_kernel<true> : clip_kernel<false>;
  return launch(kernel, 1, 1, stream, coefficient, norm, scale, max_norm);
}

}  // namespace poplar::cuda
