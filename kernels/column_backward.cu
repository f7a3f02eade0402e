// The gradient of the input from the result y and its gradient g along another dimension than the last: y * (g - sum of g * y), or for log-softmax
// g - exp(y) * sum of g. Both are in registers, so that they are read once: 3/2x the bytes of a copy, which is the floor.
#include "column_share.cuh"
#include "schedule.cuh"

// Shared memory: (warps + blocks + 1) x columns sums.
template <typename T, int SIZE, bool WHOLE, int ROWS>
__device__ __forceinline__ void column_gradients(const T* y, const T* g, T* dx, int64_t len, int64_t inner, int shift, bool log) {
    using R = Real<T>;
    extern __shared__ uint4 shared[];
    __shared__ ArrivalBarrier arrived;
    const ColumnShare<T, SIZE, WHOLE, ROWS> own(len, inner, shift, arrived, sizeof(R));
    Pack<T, SIZE> held[2][ROWS];
    const Unit<T> zero{};
    wait_for_kernel_before();
    own.load({y, g}, {zero, zero}, held);
    const auto of_y = [&](int k, int i) { return element_of<T>(held[0][k], i); };
    const auto of_g = [&](int k, int i) { return element_of<T>(held[1][k], i); };
    R terms[SIZE][4] = {}, sum[SIZE];
    own.each([&](int k) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) terms[i][k % 4] = log ? terms[i][k % 4] + of_g(k, i) : fma(of_g(k, i), of_y(k, i), terms[i][k % 4]);
    });
    const auto add = [](R a, R b) { return a + b; };
#pragma unroll
    for (int i = 0; i < SIZE; i++) sum[i] = pairwise_sum(terms[i]);
    if (own.shares()) {
#pragma unroll
        for (auto& of_column : sum) of_column = reduce_column(of_column, own.across, add);
        own.merge(sum, shared, [](const R* parts, int count, int columns) { return sum_column(parts, count, columns); });
    }
    forget(held[0]);
    forget(held[1]);
    own.store(dx, [&](int k, int i) { return gradient_of<T>(of_y(k, i), of_g(k, i), sum[i], log); });
}

// Named kernels: NAME_SIZExROWS_dtype. BLOCKS: that a multiprocessor shall hold of COLUMN_THREADS threads each, which bounds the registers.
#define KERNEL(name, dtype, T, SIZE, WHOLE, ROWS, BLOCKS)                                                                 \
    extern "C" __global__ void __launch_bounds__(COLUMN_THREADS, BLOCKS)                                                  \
        name##_##SIZE##x##ROWS##_##dtype(const T* y, const T* g, T* dx, int64_t len, int64_t inner, int shift, int log) { \
        column_gradients<T, SIZE, WHOLE, ROWS>(y, g, dx, len, inner, shift, log);                                         \
    }
#define HALF(dtype, T)                                \
    KERNEL(column_backward, dtype, T, 8, true, 8, 2)  \
    KERNEL(column_backward, dtype, T, 2, true, 16, 4) \
    KERNEL(column_backward, dtype, T, 4, true, 24, 2) \
    KERNEL(column_any_backward, dtype, T, 2, false, 16, 4)
#define SINGLE(dtype, T)                              \
    KERNEL(column_backward, dtype, T, 4, true, 8, 2)  \
    KERNEL(column_backward, dtype, T, 1, true, 16, 4) \
    KERNEL(column_backward, dtype, T, 1, true, 32, 3)
#define DOUBLE(dtype, T) KERNEL(column_backward, dtype, T, 1, true, 16, 2)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
