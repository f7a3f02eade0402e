// Online softmax: one thread per line, two passes. Each element is read twice and written once: 1.5x the bytes of a copy,
// which is the floor of this schedule wherever a line does not stay in a cache.
#include "thread_per_line.cuh"

template <typename Logits>
struct Online {
    static __device__ __forceinline__ auto state(Logits& logits) { return online_state(logits); }
};

#define KERNELS(dtype, T)                                                          \
    IF_PROBABILITY(THREAD_PER_LINE(online_softmax, dtype, T, Online, Probability)) \
    IF_LOG_PROBABILITY(THREAD_PER_LINE(online_log_softmax, dtype, T, Online, LogProbability))
FOR_EACH_DTYPE(KERNELS)
