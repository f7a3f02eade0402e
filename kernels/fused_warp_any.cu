// Lines of any length and offset, in the registers of part of a warp.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_WARP(fused_warp_any, dtype, T, HELD_ANY, 1, true)
FOR_EACH_DTYPE(KERNELS)
