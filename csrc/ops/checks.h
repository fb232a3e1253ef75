// Argument checks shared by the CPU and CUDA bindings, so that no operator accesses memory outside
// of its arguments.
//
// Messages name the operator, what was given and what was expected; they reach Python as
// RuntimeError.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <concepts>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocation.h"
#include "poplar/adamw.h"
#include "poplar/codec.h"
#include "poplar/exact_sum.h"
#include "poplar/segments.h"

namespace poplar {

using torch::stable::Tensor;

// The parts of a message as text. Streams are not used: they depend on the locales of the process,
// which another copy of the C++ runtime may have set up.
inline const char* text_of(const char* part) { return part; }
inline const std::string& text_of(const std::string& part) { return part; }
inline std::string text_of(std::integral auto part) { return std::to_string(part); }

template <typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) {
    std::string text = "poplar::";
    ((text += text_of(parts)), ...);
    throw std::runtime_error(text);
  }
}

inline Dtype dtype_of(const Tensor& tensor, const char* name) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kHalf;
    default:
      check(false, name, " must be float32, bfloat16 or float16");
      return Dtype::kFloat;
  }
}

inline bool same_device(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }

// Whether the memory of two tensors overlaps: `b` is contiguous; of `a`, everything from its first
// to its last element counts.
inline bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) {
    return false;
  }
  std::int64_t reach = 1;
  for (std::int64_t dim = 0; dim < a.dim(); ++dim) {
    reach += (a.sizes()[dim] - 1) * a.strides()[dim];
  }
  const auto* first = static_cast<const char*>(a.const_data_ptr());
  const auto* second = static_cast<const char*>(b.const_data_ptr());
  return first < second + b.numel() * b.element_size() && second < first + reach * a.element_size();
}

inline void check_flat(const Tensor& tensor, const char* name) {
  check(tensor.dim() == 1 && tensor.is_contiguous(), name, " must be 1-D and contiguous, got ",
        tensor.dim(), " dimensions");
}

// The sizes of tensors at offsets of a flat buffer of `numel` elements; checks order and bounds.
inline std::vector<std::int64_t> numels_of(const char* name, std::int64_t numel,
                                           const std::vector<Tensor>& tensors,
                                           const std::vector<std::int64_t>& offsets) {
  check(tensors.size() == offsets.size(), name, ": got ", tensors.size(), " tensors and ",
        offsets.size(), " offsets");
  std::vector<std::int64_t> numels(tensors.size());
  std::int64_t previous_end = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    numels[i] = tensors[i].numel();
    check(offsets[i] >= previous_end, name, ": tensor ", i, " starts at ", offsets[i], ", before ",
          previous_end, ", where the one before it ends; offsets must ascend");
    check(numels[i] <= numel && offsets[i] <= numel - numels[i], name, ": tensor ", i, " (offset ",
          offsets[i], ", ", numels[i], " elements) reaches past the end of the buffer, ", numel);
    previous_end = offsets[i] + numels[i];
  }
  return numels;
}

// Tensors prepared for the loops: contiguous, with arrays of raw pointers and dtypes.
struct Sources {
  std::vector<Tensor> keep_alive;
  std::vector<const void*> data;
  std::vector<Dtype> dtypes;

  void add(const char* name, const Tensor& tensor) {
    dtypes.push_back(dtype_of(tensor, name));
    keep_alive.push_back(tensor.is_contiguous() ? tensor : contiguous(name, tensor));
    data.push_back(keep_alive.back().const_data_ptr());
  }
};

inline Sources sources_of(const char* name, const Tensor& buffer,
                          const std::vector<Tensor>& tensors,
                          const std::vector<std::int64_t>& offsets) {
  Sources sources;
  const auto* first = static_cast<const char*>(buffer.const_data_ptr());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    check(same_device(buffer, tensor), name, ": all tensors must be on the buffer's device");
    const bool is_its_place =
        tensor.const_data_ptr() == first + offsets[i] * buffer.element_size() &&
        tensor.is_contiguous() && tensor.scalar_type() == buffer.scalar_type();
    check(is_its_place || !overlap(tensor, buffer), name, ": tensor ", i,
          " is in the buffer's memory, but not at its own offset");
    sources.add(name, tensor);
  }
  return sources;
}

