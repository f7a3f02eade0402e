// The gradients, of lines of any length that lie side by side, both read twice and written once.
#include "fused_group.cuh"

#define KERNELS(dtype, T) GROUP_KERNEL(fused_backward_group, dtype, T, ScatteredLine, true, false, WeighedState)
FOR_EACH_DTYPE(KERNELS)
