// Lines of any length at any offset.
#include "split_softmax.cuh"

#define KERNELS(dtype, T)                     \
    STATES(split_any_states, dtype, T, false) \
    BOTH(APPLY, split_any, dtype, T, false)
FOR_EACH_DTYPE(KERNELS)
