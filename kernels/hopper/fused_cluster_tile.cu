// The forward pass.
#include "fused_cluster_tile.cuh"

#define KERNELS(dtype, T)                                                            \
    FUSED_CLUSTER_TILE(fused_cluster_tile, dtype, T, LogitsInTile, TILE_BLOCK<T>)    \
    FUSED_CLUSTER_TILE(fused_cluster_tile_capped, dtype, T, CappedInTile, TILE_BLOCK<T>)
#define HALF_KERNELS(dtype, T) KERNELS(dtype, T) FUSED_CLUSTER_TILE(fused_cluster_tile_scores, dtype, T, ScoresInTile, 512)
FOR_EACH_SINGLE_DTYPE(KERNELS)
FOR_EACH_DOUBLE_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(HALF_KERNELS)
