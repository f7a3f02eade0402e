// What a loss makes of its lines' statistics: a loss for each line, or the sum or mean of all, and back the gradients of the statistics. Of
// a line two to five numbers are read and one is written, or up to three backward: next to nothing beside its logits, so what counts is
// that the launches are few. Terms and sums are of f64, which no number of lines rounds off.
#include "reduce.cuh"
#include "start.cuh"
#include "targets.cuh"

// What the logarithms of probabilities and the square of the log-sum-exp count; 0 where there are none of these.
struct Factors {
    double of_target, of_smooth, of_square;
    bool weighted, mean;
};

// Of a line or of many: what targets and classes cost, and what the mean of that is over; the squares, and what theirs is over.
struct Terms {
    double cost, weight, square, count;

    static __device__ __forceinline__ Terms empty() { return {}; }
    __device__ __forceinline__ void merge(const Terms& other) {
        cost += other.cost, weight += other.weight, square += other.square, count += other.count;
    }
    template <typename F>
    __device__ __forceinline__ Terms each(F f) const { return {f(cost), f(weight), f(square), f(count)}; }
    __device__ __forceinline__ Terms shuffle_xor(int mask) const {
        return each([mask](double x) { return __shfl_xor_sync(~0u, x, mask); });
    }
    __device__ __forceinline__ Terms of_first_lane() const { return each([](double x) { return __shfl_sync(~0u, x, 0); }); }
    __device__ __forceinline__ double loss(bool mean) const { return mean ? cost / weight + square / count : cost + square; }
};

template <typename R>
__device__ __forceinline__ double log_sum_exp(const R* statistics, int64_t lines, int64_t line) {
    return double(statistics[MAX * lines + line]) + double(statistics[LOG_SUM * lines + line]);
}

template <typename R>
__device__ __forceinline__ Terms terms_of(const R* statistics, int64_t lines, int64_t line, const Factors& factors) {
    const auto read = [&](int which) { return double(statistics[which * lines + line]); };
    const double weight = read(WEIGHT), count = factors.weighted ? read(KEPT) : weight;
    double cost = read(LOG_P), square = 0;
    if (factors.weighted) cost *= weight;
    cost *= -factors.of_target;
    if (factors.of_smooth != 0) cost -= factors.of_smooth * read(SMOOTH);
    if (factors.of_square != 0) {
        const double of_line = log_sum_exp(statistics, lines, line);
        square = factors.of_square * of_line * of_line;
    }
    return {cost, weight, square, count};
}

// The sum of the terms of all lines of a grid's blocks that are this one's.
template <typename R>
__device__ __forceinline__ Terms sum_of_lines(const R* statistics, int64_t lines, int64_t first, int64_t step, const Factors& factors) {
    Terms terms{};
#pragma unroll 2
    for (int64_t line = first; line < lines; line += step) terms.merge(terms_of(statistics, lines, line, factors));
    return block_reduce(terms);
}

// The sum of all, in each thread: of the `count` parts that blocks have left, or where there are few lines of these.
template <typename R>
__device__ __forceinline__ Terms sum_of_all(const R* statistics, int64_t lines, const Terms* parts, int count, const Factors& factors) {
    if (count == 0) return sum_of_lines(statistics, lines, threadIdx.x, blockDim.x, factors);
    Terms terms{};
    for (int part = threadIdx.x; part < count; part += blockDim.x) terms.merge(parts[part]);
    return block_reduce(terms);
}

#define PARAMETERS(R) \
    const R *statistics, const R *gradients, R *out, Terms *parts, int64_t lines, int count, int each, const Factors &factors

template <typename R>
__device__ __forceinline__ void of_each_line(PARAMETERS(R)) {
    const int64_t line = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (line < lines) out[line] = R(terms_of(statistics, lines, line, factors).loss(false));
}

template <typename R>
__device__ __forceinline__ void of_parts(PARAMETERS(R)) {
    const int64_t first = blockIdx.x * int64_t(blockDim.x) + threadIdx.x, step = gridDim.x * int64_t(blockDim.x);
    const Terms sum = sum_of_lines(statistics, lines, first, step, factors);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

template <typename R>
__device__ __forceinline__ void of_all(PARAMETERS(R)) {
    const Terms sum = sum_of_all(statistics, lines, parts, count, factors);
    if (threadIdx.x == 0) *out = R(sum.loss(factors.mean));
}

// Of a thread one line; `each`: there is a gradient for each line's loss.
template <typename R>
__device__ __forceinline__ void backward(PARAMETERS(R)) {
    Terms over{0, 1, 0, 1};
    if (factors.mean) over = sum_of_all(statistics, lines, parts, count, factors);
    const int64_t line = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (line >= lines) return;
    const double gradient = gradients[each ? line : 0], of_cost = gradient / over.weight;
    const double weight = factors.weighted ? double(statistics[WEIGHT * lines + line]) : 1.0;
    out[OF_LOG_P * lines + line] = R(-factors.of_target * weight * of_cost);
    if (factors.of_smooth == 0 && factors.of_square == 0) return;
    double of_square = 0;
    if (factors.of_square != 0) of_square = 2 * factors.of_square * log_sum_exp(statistics, lines, line) * (gradient / over.count);
    out[OF_LOG_SUM_EXP * lines + line] = R(of_square);
    out[OF_SMOOTH * lines + line] = factors.of_smooth != 0 ? R(-factors.of_smooth * of_cost) : R(0);
}

#define KERNEL(name, body, dtype, R)                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024, 1)                                                                         \
        name##_##dtype(const R* statistics, const R* gradients, R* out, Terms* parts, int64_t lines, int count, int each,         \
                       double of_target, double of_smooth, double of_square, int weighted, int mean) {                            \
        wait_for_kernel_before();                                                                                                 \
        const Factors factors{of_target, of_smooth, of_square, weighted != 0, mean != 0};                                         \
        body<R>(statistics, gradients, out, parts, lines, count, each, factors);                                                  \
    }
#define KERNELS(dtype, R)                                  \
    KERNEL(loss_of_each_line, of_each_line, dtype, R)      \
    KERNEL(loss_of_parts, of_parts, dtype, R)              \
    KERNEL(loss_of_all_lines, of_all, dtype, R)            \
    KERNEL(loss_of_lines_backward, backward, dtype, R)
FOR_EACH_SINGLE_DTYPE(KERNELS)
FOR_EACH_DOUBLE_DTYPE(KERNELS)
