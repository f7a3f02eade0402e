// Lines of any length that lie side by side, read twice and written once.
#include "fused_group.cuh"

#define KERNELS(dtype, T) GROUP_KERNEL(fused_group, dtype, T, ScatteredLine, false, false, SoftmaxState)
FOR_EACH_DTYPE(KERNELS)
