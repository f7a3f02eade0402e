// Log-sum-exp, and what cross-entropy needs to know of each line: every element is read once and a few numbers are written
// for a line, so the ceiling is half the time of a copy. What is asked for is a switch that a block looks at once a line.
#include "line_group.cuh"
#include "packed_line.cuh"
#include "statistics.cuh"

// What one thread, or block, has of a line that several share: the maximum, the sum relative to it, and the sums over classes, the
// first of them relative to it, too.
template <typename R>
struct Share {
    R max, sum, sums[2];

    __device__ __forceinline__ void merge(const Share& other) {
        const R both = greater(max, other.max), reference = part_reference(both);
        sum = sum * exponential(max - reference) + other.sum * exponential(other.max - reference);
        sums[0] += ClassSums<R>::moved(sums[1], max, both) + (other.sums[0] + ClassSums<R>::moved(other.sums[1], other.max, both));
        sums[1] += other.sums[1];
        max = both;
    }
};

// A block takes a line, or a cluster where there are few. Head and tail are up to seven elements each, one to a thread.
template <typename T>
__device__ __forceinline__ void rows(const Request<T>& request) {
    using R = Real<T>;
    using Line = PackedLine<T>;
    const int64_t number = blockIdx.x / Cluster::blocks();
    const bool leads = Cluster::rank() == 0 && threadIdx.x == 0;
    if (request.skips(number)) {
        if (leads) request.skip(number);
        return;
    }
    const T* first = request.x + number * request.len;
    const Line line(first, request.len);
    auto state = SoftmaxState<R>::empty();
    auto of_classes = ClassSums<R>::empty();
    typename Line::Packs next;
    line.load(next, line.thread, line.threads);
    if (line.head + line.tail > 0) {
        const int64_t j = line.edge();
        const R x = j >= 0 ? Element<T>::read(first[j]) : negative_infinity<R>();
        const R reference = state.grow(x);
        state.add(Element<T>::exponential(x - reference) * unscale<T>());
        if (request.smooth && j >= 0) of_classes.add(request, first + j, j, 1, state.max);
    }
    const int step = Line::PACKS * line.threads;
#pragma unroll 1
    for (int64_t from = line.thread; from < line.packs; from += step) {
        typename Line::Packs tile;
#pragma unroll
        for (int k = 0; k < Line::PACKS; k++) tile[k] = next[k];
        line.load(next, from + step, line.threads);
        const R before = state.max, reference = state.grow(Line::max(tile));
        state.add(Line::exp_sum(tile, reference));
        if (request.smooth) {
            of_classes.grow(before, state.max);
#pragma unroll 1
            for (int64_t pack = from; pack < from + step && pack < line.packs; pack += line.threads) {
                const int64_t j = line.head + pack * Line::SIZE;
                of_classes.add(request, first + j, j, Line::SIZE, state.max);
            }
        }
    }
    __shared__ Normalizer<R> parts[MAX_WARPS];
    const R max = warp_group_reduce(state.max, 32, [](R a, R b) { return greater(a, b); });
    const R of_warp = warp_group_reduce(sum_relative_to(state, max), 32, [](R a, R b) { return a + b; });
    auto whole = BlockExchange<R>{parts}.merge({max, of_warp});
    R sums[2] = {};
    if (request.smooth) {
        of_classes.grow(state.max, whole.max);
        sums[0] = block_sum(of_classes.terms.value());
        __syncthreads();  // what block_sum shares is free again
        sums[1] = block_sum(of_classes.weights.value());
    }
    if (Cluster::blocks() > 1) {
        __shared__ Share<R> of_block;
        if (threadIdx.x == 0) of_block = {whole.max, whole.sum, {sums[0], sums[1]}};
        Cluster::sync();
        // The first block's first warp has a block to a lane.
        if (Cluster::rank() == 0 && threadIdx.x < 32) {
            Share<R> share{negative_infinity<R>(), 0, {0, 0}};
            if (threadIdx.x < Cluster::blocks()) share = *Cluster::of_block(threadIdx.x, &of_block);
            whole = warp_merge(Normalizer<R>{share.max, share.sum});
            share.sums[0] += ClassSums<R>::moved(share.sums[1], share.max, whole.max);
            for (int k = 0; k < 2; k++) sums[k] = warp_group_reduce(share.sums[k], 32, [](R a, R b) { return a + b; });
        }
        Cluster::sync();  // no block may end before it was read
        if (Cluster::rank() > 0) return;
        if (threadIdx.x == 0) of_block.max = whole.max;
        __syncthreads();
        whole.max = of_block.max;
    }
    bool nan = false;
    if (!request.targets && whole.max == -negative_infinity<R>()) {
        for (int64_t j = threadIdx.x; j < request.len; j += blockDim.x) nan |= isnan(Element<T>::read(first[j]));
        nan = __syncthreads_or(nan);
    }
    if (threadIdx.x == 0) request.write(number, whole, nan, sums, first, 1);
}

