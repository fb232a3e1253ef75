// Memory of Python objects with the buffer protocol.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <stdexcept>

namespace poplar {

// Throws std::invalid_argument if the buffer is not contiguous.
inline pybind11::buffer_info contiguous(const pybind11::buffer& buffer, bool writable = false) {
  pybind11::buffer_info info = buffer.request(writable);
  if (!PyBuffer_IsContiguous(info.view(), 'C')) {
    throw std::invalid_argument("the buffer must be contiguous");
  }
  return info;
}

inline std::size_t bytes_of(const pybind11::buffer_info& info) {
  return static_cast<std::size_t>(info.size * info.itemsize);
}

}  // namespace poplar
