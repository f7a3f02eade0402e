// Lines of y and g in the registers of a cluster of blocks.
#include "../register_backward.cuh"

#define HALF(dtype, T) BACKWARD_CLUSTER_KERNEL(dtype, T, 32, 2) BACKWARD_CLUSTER_KERNEL(dtype, T, 64, 1)
#define SINGLE(dtype, T) BACKWARD_CLUSTER_KERNEL(dtype, T, 32, 1)
#define DOUBLE(dtype, T) BACKWARD_CLUSTER_KERNEL(dtype, T, 16, 1)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
