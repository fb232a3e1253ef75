// One operator in a library of its own, for tests/unit/test_cpp_runtime.py.
#include "../../csrc/ops/cpu/kernels.h"
#include "../../csrc/ops/operator.h"

STABLE_TORCH_LIBRARY_IMPL(poplar, CPU, library) {
  library.impl("copy_", POPLAR_OPERATOR(&poplar::cpu::copy_));
}
