// The backward of (log-)softmax of lines side by side that are split over many blocks, as split_columns.cu has them. A first kernel leaves
// the sum of every part, a second adds them up and writes the gradient. y and g are read twice and the gradient is written once: 5/2x the
// bytes of a copy, 3/2x while the second reads come from the L2 cache.
#include "split_columns.cuh"

template <typename T, bool WHOLE>
__device__ __forceinline__ void columns_sums(const T* y, const T* g, Real<T>* sums, int64_t len, int64_t inner, int rows, int across, bool log) {
    using R = Real<T>;
    using Part = ColumnsPart<T, WHOLE>;
    constexpr int SIZE = Part::SIZE, TILE = Part::TILE;
    __shared__ R of_warps[SPLIT_COLUMNS_WARPS * 32 * SIZE];
    const Part own(len, inner, rows, across, blockIdx.x, blockIdx.y);
    wait_for_kernel_before();
    CompensatedSum<R> total[SIZE];
#pragma unroll
    for (auto& sum : total) sum = CompensatedSum<R>::empty();
    const auto add = [&](R(&terms)[SIZE][TILE]) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) total[i].add(pairwise_sum(terms[i]));
    };
    if (log) {
        own.each_tile(g, R(0), [&](int, R(&of_g)[SIZE][TILE]) { add(of_g); });
    } else {
        own.each_tile(y, g, R(0), [&](int, const R(&of_y)[SIZE][TILE], R(&of_g)[SIZE][TILE]) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
#pragma unroll
                for (int k = 0; k < TILE; k++) of_g[i][k] *= of_y[i][k];
            }
            add(of_g);
        });
    }
    R sum[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) sum[i] = total[i].value();
    own.group.reduce(sum, [](R a, R b) { return a + b; });
    if (own.group.row == 0) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) of_warps[threadIdx.x / 32 * own.columns + own.group.column * SIZE + i] = sum[i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < own.columns; c += SPLIT_COLUMNS_THREADS) {
        sums[own.states + own.part * own.columns + c] = sum_column(of_warps + c, SPLIT_COLUMNS_WARPS, own.columns);
    }
}

template <typename T, bool WHOLE>
__device__ __forceinline__ void columns_gradients(const T* y, const T* g, const Real<T>* sums, T* grad, int64_t len, int64_t inner, int rows,
                                                  int across, bool log) {
    using R = Real<T>;
    using Part = ColumnsPart<T, WHOLE>;
    constexpr int SIZE = Part::SIZE, TILE = Part::TILE;
    __shared__ R added[SPLIT_COLUMNS_THREADS], of_line[32 * SIZE];
    const Part own(len, inner, rows, across, gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y);
    wait_for_kernel_before();
    // Several threads share the sums of a column, and one adds what they have.
    const int columns = own.columns, sharer = threadIdx.x / columns;
    const int sharers = min(SPLIT_COLUMNS_THREADS / columns, SPLIT_COLUMNS_SHARERS);
    if (sharer < sharers) {
        R total = 0;
#pragma unroll 4
        for (int part = sharer; part < own.parts; part += sharers) total += sums[own.states + part * columns + threadIdx.x % columns];
        added[threadIdx.x] = total;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += SPLIT_COLUMNS_THREADS) of_line[c] = sum_column(added + c, sharers, columns);
    __syncthreads();
    R sum[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) sum[i] = of_line[own.group.column * SIZE + i];
    own.each_tile(y, g, R(0), [&](int first, const R(&of_y)[SIZE][TILE], const R(&of_g)[SIZE][TILE]) {
        own.store(grad, first, [&](int i, int k) {
            return gradient_of<T>(of_y[i][k], of_g[i][k], sum[i], log);
        });
    });
}

#define KERNELS(any, dtype, T, WHOLE)                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(SPLIT_COLUMNS_THREADS, COLUMNS_BLOCKS<T>)                                                            \
        split_columns##any##_sums_##dtype(const T* y, const T* g, Real<T>* sums, int64_t len, int64_t inner, int rows, int across, int log) {         \
        columns_sums<T, WHOLE>(y, g, sums, len, inner, rows, across, log);                                                                            \
    }                                                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(SPLIT_COLUMNS_THREADS, COLUMNS_BLOCKS<T>)                                                            \
        split_columns##any##_backward_##dtype(const T* y, const T* g, const Real<T>* sums, T* grad, int64_t len, int64_t inner, int rows, int across, \
                                int log) {                                                                                                            \
        columns_gradients<T, WHOLE>(y, g, sums, grad, len, inner, rows, across, log);                                                                 \
    }
FOR_EACH_NARROW_UNIT
