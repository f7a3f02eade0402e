// The gradients where the scores are the logits but for a scale and what is masked, of lines of whole packs of 16 bytes in the
// registers of part of a warp.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_WARP_SCORES(fused_backward_warp_scores, dtype, T, HELD_BACKWARD_SCORES<T>)
FOR_EACH_SINGLE_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS)
