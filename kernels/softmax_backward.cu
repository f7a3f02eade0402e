// The gradient of the input from the result y and its gradient g: y * (g - sum of g * y), or for log-softmax
// g - exp(y) * sum of g. y and g are read twice and the gradient written once: 5/2x the bytes of a copy, 3/2x while the
// second reads come from the L2 cache.
#include "line.cuh"
#include "reduce.cuh"
#include "schedule.cuh"

template <typename T>
struct SoftmaxBackward {
    using R = Real<T>;
    const T *y, *g;
    __device__ __forceinline__ R term(int64_t i) const { return Element<T>::read(g[i]) * Element<T>::read(y[i]); }
    __device__ __forceinline__ R grad(int64_t i, R sum) const {
        return Element<T>::read(y[i]) * (Element<T>::read(g[i]) - sum);
    }
};

template <typename T>
struct LogSoftmaxBackward {
    using R = Real<T>;
    const T *y, *g;
    __device__ __forceinline__ R term(int64_t i) const { return Element<T>::read(g[i]); }
    __device__ __forceinline__ R grad(int64_t i, R sum) const {
        return Element<T>::read(g[i]) - exponential(Element<T>::read(y[i])) * sum;
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

template <typename T, template <typename> class Op>
__device__ __forceinline__ void columns(const T* y, const T* g, T* dx, int64_t lines, int64_t len, int64_t inner) {
    const Op<T> op{y, g};
    for (int64_t n = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; n < lines; n += gridDim.x * int64_t(blockDim.x)) {
        const auto line = StridedLine::of_thread(n, len, inner);
        const auto sum = sum_of_terms(line, op).value();
        line.each_offset([&](int64_t i) { dx[i] = Element<T>::write(op.grad(i, sum)); });
    }
}

template <typename T, template <typename> class Op>
__device__ __forceinline__ void reduce_lines(const T* y, const T* g, T* dx, int64_t lines, int64_t len, int64_t inner) {
    const Op<T> op{y, g};
    for (int64_t n = blockIdx.x; n < lines; n += gridDim.x) {
        const auto line = StridedLine::of_block(n, len, inner);
        const auto sum = block_reduce(sum_of_terms(line, op)).value();
        line.each_offset([&](int64_t i) { dx[i] = Element<T>::write(op.grad(i, sum)); });
    }
}

#define KERNEL(name, body, dtype, T, Op)                                                           \
    extern "C" __global__ void __launch_bounds__(1024)                                             \
        name##_##dtype(const T* y, const T* g, T* dx, int64_t lines, int64_t len, int64_t inner) { \
        body<T, Op>(y, g, dx, lines, len, inner);                                                  \
    }
#define KERNELS(dtype, T)                                                                           \
    IF_PROBABILITY(KERNEL(softmax_backward_columns, columns, dtype, T, SoftmaxBackward))            \
    IF_PROBABILITY(KERNEL(softmax_backward_reduce, reduce_lines, dtype, T, SoftmaxBackward))        \
    IF_LOG_PROBABILITY(KERNEL(log_softmax_backward_columns, columns, dtype, T, LogSoftmaxBackward)) \
    IF_LOG_PROBABILITY(KERNEL(log_softmax_backward_reduce, reduce_lines, dtype, T, LogSoftmaxBackward))
FOR_EACH_DTYPE(KERNELS)
