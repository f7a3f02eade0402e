// Rows that begin at multiples of 16 bytes, in strips of 128 bytes.
#include "../strip_softmax.cuh"

#define KERNELS(dtype, T) BOTH(STRIP_KERNEL, strip, dtype, T, 16, 2, 32, true)
FOR_EACH_HALF_DTYPE(KERNELS)
FOR_EACH_SINGLE_DTYPE(KERNELS)
