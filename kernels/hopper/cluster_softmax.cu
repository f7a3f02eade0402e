// Longer lines that are whole packs of 16 bytes, in the registers of a cluster's blocks. No block has 640 threads: the bound
// leaves a thread the registers with which a multiprocessor holds two blocks of 320. Of half precision twice as many elements
// take the same registers.
#include "../register_softmax.cuh"

#define HALF(dtype, T)                                         \
    BOTH(CLUSTER_KERNEL, cluster, dtype, T, 64, true, 512, 2) \
    BOTH(CLUSTER_KERNEL, cluster, dtype, T, 128, true, 512, 1)
#define SINGLE(dtype, T) BOTH(CLUSTER_KERNEL, cluster, dtype, T, 64, true, 640, 1)
#define DOUBLE(dtype, T) BOTH(CLUSTER_KERNEL, cluster, dtype, T, 32, true, 512, 1)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
