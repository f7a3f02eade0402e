// The gradients, of contiguous lines of any length, both read twice and written once.
#include "fused_group.cuh"

#define KERNELS(dtype, T) GROUP_KERNEL(fused_backward_rows, dtype, T, ContiguousLine, true, false, WeighedState)
FOR_EACH_DTYPE(KERNELS)
