// Lines of half precision, of whole packs of 16 bytes, of which a scale, sinks, dropout or logarithms are asked: a block to each.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_BLOCK_SCORES(fused_block_scores, dtype, T, 64, false)
FOR_EACH_HALF_DTYPE(KERNELS)
