// Shared by the bindings in this folder: device, stream, and the check after a launch.
#pragma once

// The stable ABI declares its CUDA functions only if this is defined, as torch does itself.
#ifndef USE_CUDA
#define USE_CUDA
#endif

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "../checks.h"
#include "../operator.h"

namespace poplar::cuda {

// Makes the tensor's device current for its lifetime and gives PyTorch's current stream on it.
// Temporaries may be freed right after a launch: the caching allocator reuses memory in stream
// order.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace poplar::cuda
