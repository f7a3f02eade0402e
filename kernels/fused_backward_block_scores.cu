// The gradients where the scores are the logits but for a scale and what is masked, of lines of whole packs of 16 bytes in the
// registers of a block.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_BLOCK_SCORES(fused_backward_block_scores, dtype, T, HELD_BACKWARD_SCORES<T>)
FOR_EACH_SINGLE_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS)
