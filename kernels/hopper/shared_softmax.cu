// Lines of whole packs of 16 bytes; of the output alone, where it is said that the input is shifted.
#include "../shared_softmax.cuh"

#define KERNEL(name, dtype, T, Output, ALIGNED)                                                \
    extern "C" __global__ void __launch_bounds__(SHARED_THREADS, 1)                            \
        name##_##dtype(const T* x, T* y, int64_t lines, int64_t len, Scaling<float> scaling) { \
        shared_lines<T, Output, ALIGNED>(x, y, lines, len, scaling);                           \
    }
#define KERNELS(dtype, T)                  \
    BOTH(KERNEL, shared, dtype, T, true)   \
    BOTH(KERNEL, shared_shifted, dtype, T, false)
FOR_EACH_HALF_DTYPE(KERNELS)
