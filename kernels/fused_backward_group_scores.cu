// The gradients, of lines of any length that lie side by side, both read twice and written once, with nothing but a scale and sinks.
#include "fused_group.cuh"

#define KERNELS(dtype, T) GROUP_KERNEL(fused_backward_group_scores, dtype, T, ScatteredLine, true, true, WeighedState)
FOR_EACH_DTYPE(KERNELS)
#define KERNELS_OF_PAIRS(dtype, T) GROUP_KERNEL(fused_backward_group_scores_pairs, dtype, T, ScatteredPair, true, true, WeighedState)
FOR_EACH_HALF_DTYPE(KERNELS_OF_PAIRS)
