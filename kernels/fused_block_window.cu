// Lines of whole packs of 16 bytes, in the registers of a block. Parts of them may be outside a window.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_BLOCK(fused_block_window, dtype, T, HELD<T>, PACK<T>, true)
FOR_EACH_DTYPE(KERNELS)
