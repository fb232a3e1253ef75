// CUDA kernels of the operators whose schemas poplar/ops defines: arguments, device and stream.

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
#include "adamw.cuh"
#include "clip.cuh"
#include "codec.cuh"
#include "exact_sum.cuh"
#include "norm.cuh"
#include "pack.cuh"
#include "rank_sum.cuh"

namespace poplar::cuda {
namespace {

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

void pack_(Tensor bucket, std::vector<Tensor> grads, std::vector<std::int64_t> offsets,
           double weight, bool accumulate) {
  check_flat(bucket, "pack_: bucket");
  const std::int64_t numel = bucket.numel();
  const std::vector<std::int64_t> numels = numels_of("pack_", numel, grads, offsets);
  const OnDevice device(bucket);
  const Sources sources = sources_of("pack_", bucket, grads, offsets);
  with_type(dtype_of(bucket, "pack_: bucket"), [&](auto* type) {
    using Bucket = std::remove_pointer_t<decltype(type)>;
    STD_CUDA_CHECK(pack(static_cast<Bucket*>(bucket.mutable_data_ptr()), numel, offsets, numels,
                        sources.data, sources.dtypes, static_cast<float>(weight), accumulate,
                        device.stream()));
  });
}

void rank_sum_(Tensor out, std::vector<Tensor> received, bool accumulate,
               std::optional<Tensor> sums) {
  check_rank_sum("rank_sum_", out, received);
  const std::int64_t numel = out.numel();
  float* blocks = sums_of("rank_sum_", out, sums);
  if (numel == 0) {
    return;
  }
  const OnDevice device(out);
  std::optional<Tensor> begun;
  if (received.size() > kParts) {
    begun = new_empty("rank_sum_", out, {numel}, out.scalar_type());
  }
  with_type(dtype_of(received[0], "rank_sum_: received"), [&](auto* type) {
    using Received = std::remove_pointer_t<decltype(type)>;
    std::vector<const Received*> parts;
    for (const Tensor& part : received) {
      parts.push_back(static_cast<const Received*>(part.const_data_ptr()));
    }
    STD_CUDA_CHECK(rank_sum(static_cast<float*>(out.mutable_data_ptr()), blocks, parts,
                            begun ? static_cast<float*>(begun->mutable_data_ptr()) : nullptr, numel,
                            accumulate, device.stream()));
  });
}

void encode_(Tensor codes, std::vector<Tensor> values, std::vector<std::int64_t> offsets,
             double weight, std::int64_t bits, std::int64_t first, std::int64_t key) {
  const std::int64_t groups = check_codes("encode_: codes", codes, bits);
  const auto numels = numels_of("encode_", groups * kGroup, values, offsets);
  const OnDevice device(codes);
  const Sources sources = check_encode(codes, values, first);
  const auto run = bits == 8 ? encode<8> : encode<4>;
  STD_CUDA_CHECK(run(static_cast<std::uint8_t*>(codes.mutable_data_ptr()), groups, offsets, numels,
                     sources.data, sources.dtypes, static_cast<float>(weight), first,
                     RandomKey(key), device.stream()));
}

void decode_sum_(Tensor out, std::vector<Tensor> received, std::int64_t bits, bool accumulate,
                 std::optional<Tensor> sums) {
  check_decode_sum(out, received, bits, sums);
  float* blocks = sums_of("decode_sum_", out, sums);
  const OnDevice device(out);
  std::vector<const std::uint8_t*> parts;
  for (const Tensor& part : received) {
    parts.push_back(static_cast<const std::uint8_t*>(part.const_data_ptr()));
  }
  with_type(dtype_of(out, "decode_sum_: out"), [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    const auto run = bits == 8 ? decode_sum<8, Out> : decode_sum<4, Out>;
    STD_CUDA_CHECK(run(static_cast<Out*>(out.mutable_data_ptr()), blocks, parts, out.numel(),
                       accumulate, device.stream()));
  });
}

Tensor block_sums_of_squares(Tensor flat) {
  check_flat(flat, "block_sums_of_squares: flat");
  const std::int64_t numel = flat.numel();
  const OnDevice device(flat);
  Tensor sums = new_empty("block_sums_of_squares", flat, {blocks_of(numel)},
                          torch::headeronly::ScalarType::Float);
  with_type(dtype_of(flat, "block_sums_of_squares: flat"), [&](auto* type) {
    using Flat = std::remove_pointer_t<decltype(type)>;
    STD_CUDA_CHECK(block_sums(static_cast<float*>(sums.mutable_data_ptr()),
                              static_cast<const Flat*>(flat.const_data_ptr()), numel,
                              device.stream()));
  });
  return sums;
}

void exact_sum_(Tensor total, std::vector<Tensor> values) {
  check_exact_sum(total, values);
  const OnDevice device(total);
  std::vector<Addends> parts;
  for (const Tensor& part : values) {
    parts.push_back({static_cast<const float*>(part.const_data_ptr()), part.numel()});
  }
  STD_CUDA_CHECK(
      exact_sum(static_cast<std::int64_t*>(total.mutable_data_ptr()), parts, device.stream()));
}

Tensor new_double_like(const char* name, const Tensor& tensor) {
  return new_empty(name, tensor, {}, torch::headeronly::ScalarType::Double);
}

Tensor exact_norm(Tensor totals) {
  check_exact_norm(totals);
  const OnDevice device(totals);
  Tensor norm = new_double_like("exact_norm", totals);
  STD_CUDA_CHECK(cuda::norm(static_cast<double*>(norm.mutable_data_ptr()),
                            static_cast<const std::int64_t*>(totals.const_data_ptr()),
                            totals.size(0), totals.size(1), device.stream()));
  return norm;
}

Tensor clip_coefficient(Tensor norm, double max_norm, std::optional<Tensor> scale) {
  check_clip_coefficient(norm, scale);
  const OnDevice device(norm);
  Tensor coefficient = new_double_like("clip_coefficient", norm);
  STD_CUDA_CHECK(cuda::clip(static_cast<double*>(coefficient.mutable_data_ptr()),
                            static_cast<const double*>(norm.const_data_ptr()),
                            scale ? static_cast<const double*>(scale->const_data_ptr()) : nullptr,
                            static_cast<float>(max_norm), device.stream()));
  return coefficient;
}

const float* scalar_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

void adamw_(std::vector<Tensor> values, std::vector<Tensor> gradients, std::vector<Tensor> means,
            std::vector<Tensor> square_means, std::vector<Tensor> rounded,
            std::vector<double> rules, std::optional<Tensor> scale,
            std::optional<Tensor> found_inf) {
  check_adamw(values, gradients, means, square_means, rounded, rules, scale, found_inf);
  if (values.empty()) {
    return;
  }
  const OnDevice device(values[0]);
  std::vector<Shard> shards(values.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const bool rounds = rounded[i].numel() != 0;
    shards[i] = Shard{static_cast<float*>(values[i].mutable_data_ptr()),
                      static_cast<const float*>(gradients[i].const_data_ptr()),
                      static_cast<float*>(means[i].mutable_data_ptr()),
                      static_cast<float*>(square_means[i].mutable_data_ptr()),
                      rounds ? rounded[i].mutable_data_ptr() : nullptr,
                      values[i].numel(),
                      AdamW(&rules[i * kRuleNumbers], 1.0f),
                      rounds ? dtype_of(rounded[i], "adamw_: rounded") : Dtype::kFloat,
                      false};
    shards[i].aligned = is_aligned(shards[i]);
  }
  STD_CUDA_CHECK(adamw(shards, scalar_of(scale), scalar_of(found_inf), device.stream()));
}

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("pack_", POPLAR_OPERATOR(&poplar::cuda::pack_));
  library.impl("rank_sum_", POPLAR_OPERATOR(&poplar::cuda::rank_sum_));
  library.impl("encode_", POPLAR_OPERATOR(&poplar::cuda::encode_));
  library.impl("decode_sum_", POPLAR_OPERATOR(&poplar::cuda::decode_sum_));
  library.impl("block_sums_of_squares", POPLAR_OPERATOR(&poplar::cuda::block_sums_of_squares));
  library.impl("exact_sum_", POPLAR_OPERATOR(&poplar::cuda::exact_sum_));
  library.impl("exact_norm", POPLAR_OPERATOR(&poplar::cuda::exact_norm));
  library.impl("clip_coefficient", POPLAR_OPERATOR(&poplar::cuda::clip_coefficient));
  library.impl("adamw_", POPLAR_OPERATOR(&poplar::cuda::adamw_));
}
