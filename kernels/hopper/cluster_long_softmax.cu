// Still longer lines of half precision, that are whole packs of 16 bytes: twice as many elements in the same registers.
#include "../register_softmax.cuh"

#define KERNELS(dtype, T) BOTH(CLUSTER_KERNEL, cluster_long, dtype, T, 128, true, 512, 1)
FOR_EACH_HALF_DTYPE(KERNELS)
