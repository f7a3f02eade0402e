// Lines of whole packs of 16 bytes in the registers of a cluster of blocks.
#include "../fused.cuh"

#define KERNELS(dtype, T)                                                                            \
    extern "C" __global__ void __launch_bounds__(512, 1)                                             \
        fused_cluster_##dtype(const __grid_constant__ Fused<Real<T>> call) {                         \
        using R = Real<T>;                                                                           \
        using Exchange = ClusterExchange<R>;                                                         \
        __shared__ Normalizer<R> parts[MAX_CLUSTER * 512 / 32];                                      \
        __shared__ ArrivalBarrier arrived;                                                           \
        Exchange::begin(arrived);                                                                    \
        fused_lines<T, sizeof(T) == 8 ? 16 : 32, PACK<T>, true>(call, WholeBlocks<R, Exchange>{{parts, arrived}, nullptr}); \
    }
FOR_EACH_DTYPE(KERNELS)
