// Log-sum-exp, and what cross-entropy needs to know of each line, of short contiguous lines that are whole packs of 16 bytes, in registers.
// Reads each element once: half the time of a copy.
#include "exchange.cuh"
#include "statistics.cuh"

// 2^shift threads share a line, up to PACKS packs each. Sums over classes are not asked for.
template <typename T, int PACKS>
__device__ __forceinline__ void warp_lines(const Request<T>& request, int shift) {
    using R = Real<T>;
    constexpr int SIZE = 16 / sizeof(T), PER_UNIT = Element<T>::PER_UNIT;
    const WarpGroup<R> group{shift};
    const int64_t number = group.line();
    const bool there = number < request.lines, skipped = there && request.skips(number);
    const int packs = static_cast<int>(request.len) / SIZE, own = there && !skipped ? packs - group.rank() : 0;
    const T* first = request.x + number * request.len;
    Pack<T, SIZE> held[PACKS];
    auto greatest = no_elements<T>();
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        held[k] = no_pack<T, SIZE>();
        const int place = k << shift;
        load_if(place < own, held[k], first + (group.rank() + place) * SIZE);
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        for (const auto& unit : held[k].units) greatest = greater(greatest, unit);
    }
    const R max = group.reduce(max_of_unit<T>(greatest), [](R a, R b) { return greater(a, b); });
    const R reference = part_reference(max);
    R terms[4] = {};
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (k << shift >= packs) break;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            terms[i % 4] += Element<T>::exponential(Element<T>::of_unit(held[k].units[i / PER_UNIT], i % PER_UNIT) - reference);
        }
    }
    const R sum = group.reduce(pairwise_sum(terms), [](R a, R b) { return a + b; }) * unscale<T>();
    if (there && group.rank() == 0) request.write_alone(number, skipped, {max, sum}, {0, 0}, first, 1);
}

#define KERNELS(dtype, T) KERNEL(warp_statistics, dtype, T, 128, 1, (warp_lines<T, 4>(request, shift)))
FOR_EACH_DTYPE(KERNELS)
