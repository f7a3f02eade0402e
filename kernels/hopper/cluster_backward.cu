// Lines of y and g in the registers of a cluster of blocks.
#include "../register_backward.cuh"

#define CLUSTER_KERNELS(dtype, T, COUNT, BLOCKS) BACKWARD_KERNELS(BACKWARD_CLUSTER_KERNEL, backward_cluster, dtype, T, COUNT, BLOCKS)
#define HALF(dtype, T) CLUSTER_KERNELS(dtype, T, 32, 2) CLUSTER_KERNELS(dtype, T, 64, 1)
#define SINGLE(dtype, T) CLUSTER_KERNELS(dtype, T, 32, 1)
#define DOUBLE(dtype, T) CLUSTER_KERNELS(dtype, T, 16, 1)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
