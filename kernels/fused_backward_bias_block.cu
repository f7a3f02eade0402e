// The gradients, the bias' summed, of lines of whole packs of 16 bytes in the registers of a block.
#include "fused_bias.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_BIAS_BLOCK(fused_backward_bias_block, dtype, T, HELD_BACKWARD<T>, PACK<T>)
FOR_EACH_DTYPE(KERNELS)
