// Rows that begin at multiples of 16 bytes.
#include "../resident_softmax.cuh"

#define KERNEL(name, dtype, T, Output, ...)                              \
    extern "C" __global__ void __launch_bounds__(RESIDENT_THREADS, 1)    \
        name##_##dtype(const T* x, T* y, int len, int inner, int rows) { \
        resident_lines<T, Output>(x, y, len, inner, rows);               \
    }
#define KERNELS(dtype, T) BOTH(KERNEL, resident, dtype, T)
FOR_EACH_HALF_DTYPE(KERNELS)
