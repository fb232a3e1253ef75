// CPU kernels of the operators whose schemas poplar/ops defines.
#include <torch/csrc/stable/library.h>

#include "kernels.h"

STABLE_TORCH_LIBRARY_IMPL(poplar, CPU, library) {
  library.impl("copy_", TORCH_BOX(&poplar::cpu::copy_));
  library.impl("pack_", TORCH_BOX(&poplar::cpu::pack_));
  library.impl("rank_sum_", TORCH_BOX(&poplar::cpu::rank_sum_));
  library.impl("rank_sum_each_", TORCH_BOX(&poplar::cpu::rank_sum_each_));
  library.impl("rank_sum_chunks_", TORCH_BOX(&poplar::cpu::rank_sum_chunks_));
  library.impl("unpack_", TORCH_BOX(&poplar::cpu::unpack_));
  library.impl("adamw_", TORCH_BOX(&poplar::cpu::adamw_));
  library.impl("block_sums_of_squares", TORCH_BOX(&poplar::cpu::block_sums_of_squares));
  library.impl("exact_sum_", TORCH_BOX(&poplar::cpu::exact_sum_));
  library.impl("exact_norm", TORCH_BOX(&poplar::cpu::exact_norm));
  library.impl("clip_coefficient", TORCH_BOX(&poplar::cpu::clip_coefficient));
}
