// Lines of any length along any dimension, read twice and written once: by a block each, or by a thread each.
#include "fused.cuh"

#define KERNELS(dtype, T)                                                          \
    extern "C" __global__ void __launch_bounds__(512)                              \
        fused_reduce_##dtype(const __grid_constant__ Fused<Real<T>> call) {        \
        fused_reduce<T, false>(call);                                              \
    }                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                              \
        fused_columns_##dtype(const __grid_constant__ Fused<Real<T>> call) {       \
        fused_columns<T, false>(call);                                             \
    }
FOR_EACH_DTYPE(KERNELS)
