// Lines of y and g in the registers of part of a warp or of a block.
#include "register_backward.cuh"

#define BLOCK_KERNELS(dtype, T, COUNT, BLOCKS) BACKWARD_KERNELS(BACKWARD_BLOCK_KERNEL, backward_block, dtype, T, COUNT, BLOCKS)
#define HALF(dtype, T) BACKWARD_WARP_KERNEL(dtype, T, 16) BLOCK_KERNELS(dtype, T, 16, 2) BLOCK_KERNELS(dtype, T, 32, 2)
#define SINGLE(dtype, T) BACKWARD_WARP_KERNEL(dtype, T, 16) BLOCK_KERNELS(dtype, T, 16, 2)
#define DOUBLE(dtype, T) BACKWARD_WARP_KERNEL(dtype, T, 8) BLOCK_KERNELS(dtype, T, 8, 1)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
