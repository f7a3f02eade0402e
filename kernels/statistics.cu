// Log-sum-exp, and what cross-entropy needs to know of each line: every element is read once and a few numbers are written
// for a line, so the ceiling is half the time of a copy. What is asked for is a switch that a block looks at once a line.
#include "statistics.cuh"

constexpr int MAX_COLUMN_WARPS = 16;

// The sum of exponentials that a thread or lane found, relative to the maximum of a set that its elements are a part of.
template <typename R>
__device__ __forceinline__ R sum_relative_to(const SoftmaxState<R>& state, R max) {
    const R sum = state.sum.value();
    return state.max == negative_infinity<R>() ? sum : sum * exponential(state.reference() - max);
}

// Of lines that a block reads in packs of 16 bytes, PACKS of them to a thread at once, while as many more are on their way.
template <typename T>
struct PackedLine {
    using R = Real<T>;
    static constexpr int SIZE = 16 / sizeof(T), PER_UNIT = Element<T>::PER_UNIT, UNITS = SIZE / PER_UNIT, PACKS = sizeof(T) == 8 ? 2 : 4;
    using Packs = Pack<T, SIZE>[PACKS];

    const T* first;
    int64_t len, packs;
    int head, tail;  // elements before the first whole pack, and after the last

    __device__ __forceinline__ PackedLine(const T* first, int64_t len) : first(first), len(len) {
        const int before = -static_cast<int>(reinterpret_cast<uintptr_t>(first) / sizeof(T)) & (SIZE - 1);
        head = before < len ? before : static_cast<int>(len);
        packs = (len - head) / SIZE;
        tail = static_cast<int>(len - head - packs * SIZE);
    }

    __device__ __forceinline__ void load(Packs& tile, int64_t from) const {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const int64_t pack = from + k * int(blockDim.x);
            if (pack < packs) {
                tile[k] = ::load(reinterpret_cast<const Pack<T, SIZE>*>(first + head) + pack);
            } else {
#pragma unroll
                for (auto& unit : tile[k].units) unit = no_elements<T>();
            }
        }
    }

    // The element before or after the packs that this thread is to see to, or -1.
    __device__ __forceinline__ int64_t edge() const {
        const int thread = threadIdx.x;
        if (thread < head) return thread;
        return thread >= 16 && thread < 16 + tail ? len - tail + thread - 16 : -1;
    }

    static __device__ __forceinline__ R max(const Packs& tile) {
        Unit<T> max = tile[0].units[0];
#pragma unroll
        for (int u = 1; u < PACKS * UNITS; u++) max = greater(max, tile[u / UNITS].units[u % UNITS]);
        return max_of_unit<T>(max);
    }

    static __device__ __forceinline__ R exp_sum(const Packs& tile, R reference) {
        R sums[4] = {};
#pragma unroll
        for (int i = 0; i < PACKS * SIZE; i++) {
            sums[i % 4] += Element<T>::exponential(element(tile, i) - reference);
        }
        return pairwise_sum(sums) * unscale<T>();
    }

    static __device__ __forceinline__ R element(const Packs& tile, int i) {
        return Element<T>::of_unit(tile[i / SIZE].units[i % SIZE / PER_UNIT], i % PER_UNIT);
    }
};

