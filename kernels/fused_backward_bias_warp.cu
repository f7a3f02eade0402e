// The gradients, the bias' summed, of lines of whole packs of 16 bytes in the registers of part of a warp.
#include "fused_bias.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_BIAS_WARP(fused_backward_bias_warp, dtype, T, HELD_BACKWARD<T>, PACK<T>)
FOR_EACH_DTYPE(KERNELS)
