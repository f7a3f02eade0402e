#include "cluster_softmax.cuh"

#define KERNEL(name, dtype, T, Output, PACKS)                                    \
    extern "C" __global__ void __launch_bounds__(1024)                           \
        name##_##PACKS##_##dtype(const T* x, T* y, int64_t lines, int64_t len) { \
        cluster_lines<T, Output, PACKS>(x, y, lines, len);                       \
    }
#define KERNELS(dtype, T)                                                        \
    IF_PROBABILITY(KERNEL(cluster_softmax, dtype, T, Probability, 2))            \
    IF_PROBABILITY(KERNEL(cluster_softmax, dtype, T, Probability, 4))            \
    IF_LOG_PROBABILITY(KERNEL(cluster_log_softmax, dtype, T, LogProbability, 2)) \
    IF_LOG_PROBABILITY(KERNEL(cluster_log_softmax, dtype, T, LogProbability, 4))
#define EIGHT_PACKS(dtype, T)                                         \
    IF_PROBABILITY(KERNEL(cluster_softmax, dtype, T, Probability, 8)) \
    IF_LOG_PROBABILITY(KERNEL(cluster_log_softmax, dtype, T, LogProbability, 8))
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_WIDE_DTYPE(EIGHT_PACKS)
