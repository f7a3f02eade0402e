// The first row begins anywhere, and the others multiples of 16 bytes behind it. Strips of 256 bytes (half precision: 128, whose
// words come without conflicts between banks).
#include "../strip_softmax.cuh"

#define HALF(dtype, T) BOTH(STRIP_KERNEL, strip_any, dtype, T, 32, 1, 64, false)
#define SINGLE(dtype, T) BOTH(STRIP_KERNEL, strip_any, dtype, T, 32, 2, 32, false)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
