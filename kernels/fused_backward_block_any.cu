// The gradients, of lines of any length and offset in the registers of a block.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_BLOCK(fused_backward_block_any, dtype, T, HELD_ANY, 1)
FOR_EACH_DTYPE(KERNELS)
