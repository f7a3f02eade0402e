// The gradients, of contiguous lines of any length, both read twice and written once, with nothing but a scale, window and sinks.
#include "fused_group.cuh"

#define KERNELS(dtype, T) GROUP_KERNEL(fused_backward_rows_scores, dtype, T, ContiguousLine, true, true, WeighedState)
FOR_EACH_DTYPE(KERNELS)
