// The gradients, of lines of any length and offset, without a softcap.
#include "fused_tile.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_TILE(fused_backward_tile, dtype, T, LogitsInTiles, sizeof(T) == 2 ? 320 : 512)
FOR_EACH_DTYPE(KERNELS)
