// The gradients, of lines of any length and offset.
#include "fused_tile.cuh"

FOR_EACH_DTYPE(FUSED_BACKWARD_TILE)
