// Rows that are not whole packs of 16 bytes.
#include "../strip_odd_softmax.cuh"

#define KERNELS(dtype, T) BOTH(STRIP_ODD_KERNEL, strip_odd, dtype, T)
FOR_EACH_HALF_DTYPE(KERNELS)
FOR_EACH_SINGLE_DTYPE(KERNELS)
