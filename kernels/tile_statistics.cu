// Log-sum-exp, and what cross-entropy needs to know of each line, of short contiguous lines of any length and offset, in tiles. Reads
// each element once: half the time of a copy.
#include "statistics.cuh"
#include "tile.cuh"

// 2^shift threads share a line, up to WORDS words each. Shared memory: the tile and its margin.
template <typename T, int WORDS>
__device__ __forceinline__ void tile_lines(const Request<T>& request, int shift) {
    using R = Real<T>;
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
    extern __shared__ __align__(128) uint4 shared[];
    __shared__ ArrivalBarrier arrived[1];
    prepare(arrived);
    const int group = 1 << shift, most = TILE_THREADS >> shift, len = static_cast<int>(request.len);
    const int64_t number = blockIdx.x * int64_t(most), start = number * len;
    const int here = request.lines - number < most ? int(request.lines - number) : most;
    const T* run = request.x + start;
    const Tile<T> tile{reinterpret_cast<T*>(shared), here * len};
    tile.fetch(run, start, (request.lines - number - here) * len, arrived[0]);
    const TileShare<T> own(tile.before(run), here, len, shift);
    wait_for_tiles(arrived);
    TileUnits<T, WORDS> units;
    const R max = warp_group_reduce(units.load(own, tile.elements), group, [](R a, R b) { return greater(a, b); });
    const R reference = part_reference(max);
    R terms[4] = {};
    const auto add = [&](Unit<T> unit, int k) {
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) terms[(k * PER_UNIT + i) % 4] += Element<T>::exponential(Element<T>::of_unit(unit, i) - reference);
    };
    if constexpr (PER_UNIT > 1) add(units.ends, 0);
    each_few<WORDS>(own.share, [&](int from) {
#pragma unroll
        for (int k = from; k < from + FEW && k < WORDS; k++) add(units.elements[k], k);
    });
    const auto plus = [](R a, R b) { return a + b; };
    const R sum = warp_group_reduce(pairwise_sum(terms), group, plus) * unscale<T>();

    const int64_t line = number + (threadIdx.x >> shift);
    const T* first = tile.elements + own.begin;
    const bool there = line < request.lines, skipped = there && request.skips(line);
    R sums[2] = {};
    if (request.smooth) {
        auto of_classes = ClassSums<R>::empty();
        if (there && !skipped) {
            const int j = own.word * PER_UNIT - own.begin;
            if (own.mine > 0) of_classes.add(request, first + j, j, own.mine * PER_UNIT, max);
            if (own.has_first) of_classes.add(request, first, 0, 1, max);
            if (own.has_last) of_classes.add(request, first + len - 1, len - 1, 1, max);
        }
        sums[0] = warp_group_reduce(of_classes.terms.value(), group, plus);
        sums[1] = warp_group_reduce(of_classes.weights.value(), group, plus);
    }
    if (there && (threadIdx.x & (group - 1)) == 0) request.write_alone(line, skipped, {max, sum}, sums, first, 1);
}

#define KERNELS(dtype, T) KERNEL(tile_statistics, dtype, T, TILE_THREADS, 1, (tile_lines<T, 17>(request, shift)))
FOR_EACH_DTYPE(KERNELS)
