// The gradients, of lines of whole packs of 16 bytes in the registers of part of a warp.
#include "fused.cuh"

#define KERNELS(dtype, T)                                                                            \
    FUSED_BACKWARD_WARP(fused_backward_warp, dtype, T, HELD_BACKWARD<T>, PACK<T>, Softcap::NONE) \
    FUSED_BACKWARD_WARP(fused_backward_warp_capped, dtype, T, HELD_BACKWARD<T>, PACK<T>, Softcap::KEPT)
FOR_EACH_DTYPE(KERNELS)
