// Contiguous lines of any length, read twice and written once, with nothing but a scale, window and sinks.
#include "fused_group.cuh"

#define KERNELS(dtype, T) GROUP_KERNEL(fused_rows_scores, dtype, T, ContiguousLine, false, true, SoftmaxState)
FOR_EACH_DTYPE(KERNELS)
