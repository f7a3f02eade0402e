// The gradients, of lines of any length and offset, with a softcap.
#include "fused_tile.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_TILE(fused_backward_tile_capped, dtype, T, CappedInTiles, LOGITS_IN_TILES_THREADS<T>)
FOR_EACH_DTYPE(KERNELS)
