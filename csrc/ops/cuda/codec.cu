#include "codec.cuh"

#include "binding.h"

namespace poplar::cuda {
namespace {

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

}  // namespace
}  // namespace poplar::cuda

STABLE_TORCH_LIBRARY_IMPL(poplar, CUDA, library) {
  library.impl("encode_", POPLAR_OPERATOR(&poplar::cuda::encode_));
  library.impl("decode_sum_", POPLAR_OPERATOR(&poplar::cuda::decode_sum_));
}
