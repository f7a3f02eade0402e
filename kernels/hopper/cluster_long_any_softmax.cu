// Still longer lines of half precision, of any length at any offset.
#include "../register_softmax.cuh"

#define KERNELS(dtype, T) BOTH(CLUSTER_KERNEL, cluster_long_any, dtype, T, 128, false, 512, 1)
FOR_EACH_HALF_DTYPE(KERNELS)
