// Lines of any length, of an input at any offset.
#include "register_softmax.cuh"

#define KERNEL(name, dtype, T, Output, PACKS)                                                              \
    extern "C" __global__ void __launch_bounds__(PACKS * Pack<T>::SIZE * sizeof(Real<T>) > 64 ? 512 : 1024)                  \
        name##_##PACKS##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int group) {                \
        register_lines<T, Output, PACKS, false>(x, y, lines, len, group);                                   \
    }
#define KERNELS(dtype, T)                                          \
    IF_PROBABILITY(KERNEL(register_any_softmax, dtype, T, Probability, 1))                                      \
    IF_PROBABILITY(KERNEL(register_any_softmax, dtype, T, Probability, 2))                                      \
    IF_PROBABILITY(KERNEL(register_any_softmax, dtype, T, Probability, 4))                                      \
    IF_LOG_PROBABILITY(KERNEL(register_any_log_softmax, dtype, T, LogProbability, 1))                           \
    IF_LOG_PROBABILITY(KERNEL(register_any_log_softmax, dtype, T, LogProbability, 2))                           \
    IF_LOG_PROBABILITY(KERNEL(register_any_log_softmax, dtype, T, LogProbability, 4))
#define EIGHT_PACKS(dtype, T)                                      \
    IF_PROBABILITY(KERNEL(register_any_softmax, dtype, T, Probability, 8))                                      \
    IF_LOG_PROBABILITY(KERNEL(register_any_log_softmax, dtype, T, LogProbability, 8))
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_WIDE_DTYPE(EIGHT_PACKS)
