// Lines of any length and offset of half precision for which half the threads are enough if each has more of them.
#include "fused_tile.cuh"

#define KERNELS(dtype, T)                                  \
    FUSED_TILE(fused_tile_many, dtype, T, ManyInTile, 384) \
    FUSED_TILE(fused_tile_capped_many, dtype, T, CappedManyInTile, 384)
FOR_EACH_HALF_DTYPE(KERNELS)
