// Lines of any length and offset, in the registers of a block.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_BLOCK(fused_block_any, dtype, T, HELD_ANY, 1, true)
FOR_EACH_DTYPE(KERNELS)