// A group of threads takes lines that lie side by side.
template <typename T, int COUNT>
__device__ __forceinline__ void columns(const Request<T>& request, int64_t inner, int shape, int64_t groups) {
    using R = Real<T>;
    using Lines = SideBySide<T, COUNT>;
    using Word = typename Lines::Word;
    constexpr int TILE = StridedLine::TILE;
    const LineGroup group(groups, request.len, inner / COUNT, shape);
    group.each([&](int64_t number_of_word, StridedLine line) {
        const int64_t number = number_of_word * COUNT;
        const T* first = request.x + line.start * COUNT;
        const bool there = line.len > 0;
        bool skipped[COUNT], none = there;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            skipped[i] = there && request.skips(number + i);
            none = none && skipped[i];
        }
        if (none) line.len = 0;
        const bool smooth = request.smooth && line.len > 0;
        SoftmaxState<R> states[COUNT];
        ClassSums<R> of_classes[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            states[i] = SoftmaxState<R>::empty();
            of_classes[i] = ClassSums<R>::empty();
        }
        line.each_first(line.len, [&](int64_t from) {
            Word words[TILE];
            const int left = line.left(from, line.len);
            line.load(words, reinterpret_cast<const Word*>(first), inner / COUNT, from, left);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                R tile[TILE];
#pragma unroll
                for (int k = 0; k < TILE; k++) tile[k] = line.has(k, left) ? Lines::read(words[k], i) : negative_infinity<R>();
                const R before = states[i].max, reference = states[i].grow(max_of(tile));
                if (smooth) of_classes[i].grow(before, states[i].max);
#pragma unroll
                for (auto& x : tile) x = Element<T>::exponential(x - reference);
                states[i].add(pairwise_sum(tile) * unscale<T>());
            }
            if (smooth) {
#pragma unroll 1
                for (int64_t j = from; j < from + TILE * line.step && j < line.len; j += line.step) {
#pragma unroll
                    for (int i = 0; i < COUNT; i++) of_classes[i].add(request, first + j * inner + i, j, 1, states[i].max);
                }
            }
        });
        Each<Share<R>, COUNT> shares;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const R max = states[i].max;
            shares.of[i] = {max, sum_relative_to(states[i], part_reference(max)), {of_classes[i].terms.value(), of_classes[i].weights.value()}};
        }
        shares = group.reduce(shares);
        if (!there || !group.leads()) return;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const Share<R>& share = shares.of[i];
            request.write_alone(number + i, skipped[i], {share.max, share.sum}, share.sums, first + i, inner);
        }
    });
}

#define KERNELS(dtype, T)                                            \
    KERNEL(statistics_rows, dtype, T, 1024, 1, rows<T>(request))         \
    KERNEL(statistics_columns, dtype, T, GROUP_THREADS, 2, (columns<T, 1>(request, inner, shift, groups)))
#define KERNELS_OF_PAIRS(dtype, T) KERNEL(statistics_columns_pairs, dtype, T, GROUP_THREADS, 2, (columns<T, 2>(request, inner, shift, groups)))
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS_OF_PAIRS)
