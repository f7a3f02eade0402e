// Lines of any length and offset, a block to each.
#include "fused_any.cuh"

FOR_EACH_DTYPE(FUSED_BLOCK_ANY)
