// Lines that are whole packs of 16 bytes.
#include "split_softmax.cuh"

#define KERNELS(dtype, T)                \
    STATES(split_states, dtype, T, true) \
    BOTH(APPLY, split, dtype, T, true)
FOR_EACH_DTYPE(KERNELS)
