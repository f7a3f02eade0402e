// Lines of any length at any offset, in the registers of a block.
#include "register_softmax.cuh"

#define HALF(dtype, T)                                         \
    BOTH(BLOCK_KERNEL, block_any, dtype, T, 32, false, 512, 2) \
    BOTH(BLOCK_KERNEL, block_any, dtype, T, 64, false, 512, 2)
#define SINGLE(dtype, T)                                       \
    BOTH(BLOCK_KERNEL, block_any, dtype, T, 16, false, 512, 2) \
    BOTH(BLOCK_KERNEL, block_any, dtype, T, 64, false, 256, 2)
#define DOUBLE(dtype, T)                                       \
    BOTH(BLOCK_KERNEL, block_any, dtype, T, 16, false, 512, 1) \
    BOTH(BLOCK_KERNEL, block_any, dtype, T, 32, false, 512, 1)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