// Checks a tensor of encoded groups. `name`: the operator and the tensor. Returns their number.
inline std::int64_t check_codes(const char* name, const Tensor& codes, std::int64_t bits) {
  check(bits == 8 || bits == 4, name, " have 8 or 4 bits, got ", bits);
  check_flat(codes, name);
  check(codes.scalar_type() == torch::headeronly::ScalarType::Byte &&
            codes.numel() % group_bytes(bits) == 0 &&
            reinterpret_cast<std::uintptr_t>(codes.const_data_ptr()) % 2 == 0,
        name, " must be uint8 at an even address and hold ", group_bytes(bits),
        " bytes for each 64 elements, got ", codes.numel());
  return codes.numel() / group_bytes(bits);
}

// Checks the arguments of encode_; returns its tensors.
inline Sources check_encode(const Tensor& codes, const std::vector<Tensor>& values,
                            std::int64_t first) {
  check(first >= 0 && first % kGroup == 0, "encode_: first must be a multiple of 64, got ", first);
  Sources sources;
  for (const Tensor& tensor : values) {
    check(same_device(codes, tensor), "encode_: all tensors must be on one device");
    sources.add("encode_: values", tensor);
  }
  return sources;
}

inline void check_decode_sum(const Tensor& out, const std::vector<Tensor>& received,
                             std::int64_t bits, const std::optional<Tensor>& sums) {
  check_flat(out, "decode_sum_: out");
  const Dtype dtype = dtype_of(out, "decode_sum_: out");
  check(!sums || dtype == Dtype::kFloat, "decode_sum_: out must be float32 with sums");
  check(!received.empty() && received.size() <= kMostRanks, "decode_sum_: received must hold 1 to ",
        kMostRanks, " parts, got ", received.size());
  for (const Tensor& part : received) {
    check_codes("decode_sum_: received", part, bits);
    check(same_device(out, part), "decode_sum_: out and received must be on one device");
    const std::int64_t expected = (out.numel() + kGroup - 1) / kGroup * group_bytes(bits);
    check(part.numel() == expected, "decode_sum_: ", out.numel(), " elements take ", expected,
          " bytes, but a part has ", part.numel());
  }
}

// Checks the out and the parts of a sum over ranks. `name`: the operator.
inline void check_rank_sum(const std::string& name, const Tensor& out,
                           const std::vector<Tensor>& received) {
  check_flat(out, (name + ": out").c_str());
  check(!received.empty(), name, ": received must hold at least one rank's part, got none");
  for (const Tensor& part : received) {
    check_flat(part, (name + ": received").c_str());
    check(same_device(out, part), name, ": out and received must be on one device");
    check(part.scalar_type() == received[0].scalar_type(), name, ": all parts must have one dtype");
    check(part.numel() == out.numel(), name, ": each part must hold ", out.numel(),
          " elements, as out does, got ", part.numel());
  }
  check(dtype_of(out, (name + ": out").c_str()) == Dtype::kFloat, name, ": out must be float32");
}

// `WorkCounters`: what the operator keeps in them.
template <typename WorkCounters>
void check_work_counters(const Tensor& work_counters) {
  check_flat(work_counters, "rank_sum_chunks_: work_counters");
  const auto address = reinterpret_cast<std::uintptr_t>(work_counters.const_data_ptr());
  check(work_counters.element_size() == 1 &&
            work_counters.numel() == static_cast<std::int64_t>(sizeof(WorkCounters)) &&
            address % alignof(WorkCounters) == 0,
        "rank_sum_chunks_: work_counters must hold ", sizeof(WorkCounters),
        " bytes at an address that is a multiple of ", alignof(WorkCounters));
}

// The number of 64-element blocks.
inline std::int64_t blocks_of(std::int64_t numel) { return (numel + 63) / 64; }

// The output of an operator for the block sums of squares of `flat`, its result; null if none was
// requested.
inline float* sums_of(const std::string& name, const Tensor& flat,
                      const std::optional<Tensor>& sums) {
  if (!sums) {
    return nullptr;
  }
  check_flat(*sums, (name + ": sums").c_str());
  check(same_device(flat, *sums) && dtype_of(*sums, (name + ": sums").c_str()) == Dtype::kFloat &&
            sums->numel() == blocks_of(flat.numel()),
        name, ": sums must be float32 on the same device and hold ", blocks_of(flat.numel()),
        " elements, one for each 64");
  return static_cast<float*>(sums->mutable_data_ptr());
}

