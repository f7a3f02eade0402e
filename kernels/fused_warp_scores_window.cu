// Lines of half precision, of whole packs of 16 bytes, of which only a scale and a window are asked: a warp to each.
#include "fused.cuh"

#define KERNELS(dtype, T) FUSED_WARP_SCORES(fused_warp_scores_window, dtype, T, 64, true)
FOR_EACH_HALF_DTYPE(KERNELS)
