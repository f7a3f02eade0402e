// The gradient of softmax with a scale along another dimension than the last, in registers as column_share.cuh has them: what is read is read once.
#include "column_share.cuh"
#include "fused.cuh"

// The merge of `count` parts of one column that stand `columns` apart; the dots have the exponentials as their weights or, where it is said so, none.
template <typename R>
__device__ __forceinline__ Weighted<R> merge_column(const Weighted<R>* parts, int count, int columns, bool unweighted) {
    R max = negative_infinity<R>(), sum = 0, dot = 0;
#pragma unroll 4
    for (int i = 0; i < count; i++) max = greater(max, parts[i * columns].max);
    const R reference = part_reference(max);
#pragma unroll 4
    for (int i = 0; i < count; i++) {
        const Weighted<R> part = parts[i * columns];
        const R weight = quick_exponential(part.max - reference);
        sum += part.sum * weight;
        dot += unweighted ? part.dot : part.dot * weight;
    }
    return {max, sum, dot};
}

// The scores that a thread has of SIZE columns, as logits.
template <typename T, int SIZE, bool WHOLE, int ROWS>
struct ColumnLogits {
    using R = Real<T>;
    using Share = ColumnShare<T, SIZE, WHOLE, ROWS>;
    Pack<T, SIZE> scores[ROWS];
    R scale;

    __device__ __forceinline__ R operator()(int k, int i) const { return product(element_of<T>(scores[k], i), scale); }

    // The greatest in each column, of all lanes of a warp that have it
    __device__ __forceinline__ void maxima(const Share& own, R (&max)[SIZE]) const {
        constexpr int PER_UNIT = Share::PER_UNIT;
        Unit<T> greatest[SIZE / PER_UNIT];
#pragma unroll
        for (auto& unit : greatest) unit = no_elements<T>();
        own.each([&](int k) {
#pragma unroll
            for (int u = 0; u < SIZE / PER_UNIT; u++) greatest[u] = greater(greatest[u], scores[k].units[u]);
        });
#pragma unroll
        for (int u = 0; u < SIZE / PER_UNIT; u++) {
            if (own.shares()) greatest[u] = reduce_column(greatest[u], own.across, [](Unit<T> a, Unit<T> b) { return greater(a, b); });
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) max[u * PER_UNIT + i] = product(Element<T>::of_unit(greatest[u], i), scale);
        }
    }
};

// The scores' gradient from them again, and the gradient of the result: 3/2x the bytes of a copy. What is -inf takes no part, and has the gradient 0
// whatever arrives there. Shared memory: (warps + blocks + 1) x columns states with a dot.
template <typename T, int SIZE, bool WHOLE, int ROWS>
__device__ __forceinline__ void fused_backward_columns(const Fused<Real<T>>& call, int shift) {
    using R = Real<T>;
    extern __shared__ uint4 shared[];
    __shared__ ArrivalBarrier arrived;
    const ColumnShare<T, SIZE, WHOLE, ROWS> own(call.len, call.inner, shift, arrived, sizeof(Weighted<R>));
    Pack<T, SIZE> held[2][ROWS];
    ColumnLogits<T, SIZE, WHOLE, ROWS> logit;
    logit.scale = call.scale;
    wait_for_kernel_before();
    own.load({static_cast<const T*>(call.scores), static_cast<const T*>(call.gradient)}, {no_elements<T>(), Unit<T>{}}, held);
#pragma unroll
    for (int k = 0; k < ROWS; k++) logit.scores[k] = held[0][k];
    auto& gradients = held[1];
    const bool log = call.log;
    R max[SIZE], sums[SIZE][2] = {}, dots[SIZE][2] = {};
    logit.maxima(own, max);
    own.each([&](int k) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const R z = logit(k, i), g = z == negative_infinity<R>() ? R(0) : element_of<T>(gradients[k], i);
            const R e = Element<T>::exponential(z - part_reference(max[i]));
            sums[i][k % 2] += e;
            dots[i][k % 2] = log ? dots[i][k % 2] + g : fma(g, e, dots[i][k % 2]);
        }
    });
    Weighted<R> line[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        const R dot = dots[i][0] + dots[i][1];
        line[i] = {max[i], (sums[i][0] + sums[i][1]) * unscale<T>(), log ? dot : dot * unscale<T>()};
    }
    if (own.shares()) {
        const auto add = [](R a, R b) { return a + b; };
#pragma unroll
        for (auto& of_column : line) {
            of_column.sum = reduce_column(of_column.sum, own.across, add);
            of_column.dot = reduce_column(of_column.dot, own.across, add);
        }
        own.merge(line, shared, [log](const Weighted<R>* parts, int count, int columns) { return merge_column(parts, count, columns, log); });
    }
    R reference[SIZE], factor[SIZE], dot[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        const R inverse = reciprocal(line[i].sum);
        reference[i] = part_reference(line[i].max);
        factor[i] = inverse * unscale<T>();
        dot[i] = log ? line[i].dot : line[i].dot * inverse;
    }
    forget(logit.scores);
    forget(gradients);
    own.store(static_cast<T*>(call.result), [&](int k, int i) {
        const R z = logit(k, i), g = element_of<T>(gradients[k], i), p = Element<T>::exponential(z - reference[i]) * factor[i];
        return z == negative_infinity<R>() ? R(0) : (log ? g - p * dot[i] : p * (g - dot[i])) * logit.scale;
    });
}

// Named kernels: NAME_SIZExROWS_dtype, as column_backward.cu has them. BLOCKS: that a multiprocessor shall hold of COLUMN_THREADS threads each.
#define KERNEL(any, dtype, T, SIZE, WHOLE, ROWS, BLOCKS)                                           \
    extern "C" __global__ void __launch_bounds__(COLUMN_THREADS, BLOCKS)                           \
        fused_backward_column##any##_##SIZE##x##ROWS##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) { \
        fused_backward_columns<T, SIZE, WHOLE, ROWS>(call, shift);                                 \
    }
#define HALF(dtype, T) KERNEL(, dtype, T, 4, true, 8, 3) KERNEL(, dtype, T, 2, true, 16, 4) KERNEL(, dtype, T, 4, true, 12, 2) KERNEL(_any, dtype, T, 2, false, 16, 4)
#define SINGLE(dtype, T) KERNEL(, dtype, T, 4, true, 8, 2) KERNEL(, dtype, T, 1, true, 16, 4)
#define DOUBLE(dtype, T) KERNEL(, dtype, T, 1, true, 16, 2)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