inline void check_exact_sum(const Tensor& total, const std::vector<Tensor>& values) {
  check_flat(total, "exact_sum_: total");
  check(total.scalar_type() == torch::headeronly::ScalarType::Long && total.numel() == kExactWords,
        "exact_sum_: total must be int64 and hold ", kExactWords, " elements");
  for (const Tensor& part : values) {
    check_flat(part, "exact_sum_: values");
    check(part.scalar_type() == torch::headeronly::ScalarType::Float,
          "exact_sum_: values must be float32");
    check(same_device(total, part), "exact_sum_: total and values must be on one device");
  }
}

inline void check_exact_norm(const Tensor& totals) {
  check(totals.dim() == 2 && totals.is_contiguous() && totals.size(1) >= kExactWords &&
            totals.scalar_type() == torch::headeronly::ScalarType::Long,
        "exact_norm: totals must be int64, contiguous, and hold at least ", kExactWords,
        " elements in each row");
}

inline void check_clip_coefficient(const Tensor& norm, const std::optional<Tensor>& scale) {
  for (const Tensor* tensor : {&norm, scale ? &*scale : &norm}) {
    check(tensor->numel() == 1 && same_device(*tensor, norm) &&
              tensor->scalar_type() == torch::headeronly::ScalarType::Double,
          "clip_coefficient: norm and scale must be single float64 elements on the same device");
  }
}

// Checks one of the tensors of adamw_ that belong to `values`.
inline void check_adamw_tensor(const Tensor& values, const Tensor& tensor) {
  check_flat(tensor, "adamw_: all tensors");
  check(same_device(tensor, values), "adamw_: all tensors must be on one device");
  check(tensor.numel() == values.numel(), "adamw_: values have ", values.numel(),
        " elements, another tensor ", tensor.numel());
}

// Entries of `rounded` without elements stand for none.
inline void check_adamw(const std::vector<Tensor>& values, const std::vector<Tensor>& gradients,
                        const std::vector<Tensor>& means, const std::vector<Tensor>& square_means,
                        const std::vector<Tensor>& rounded, const std::vector<double>& rules,
                        const std::optional<Tensor>& scale,
                        const std::optional<Tensor>& found_inf) {
  for (const auto* list : {&gradients, &means, &square_means, &rounded}) {
    check(list->size() == values.size(), "adamw_: all lists must have one length, got ",
          values.size(), " values and a list of ", list->size());
  }
  check(rules.size() == values.size() * kRuleNumbers, "adamw_: expected ", kRuleNumbers,
        " numbers for each of ", values.size(), " tensors, got ", rules.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (const Tensor* tensor : {&values[i], &gradients[i], &means[i], &square_means[i]}) {
      check_adamw_tensor(values[i], *tensor);
      check(tensor->scalar_type() == torch::headeronly::ScalarType::Float,
            "adamw_: values, gradients and state must be float32");
      check(same_device(*tensor, values[0]), "adamw_: all tensors must be on one device");
    }
    if (rounded[i].numel() != 0) {
      check_adamw_tensor(values[i], rounded[i]);
      dtype_of(rounded[i], "adamw_: rounded");
    }
  }
  for (const std::optional<Tensor>* scalar : {&scale, &found_inf}) {
    if (*scalar && !values.empty()) {
      check((*scalar)->numel() == 1 && same_device(**scalar, values[0]) &&
                (*scalar)->scalar_type() == torch::headeronly::ScalarType::Float,
            "adamw_: scale and found_inf must be single float32 elements on the same device");
    }
  }
}

// The value of a single element in host memory.
inline float scalar_of(const Tensor& tensor) {
  return *static_cast<const float*>(tensor.const_data_ptr());
}

inline void check_copy(const Tensor& target, const Tensor& source) {
  check_flat(target, "copy_: target");
  check_flat(source, "copy_: source");
  check(same_device(target, source), "copy_: target and source must be on one device");
  check(target.scalar_type() == source.scalar_type(),
        "copy_: target and source must have one dtype");
  check(target.numel() == source.numel(), "copy_: target has ", target.numel(),
        " elements, source ", source.numel());
}

}  // namespace poplar
