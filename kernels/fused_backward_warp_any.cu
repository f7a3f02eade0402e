// The gradients, of lines of any length and offset in the registers of part of a warp.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_WARP(fused_backward_warp_any, dtype, T, HELD_ANY, 1)
FOR_EACH_DTYPE(KERNELS)
