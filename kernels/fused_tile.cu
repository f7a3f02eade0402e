// Lines of any length and offset, whatever is asked around them but for a softcap.
#include "fused_tile.cuh"

#define KERNELS(dtype, T) FUSED_TILE(fused_tile, dtype, T, LogitsInTile, TILE_BLOCK<T>)
FOR_EACH_DTYPE(KERNELS)
