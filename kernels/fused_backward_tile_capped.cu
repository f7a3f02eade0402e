// The gradients, of lines of any length and offset, with a softcap.
#include "fused_tile.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_TILE(fused_backward_tile_capped, dtype, T, CappedInTiles, sizeof(T) == 2 ? 320 : 512)
FOR_EACH_DTYPE(KERNELS)
