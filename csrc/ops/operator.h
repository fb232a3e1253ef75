// Registration of operators whose errors reach Python whatever C++ runtime this library has.
//
// torch catches only exceptions of its own runtime. With another one (-static-libstdc++, libc++) an
// exception that leaves this library ends the process. So exceptions are caught here, and torch
// throws an error of its own. It passes one frame of this library, which has nothing to clean up
// and therefore needs no runtime.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>

namespace c10::detail {

// Throws c10::Error. libc10 has exported it since PyTorch 1.8; it is not in the stable ABI, so a
// later version may lack it, and the address is then null.
[[noreturn]] __attribute__((weak, visibility("default"))) void torchCheckFail(const char* function,
                                                                              const char* file,
                                                                              std::uint32_t line,
                                                                              const char* message);

}  // namespace c10::detail

namespace poplar {

using BoxedOperator = void (*)(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs);

// Calls the operator; returns the text of its error, or null. The text is valid until the thread's
// next error.
template <BoxedOperator kOperator>
__attribute__((noinline)) const char* error_of(StableIValue* stack, std::uint64_t inputs,
                                               std::uint64_t outputs) noexcept {
  static thread_local char text[4096];  // without a destructor
  try {
    kOperator(stack, inputs, outputs);
    return nullptr;
  } catch (const std::exception& error) {
    std::snprintf(text, sizeof text, "%s", error.what());
  } catch (...) {
    std::snprintf(text, sizeof text, "unknown exception in an operator of Poplar");
  }
  return text;
}

// The stable ABI's own way, which needs torch's runtime.
[[noreturn]] __attribute__((noinline)) inline void throw_error(const char* text) {
  throw std::runtime_error(text);
}

// Must not have variables with destructors: see above.
template <BoxedOperator kOperator>
void raise_in_torch(StableIValue* stack, std::uint64_t inputs, std::uint64_t outputs) {
  const char* error = error_of<kOperator>(stack, inputs, outputs);
  if (error == nullptr) {
    return;
  }
  if (c10::detail::torchCheckFail != nullptr) {
    c10::detail::torchCheckFail("poplar", __FILE__, __LINE__, error);
  }
  throw_error(error);
}

}  // namespace poplar

// Instead of TORCH_BOX.
#define POPLAR_OPERATOR(function) &poplar::raise_in_torch<TORCH_BOX(function)>
