// Lines of any length that lie side by side, read twice and written once, with nothing but a scale, window and sinks.
#include "fused_group.cuh"

#define KERNELS(dtype, T) GROUP_KERNEL(fused_group_scores, dtype, T, ScatteredLine, false, true, SoftmaxState)
FOR_EACH_DTYPE(KERNELS)
