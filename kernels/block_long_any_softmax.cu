// Longer lines of any length at any offset, in the registers of a block.
#include "register_softmax.cuh"

#define HALF(dtype, T) BOTH(BLOCK_KERNEL, block_long_any, dtype, T, 64, false, 512, 2)
#define SINGLE(dtype, T) BOTH(BLOCK_KERNEL, block_long_any, dtype, T, 64, false, 256, 2)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
