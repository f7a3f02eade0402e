// Lines that are whole packs of 16 bytes, in the registers of a block.
#include "register_softmax.cuh"

#define HALF(dtype, T)                                    \
    BOTH(BLOCK_KERNEL, block, dtype, T, 16, true, 512, 2) \
    BOTH(BLOCK_KERNEL, block, dtype, T, 32, true, 512, 2) \
    BOTH(BLOCK_KERNEL, block, dtype, T, 64, true, 512, 2)
#define SINGLE(dtype, T)                                  \
    BOTH(BLOCK_KERNEL, block, dtype, T, 16, true, 512, 2) \
    BOTH(BLOCK_KERNEL, block, dtype, T, 64, true, 256, 2)
#define DOUBLE(dtype, T)                                  \
    BOTH(BLOCK_KERNEL, block, dtype, T, 16, true, 512, 1) \
    BOTH(BLOCK_KERNEL, block, dtype, T, 32, true, 512, 1)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
