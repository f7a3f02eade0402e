// Lines of whole packs of 16 bytes, in the registers of part of a warp.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_WARP(fused_warp, dtype, T, HELD<T>, PACK<T>, false)
FOR_EACH_DTYPE(KERNELS)
