// Short lines, in the registers of a part of a warp: whole packs of 16 bytes, or of any length and offset.
#include "register_softmax.cuh"

#define KERNELS(dtype, T)                           \
    BOTH(WARP_KERNEL, warp, dtype, T, 8, true)      \
    BOTH(WARP_KERNEL, warp, dtype, T, 16, true)     \
    BOTH(WARP_KERNEL, warp_any, dtype, T, 8, false) \
    BOTH(WARP_KERNEL, warp_any, dtype, T, 16, false)
FOR_EACH_DTYPE(KERNELS)
