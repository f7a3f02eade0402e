// The gradient of the input from the result y and its gradient g: y * (g - sum of g * y), or for log-softmax
// g - exp(y) * sum of g. y and g are read twice and the gradient written once: 5/2x the bytes of a copy, 3/2x while the
// second reads come from the L2 cache.
#include "line.cuh"
#include "reduce.cuh"
#include "schedule.cuh"

template <typename T>
struct Backward {
    using R = Real<T>;
    const T *y, *g;
    bool log;
    __device__ __forceinline__ R term(int64_t i) const {
        const R own = Element<T>::read(g[i]);
        return log ? own : own * Element<T>::read(y[i]);
    }
    __device__ __forceinline__ R grad(int64_t i, R sum) const {
        const R own_y = Element<T>::read(y[i]), own_g = Element<T>::read(g[i]);
        return log ? own_g - exponential(own_y) * sum : own_y * (own_g - sum);
    }
};

template <typename Op>
__device__ __forceinline__ auto sum_of_terms(const StridedLine& line, const Op& op) {
    using R = typename Op::R;
    auto total = CompensatedSum<R>::empty();
    line.each_tile(R(0), [&](int64_t i) { return op.term(i); }, [&](R (&tile)[StridedLine::TILE]) {
        total.add(pairwise_sum(tile));
    });
    return total;
}

template <typename T>
__device__ __forceinline__ void columns(const T* y, const T* g, T* dx, int64_t lines, int64_t len, int64_t inner, bool log) {
    const Backward<T> op{y, g, log};
    for (int64_t n = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; n < lines; n += gridDim.x * int64_t(blockDim.x)) {
        const auto line = StridedLine::of_thread(n, len, inner);
        const auto sum = sum_of_terms(line, op).value();
        line.each_offset([&](int64_t i) { dx[i] = Element<T>::write(op.grad(i, sum)); });
    }
}

template <typename T>
__device__ __forceinline__ void reduce_lines(const T* y, const T* g, T* dx, int64_t lines, int64_t len, int64_t inner, bool log) {
    const Backward<T> op{y, g, log};
    for (int64_t n = blockIdx.x; n < lines; n += gridDim.x) {
        const auto line = StridedLine::of_block(n, len, inner);
        const auto sum = block_reduce(sum_of_terms(line, op)).value();
        line.each_offset([&](int64_t i) { dx[i] = Element<T>::write(op.grad(i, sum)); });
    }
}

#define KERNELS(dtype, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        backward_columns_##dtype(const T* y, const T* g, T* dx, int64_t lines, int64_t len, int64_t inner, int log) {  \
        columns<T>(y, g, dx, lines, len, inner, log);                                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        backward_reduce_##dtype(const T* y, const T* g, T* dx, int64_t lines, int64_t len, int64_t inner, int log) {   \
        reduce_lines<T>(y, g, dx, lines, len, inner, log);                                                             \
    }
FOR_EACH_DTYPE(KERNELS)
