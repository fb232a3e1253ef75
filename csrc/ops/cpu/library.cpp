// CPU kernels of the operators whose schemas poplar/ops defines.
#include "../operator.h"
#include "kernels.h"

STABLE_TORCH_LIBRARY_IMPL(poplar, CPU, library) {
  library.impl("copy_", POPLAR_OPERATOR(&poplar::cpu::copy_));
  library.impl("pack_", POPLAR_OPERATOR(&poplar::cpu::pack_));
  library.impl("rank_sum_", POPLAR_OPERATOR(&poplar::cpu::rank_sum_));
  library.impl("rank_sum_chunks_", POPLAR_OPERATOR(&poplar::cpu::rank_sum_chunks_));
  library.impl("encode_", POPLAR_OPERATOR(&poplar::cpu::encode_));
  library.impl("decode_sum_", POPLAR_OPERATOR(&poplar::cpu::decode_sum_));
  library.impl("adamw_", POPLAR_OPERATOR(&poplar::cpu::adamw_));
  library.impl("block_sums_of_squares", POPLAR_OPERATOR(&poplar::cpu::block_sums_of_squares));
  library.impl("exact_sum_", POPLAR_OPERATOR(&poplar::cpu::exact_sum_));
  library.impl("exact_norm", POPLAR_OPERATOR(&poplar::cpu::exact_norm));
  library.impl("clip_coefficient", POPLAR_OPERATOR(&poplar::cpu::clip_coefficient));
}
