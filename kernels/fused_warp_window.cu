// Lines of whole packs of 16 bytes, in the registers of part of a warp. Parts of them may be outside a window.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_WARP(fused_warp_window, dtype, T, HELD<T>, PACK<T>, true)
FOR_EACH_DTYPE(KERNELS)
