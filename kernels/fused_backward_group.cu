// The gradients, of lines of any length along any dimension, both read twice and written once.
#include "fused_group.cuh"

#define KERNELS(dtype, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS, sizeof(T) == 8 ? 1 : 2)                                 \
        fused_backward_group_##dtype(const __grid_constant__ Fused<Real<T>> call, int shape, int64_t groups) {  \
        fused_group<T, true>(call, shape, groups);                                                      \
    }
FOR_EACH_DTYPE(KERNELS)
