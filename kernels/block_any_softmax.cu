// Lines of any length at any offset, in the registers of a block.
#include "register_softmax.cuh"

#define KERNELS(dtype, T)                                      \
    BOTH(BLOCK_KERNEL, block_any, dtype, T, 16, false, 512, 2) \
    BOTH(BLOCK_KERNEL, block_any, dtype, T, 32, false, 512, sizeof(T) == 8 ? 1 : 2)
FOR_EACH_DTYPE(KERNELS)
