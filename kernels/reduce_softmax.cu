// Reduce softmax: one block per line. Each thread keeps an online state of its share of the line, the states are merged
// with warp shuffles and through shared memory, and a second pass normalises. Each element is read twice and written
// once; while the lines in flight fit the L2 cache the second read comes from there, and the ceiling is a copy.
#include "reduce.cuh"
#include "schedule.cuh"

template <typename T, template <typename> class Output>
__device__ __forceinline__ void reduce_lines(const T* x, T* y, int64_t lines, int64_t len, int64_t inner) {
    for (int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
        DirectLogits<T> logits{StridedLine::of_block(line, len, inner), x, y};
        logits.map(Output<Real<T>>(block_reduce(online_state(logits)).finish()));
    }
}

#define KERNEL(name, dtype, T, Output)                                                \
    extern "C" __global__ void __launch_bounds__(1024)                                \
        name##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int64_t inner) { \
        reduce_lines<T, Output>(x, y, lines, len, inner);                             \
    }
#define KERNELS(dtype, T)                                         \
    IF_PROBABILITY(KERNEL(reduce_softmax, dtype, T, Probability)) \
    IF_LOG_PROBABILITY(KERNEL(reduce_log_softmax, dtype, T, LogProbability))
FOR_EACH_DTYPE(KERNELS)
