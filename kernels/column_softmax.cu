#include "column_softmax.cuh"

#define KERNEL(name, dtype, T, Output, SIZE, ROWS)                                 \
    extern "C" __global__ void __launch_bounds__(1024)                             \
        name##_##dtype(const T* x, T* y, int64_t len, int64_t inner, int across) { \
        column_lines<T, Output, SIZE, ROWS>(x, y, len, inner, across);             \
    }
// Packs of four elements (two of f64), or single ones where rows are not whole packs.
#define KERNELS(dtype, T)                                                                                       \
    IF_PROBABILITY(KERNEL(column_softmax_packs, dtype, T, Probability, (sizeof(T) == 8 ? 2 : 4), 8))            \
    IF_PROBABILITY(KERNEL(column_softmax_singles, dtype, T, Probability, 1, 16))                                \
    IF_LOG_PROBABILITY(KERNEL(column_log_softmax_packs, dtype, T, LogProbability, (sizeof(T) == 8 ? 2 : 4), 8)) \
    IF_LOG_PROBABILITY(KERNEL(column_log_softmax_singles, dtype, T, LogProbability, 1, 16))
FOR_EACH_DTYPE(KERNELS)