// A block takes a line. Head and tail are up to seven elements each, one to a thread.
template <typename T>
__device__ __forceinline__ void rows(const Request<T>& request) {
    using R = Real<T>;
    using Line = PackedLine<T>;
    const int64_t number = blockIdx.x;
    if (request.skips(number)) {
        if (threadIdx.x == 0) request.skip(number);
        return;
    }
    const T* first = request.x + number * request.len;
    const Line line(first, request.len);
    auto state = SoftmaxState<R>::empty();
    ClassSums<R> of_classes{request.smooth ? request.pivot(first) : R(0), CompensatedSum<R>::empty(), CompensatedSum<R>::empty()};
    typename Line::Packs next;
    line.load(next, threadIdx.x);
    if (line.head + line.tail > 0) {
        const int64_t j = line.edge();
        const R x = j >= 0 ? Element<T>::read(first[j]) : negative_infinity<R>();
        const R reference = state.grow(x);
        state.add(Element<T>::exponential(x - reference) * unscale<T>());
        if (request.smooth && j >= 0) of_classes.add(request, first + j, j, 1);
    }
    const int step = Line::PACKS * blockDim.x;
#pragma unroll 1
    for (int64_t from = threadIdx.x; from < line.packs; from += step) {
        typename Line::Packs tile;
#pragma unroll
        for (int k = 0; k < Line::PACKS; k++) tile[k] = next[k];
        line.load(next, from + step);
        const R reference = state.grow(Line::max(tile));
        state.add(Line::exp_sum(tile, reference));
        if (request.smooth) {
#pragma unroll 1
            for (int64_t pack = from; pack < from + step && pack < line.packs; pack += blockDim.x) {
                const int64_t j = line.head + pack * Line::SIZE;
                of_classes.add(request, first + j, j, Line::SIZE);
            }
        }
    }
    __shared__ Normalizer<R> parts[MAX_WARPS];
    const R max = warp_group_reduce(state.max, 32, [](R a, R b) { return greater(a, b); });
    const R of_warp = warp_group_reduce(sum_relative_to(state, max), 32, [](R a, R b) { return a + b; });
    const auto whole = BlockExchange<R>{parts}.merge({max, of_warp});
    R sums[2] = {};
    if (request.smooth) {
        sums[0] = group_sum(of_classes.terms.value(), blockDim.x);
        __syncthreads();  // what group_sum shares is free again
        sums[1] = group_sum(of_classes.weights.value(), blockDim.x);
    }
    bool nan = false;
    if (!request.targets && whole.max == -negative_infinity<R>()) {
        for (int64_t j = threadIdx.x; j < request.len; j += blockDim.x) nan |= isnan(Element<T>::read(first[j]));
        nan = __syncthreads_or(nan);
    }
    if (threadIdx.x == 0) request.write(number, whole, nan, sums, first, 1);
}

// What one thread has of a line that several share: the maximum, the sum relative to it, and the sums over classes.
template <typename R>
struct Share {
    R max, sum, sums[2];

    __device__ __forceinline__ void merge(const Share& other) {
        const R both = greater(max, other.max), reference = part_reference(both);
        sum = sum * exponential(max - reference) + other.sum * exponential(other.max - reference);
        max = both;
        for (int k = 0; k < 2; k++) sums[k] += other.sums[k];
    }
};

// Lines that lie side by side: the lanes of a warp take neighbouring lines, and the warps of a block their rows in turn.
template <typename T>
__device__ __forceinline__ void columns(const Request<T>& request, int64_t inner) {
    using R = Real<T>;
    constexpr int TILE = 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int64_t line = blockIdx.x * int64_t(32) + lane;
    const bool there = line < request.lines, skipped = there && request.skips(line);
    const int64_t len = there && !skipped ? request.len : 0;
    const T* first = request.x + (there ? line_start(line, request.len, inner) : 0);
    auto state = SoftmaxState<R>::empty();
    ClassSums<R> of_classes{request.smooth && len > 0 ? request.pivot(first) : R(0), CompensatedSum<R>::empty(), CompensatedSum<R>::empty()};
#pragma unroll 1
    for (int64_t j = warp; j < len; j += TILE * warps) {
        R tile[TILE];
#pragma unroll
        for (int k = 0; k < TILE; k++) {
            const int64_t at = j + k * warps;
            tile[k] = at < len ? Element<T>::read(first[at * inner]) : negative_infinity<R>();
        }
        if (request.smooth) {
#pragma unroll 1
            for (int64_t at = j; at < j + TILE * warps && at < len; at += warps) of_classes.add(request, first + at * inner, at, 1);
        }
        const R reference = state.grow(max_of(tile));
        state.add(exp_sum(tile, reference));
    }
    // The first warp merges what all of them found, a line to a lane.
    __shared__ Share<R> of_warp[MAX_COLUMN_WARPS][32];
    of_warp[warp][lane] = {state.max, sum_relative_to(state, part_reference(state.max)), {of_classes.terms.value(), of_classes.weights.value()}};
    __syncthreads();
    if (warp > 0 || !there) return;
    if (skipped) {
        request.skip(line);
        return;
    }
    Share<R> share = of_warp[0][lane];
#pragma unroll 1
    for (int w = 1; w < warps; w++) share.merge(of_warp[w][lane]);
    bool nan = false;
    if (!request.targets && share.max == -negative_infinity<R>()) {
        for (int64_t j = 0; j < len; j++) nan |= isnan(Element<T>::read(first[j * inner]));
    }
    request.write(line, {share.max, share.sum}, nan, share.sums, first, inner);
}

#define KERNELS(dtype, T)                                                    \
    KERNEL(statistics_rows, dtype, T, 1024, 1, rows<T>(request))             \
    KERNEL(statistics_columns, dtype, T, 512, 2, columns<T>(request, inner))
FOR_EACH_DTYPE(KERNELS)
