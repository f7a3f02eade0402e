// Lines of any length and offset, whatever is asked around them, with a softcap.
#include "fused_tile.cuh"

#define KERNELS(dtype, T) FUSED_TILE(fused_tile_capped, dtype, T, CappedInTile, TILE_BLOCK<T>)
FOR_EACH_DTYPE(KERNELS)
