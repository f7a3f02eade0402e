// The gradients, of lines of any length and offset, without a softcap.
#include "fused_tile.cuh"

#define KERNELS(dtype, T) FUSED_BACKWARD_TILE(fused_backward_tile, dtype, T, LogitsInTiles, LOGITS_IN_TILES_THREADS<T>)
FOR_EACH_DTYPE(KERNELS)
