#include "split_softmax.cuh"

#define STATES(dtype, T)                                                                           \
    extern "C" __global__ void __launch_bounds__(512)                                              \
        split_states_##dtype(const T* x, Normalizer<Real<T>>* parts, int64_t lines, int64_t len) { \
        split_states<T>(x, parts, lines, len);                                                     \
    }
#define APPLY(name, dtype, T, Output)                                                                    \
    extern "C" __global__ void __launch_bounds__(512)                                                    \
        name##_##dtype(const T* x, const Normalizer<Real<T>>* parts, T* y, int64_t lines, int64_t len) { \
        split_apply<T, Output>(x, parts, y, lines, len);                                                 \
    }
#define KERNELS(dtype, T)                                       \
    STATES(dtype, T)                                            \
    IF_PROBABILITY(APPLY(split_softmax, dtype, T, Probability)) \
    IF_LOG_PROBABILITY(APPLY(split_log_softmax, dtype, T, LogProbability))
FOR_EACH_DTYPE(KERNELS)
