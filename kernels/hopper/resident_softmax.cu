// Named kernels: NAME_HELD_dtype.
#include "../resident_softmax.cuh"

#define KERNEL(name, dtype, T, Output, HELD)                                                                                          \
    extern "C" __global__ void __launch_bounds__(RESIDENT_WARPS * 32, 1)                                                              \
        name##_##HELD##_##dtype(const __grid_constant__ TensorMap map, const T* x, T* y, int len, int inner, int rows, int streams,   \
                                Scaling<float> scaling) {                                                                             \
        resident_lines<T, Output, HELD>(map, x, y, len, inner, rows, streams, scaling);                                               \
    }
#define KERNELS(dtype, T) BOTH(KERNEL, resident, dtype, T, 0) BOTH(KERNEL, resident, dtype, T, 8)
FOR_EACH_HALF_DTYPE(KERNELS)
