// Kernel launches. Framework-free, like every header in this folder (raw pointers and a stream), so
// kernels compile for every architecture without a CUDA build of torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace poplar::cuda {

constexpr int kThreads = 256;

// Runs the kernel on enough blocks of `per_block` elements to cover `numel`.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), std::int64_t numel, std::int64_t per_block,
                   cudaStream_t stream, const Arguments&... arguments) {
  if (numel == 0) {
    return cudaSuccess;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((numel + per_block - 1) / per_block));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace poplar::cuda
