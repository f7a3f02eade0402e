// Lines of whole packs of 16 bytes, in the registers of a block.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_BLOCK(fused_block, dtype, T, HELD<T>, PACK<T>, false)
FOR_EACH_DTYPE(KERNELS)
