// Python bindings of the files of checkpoints.
#pragma once

#include <pybind11/pybind11.h>

namespace poplar {

void define_disk_files(pybind11::module_& module);

}  // namespace poplar
