// Lines of any length at any offset.
#include "../grid_softmax.cuh"

#define KERNELS(dtype, T)                                                                                                           \
    extern "C" __global__ void __launch_bounds__(GRID_THREADS, 1)                                                                   \
        grid_softmax_##dtype(const T* x, Normalizer<float>* parts, T* y, int lines, int64_t len, int log, Scaling<float> scaling) { \
        grid_lines<T>(x, parts, y, lines, len, log, scaling);                                                                       \
    }
FOR_EACH_HALF_DTYPE(KERNELS)
FOR_EACH_SINGLE_DTYPE(KERNELS)
