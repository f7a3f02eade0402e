// The gradients, of lines of whole packs of 16 bytes in the registers of a block.
#include "fused.cuh"

#define KERNELS(dtype, T)                                                                                                         \
    FUSED_BACKWARD_BLOCK(fused_backward_block, dtype, T, HELD_BACKWARD<T>, PACK<T>, Softcap::NONE, sizeof(T) == 4 ? 384 : 512) \
    FUSED_BACKWARD_BLOCK(fused_backward_block_capped, dtype, T, HELD_BACKWARD<T>, PACK<T>, Softcap::KEPT, 384)
FOR_EACH_DTYPE(KERNELS)
