// The gradients, of lines of any length along any dimension, read three times and written once.
#include "fused.cuh"

#define KERNELS(dtype, T)                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                  \
        fused_backward_reduce_##dtype(const __grid_constant__ Fused<Real<T>> call) {   \
        fused_reduce<T, true>(call);                                                   \
    }                                                                                  \
    extern "C" __global__ void __launch_bounds__(512)                                  \
        fused_backward_columns_##dtype(const __grid_constant__ Fused<Real<T>> call) {  \
        fused_columns<T, true>(call);                                                  \
    }
FOR_EACH_DTYPE(KERNELS)
