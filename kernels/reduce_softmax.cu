// Reduce softmax: one block per line. Each thread keeps an online state of its share of the line, the states are merged
// with warp shuffles and through shared memory, and a second pass normalises. Each element is read twice and written
// once; while the lines in flight fit the L2 cache the second read comes from there, and the ceiling is a copy.
#include "reduce.cuh"
#include "schedule.cuh"

// `log`: the logarithms of the probabilities.
template <typename T>
__device__ __forceinline__ void reduce_lines(const T* x, T* y, int64_t lines, int64_t len, int64_t inner, bool log, Scaling<Real<T>> scaling) {
    for (int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
        DirectLogits<T> logits{StridedLine::of_block(line, len, inner), x, y, scaling};
        map_output(logits, block_reduce(online_state(logits)), log);
    }
}

#define KERNELS(dtype, T)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(1024)                                                                            \
        reduce_softmax_##dtype(const T* x, T* y, int64_t lines, int64_t len, int64_t inner, int log, Scaling<Real<T>> scaling) { \
        reduce_lines<T>(x, y, lines, len, inner, log, scaling);                                                                   \
    }
FOR_EACH_DTYPE(KERNELS)
