// Softmax along another dimension than the last, of lines that are longer than what blocks hold: each is split over many blocks. A first
// kernel leaves the state of every part, a second merges the states of its lines and writes the result, the last parts first, since those
// are still in the L2 cache. Each element is read twice and written once: 1 to 1.5x the bytes of a copy.
#include "split_columns.cuh"

template <typename T, bool WHOLE>
__device__ __forceinline__ void columns_states(const T* x, Normalizer<Real<T>>* states, int64_t len, int64_t inner, int rows, int across,
                                               Scaling<Real<T>> scaling) {
    using R = Real<T>;
    using Part = ColumnsPart<T, WHOLE>;
    constexpr int SIZE = Part::SIZE, TILE = Part::TILE;
    __shared__ Normalizer<R> of_warps[SPLIT_COLUMNS_WARPS * 32 * SIZE];
    const Part own(len, inner, rows, across, blockIdx.x, blockIdx.y);
    wait_for_kernel_before();
    SoftmaxState<R> state[SIZE];
#pragma unroll
    for (auto& of_column : state) of_column = SoftmaxState<R>::empty();
    own.each_tile(x, negative_infinity<R>(), [&](int, R(&tile)[SIZE][TILE]) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
#pragma unroll
            for (auto& element : tile[i]) element = scaling.logit(element);
            const R reference = state[i].grow(max_of(tile[i]));
#pragma unroll
            for (auto& element : tile[i]) element = Element<T>::exponential(element - reference);
            state[i].add(pairwise_sum(tile[i]) * unscale<T>());
        }
    });
    R max[SIZE], sum[SIZE], greatest[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        const auto part = state[i].template finish_part<T>();
        max[i] = greatest[i] = part.max;
        sum[i] = part.sum;
    }
    own.group.reduce(greatest, [](R a, R b) { return greater(a, b); });
#pragma unroll
    for (int i = 0; i < SIZE; i++) sum[i] *= quick_exponential(max[i] - part_reference(greatest[i]));
    own.group.reduce(sum, [](R a, R b) { return a + b; });
    if (own.group.row == 0) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) of_warps[threadIdx.x / 32 * own.columns + own.group.column * SIZE + i] = {greatest[i], sum[i]};
    }
    __syncthreads();
    for (int c = threadIdx.x; c < own.columns; c += SPLIT_COLUMNS_THREADS) {
        states[own.states + own.part * own.columns + c] = merge_column(of_warps + c, SPLIT_COLUMNS_WARPS, own.columns);
    }
}

template <typename T, bool WHOLE>
__device__ __forceinline__ void columns_apply(const T* x, const Normalizer<Real<T>>* states, T* y, int64_t len, int64_t inner, int rows,
                                              int across, bool log, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    using Part = ColumnsPart<T, WHOLE>;
    constexpr int SIZE = Part::SIZE, TILE = Part::TILE;
    __shared__ Normalizer<R> merged[SPLIT_COLUMNS_THREADS], of_line[32 * SIZE];
    const Part own(len, inner, rows, across, gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y);
    wait_for_kernel_before();
    // Several threads share the states of a column, and one merges what they have.
    const int columns = own.columns, sharer = threadIdx.x / columns;
    const int sharers = min(SPLIT_COLUMNS_THREADS / columns, SPLIT_COLUMNS_SHARERS);
    if (sharer < sharers) {
        const int count = (own.parts - sharer + sharers - 1) / sharers;
        merged[threadIdx.x] = merge_column(states + own.states + threadIdx.x, count, sharers * columns);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < columns; c += SPLIT_COLUMNS_THREADS) {
        const auto line = merge_column(merged + c, sharers, columns);
        of_line[c] = {line.max, log ? logarithm(line.sum + scaling.least) : unscale<T>() / (line.sum + scaling.least)};
    }
    __syncthreads();
    R reference[SIZE], term[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        const auto line = of_line[own.group.column * SIZE + i];
        reference[i] = part_reference(line.max), term[i] = line.sum;
    }
    own.each_tile(x, negative_infinity<R>(), [&](int first, const R(&tile)[SIZE][TILE]) {
        own.store(y, first, [&](int i, int k) {
            const R relative = scaling.logit(tile[i][k]) - reference[i];
            return log ? relative - term[i] : Element<T>::exponential(relative) * term[i];
        });
    });
}

#define KERNELS(any, dtype, T, WHOLE)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(SPLIT_COLUMNS_THREADS, COLUMNS_BLOCKS<T>)                                              \
        split_columns##any##_states_##dtype(const T* x, Normalizer<Real<T>>* states, int64_t len, int64_t inner, int rows, int across,  \
                                            Scaling<Real<T>> scaling) {                                                                 \
        columns_states<T, WHOLE>(x, states, len, inner, rows, across, scaling);                                                         \
    }                                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(SPLIT_COLUMNS_THREADS, COLUMNS_BLOCKS<T>)                                              \
        split_columns##any##_softmax_##dtype(const T* x, const Normalizer<Real<T>>* states, T* y, int64_t len, int64_t inner, int rows, \
                                             int across, int log, Scaling<Real<T>> scaling) {                                           \
        columns_apply<T, WHOLE>(x, states, y, len, inner, rows, across, log, scaling);                                                  \
    }
FOR_EACH_NARROW_UNIT
