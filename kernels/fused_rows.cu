// Contiguous lines of any length, read twice and written once.
#include "fused_group.cuh"

#define KERNELS(dtype, T) GROUP_KERNEL(fused_rows, dtype, T, ContiguousLine, false, false, SoftmaxState)
FOR_EACH_DTYPE(KERNELS)
