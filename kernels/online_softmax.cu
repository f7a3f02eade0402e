// Online softmax: one thread per line, two passes. Each element is read twice and written once: 1.5x the bytes of a copy,
// which is the floor of this schedule wherever a line does not stay in a cache.
#include "thread_per_line.cuh"

template <typename Logits>
struct Online {
    static __device__ __forceinline__ auto state(Logits& logits) { return online_state(logits); }
};

#define KERNELS(dtype, T) THREAD_PER_LINE(online_softmax, dtype, T, Online)
FOR_EACH_DTYPE(KERNELS)
