// Safe softmax: one thread per line, three passes. Each element is read three times and written once: 2x the bytes of a
// copy, which is the floor of this schedule wherever a line does not stay in a cache.
#include "thread_per_line.cuh"

template <typename Logits>
struct Safe {
    static __device__ __forceinline__ auto state(Logits& logits) { return safe_state(logits); }
};

#define KERNELS(dtype, T) THREAD_PER_LINE(safe_softmax, dtype, T, Safe)
FOR_EACH_DTYPE(KERNELS)
