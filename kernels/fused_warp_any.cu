// Lines of any length and offset, several to a block.
#include "fused_any.cuh"

FOR_EACH_DTYPE(FUSED_WARP_ANY)
