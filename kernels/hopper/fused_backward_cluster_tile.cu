// The gradients.
#include "fused_cluster_tile.cuh"

#define KERNELS(dtype, T)                                                                                                 \
    FUSED_BACKWARD_CLUSTER_TILE(fused_backward_cluster_tile, dtype, T, LogitsInTiles, LOGITS_IN_TILES_THREADS<T>, 1)      \
    FUSED_BACKWARD_CLUSTER_TILE(fused_backward_cluster_tile_capped, dtype, T, CappedInTiles, LOGITS_IN_TILES_THREADS<T>, 1)
// Once more where the first sum is no number
#define HALF_KERNELS(dtype, T) KERNELS(dtype, T) FUSED_BACKWARD_CLUSTER_TILE(fused_backward_cluster_tile_scores, dtype, T, ScoresInTiles, 512, 2)
FOR_EACH_SINGLE_DTYPE(KERNELS)
FOR_EACH_DOUBLE_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(HALF_KERNELS)
