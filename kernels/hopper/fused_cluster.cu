// Lines of whole packs of 16 bytes in the registers of a cluster of blocks, of which a multiprocessor holds several in different phases, and
// fetches what the next ones will need.
#include "../fused.cuh"

// Named kernels: fused_cluster_COUNT_dtype. BLOCKS: that a multiprocessor shall hold of THREADS threads each.
#define CLUSTER_KERNEL(name, dtype, T, THREADS, BLOCKS, BODY)                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                       \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int ahead) {                        \
        using R = Real<T>;                                                                              \
        using Exchange = ClusterExchange<R>;                                                            \
        __shared__ Normalizer<R> parts[MAX_CLUSTER * THREADS / 32];                                     \
        __shared__ ArrivalBarrier arrived;                                                              \
        Exchange::begin(arrived);                                                                       \
        BODY(call, WholeBlocks<R, Exchange>{{parts, arrived}, nullptr}, ahead);                         \
    }
#define KERNEL(dtype, T, COUNT, BLOCKS) \
    CLUSTER_KERNEL(fused_cluster_##COUNT, dtype, T, 512, BLOCKS, (fused_lines<T, COUNT, PACK<T>, true>))
#define SINGLE_KERNELS(dtype, T) KERNEL(dtype, T, 32, 1)
#define DOUBLE_KERNELS(dtype, T) KERNEL(dtype, T, 8, 2) KERNEL(dtype, T, 16, 1)
// With nothing but a scale, sinks and dropout the scores stay as they lie in memory.
#define HALF_KERNELS(dtype, T) KERNEL(dtype, T, 32, 2) CLUSTER_KERNEL(fused_cluster_scores, dtype, T, 256, 3, (fused_scores<T, 64, false>))
FOR_EACH_SINGLE_DTYPE(SINGLE_KERNELS)
FOR_EACH_DOUBLE_DTYPE(DOUBLE_KERNELS)
FOR_EACH_HALF_DTYPE(HALF_KERNELS)
