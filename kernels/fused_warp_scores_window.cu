// Lines of half precision, of whole packs of 16 bytes, of which a scale, a window, sinks, dropout or logarithms are asked: a warp to each.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_WARP_SCORES(fused_warp_scores_window, dtype, T, 64, true)
FOR_EACH_HALF_DTYPE(KERNELS)
