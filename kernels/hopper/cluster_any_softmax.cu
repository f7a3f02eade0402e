// Longer lines of any length at any offset, in the registers of a cluster's blocks, bound as in cluster_softmax.cu. Of f32 also with
// half the elements to a thread, for few lines.
#include "../register_softmax.cuh"

#define HALF(dtype, T)                                              \
    BOTH(CLUSTER_KERNEL, cluster_any, dtype, T, 64, false, 512, 2)  \
    BOTH(CLUSTER_KERNEL, cluster_any, dtype, T, 128, false, 512, 1)
#define SINGLE(dtype, T)                                            \
    BOTH(CLUSTER_KERNEL, cluster_any, dtype, T, 64, false, 640, 1)  \
    BOTH(CLUSTER_KERNEL, cluster_any, dtype, T, 32, false, 640, 1)
#define DOUBLE(dtype, T) BOTH(CLUSTER_KERNEL, cluster_any, dtype, T, 32, false, 512, 1)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
