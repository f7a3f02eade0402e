// Lines of any length and offset, of scores of half precision that are the logits but for a scale, a mask and a window.
#include "fused_tile.cuh"

#define KERNELS(dtype, T) FUSED_TILE(fused_tile_scores, dtype, T, ScoresInTile, 512)
FOR_EACH_HALF_DTYPE(KERNELS)
