// Rows that begin at multiples of 16 bytes, in strips of 256 bytes.
#include "../strip_softmax.cuh"

#define KERNELS(dtype, T) BOTH(STRIP_KERNEL, strip_wide, dtype, T, 32, 2, 32, true)
FOR_EACH_HALF_DTYPE(KERNELS)
FOR_EACH_SINGLE_DTYPE(KERNELS)
