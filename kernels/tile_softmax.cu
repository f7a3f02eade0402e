// Softmax of short contiguous lines that are not whole packs of 16 bytes, such as the 77 or 197 keys of an attention, or leave threads idle, in tiles. Each
// element is read once and written once, so the ceiling is a copy.
#include "reduce.cuh"
#include "schedule.cuh"
#include "start.cuh"
#include "tile.cuh"

// 2^shift threads share a line, up to WORDS words each. `log`: the logarithms of the probabilities. Shared memory: the tile and its
// margin.
template <typename T, int WORDS>
__device__ __forceinline__ void tile_lines(const T* x, T* y, int64_t lines, int len, int shift, bool log, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
    // Exponentials take the place of the elements, but many of half precision stay two to a register and are computed twice.
    constexpr bool KEEPS = PER_UNIT == 1 || WORDS < 32;
    using Held = std::conditional_t<KEEPS, R, Unit<T>>;
    constexpr int HELD = KEEPS ? PER_UNIT : 1;
    extern __shared__ __align__(128) uint4 shared[];
    __shared__ ArrivalBarrier arrived[1];
    prepare(arrived);
    const int group = 1 << shift, most = TILE_THREADS >> shift;
    const int64_t first = blockIdx.x * int64_t(most), start = first * len;
    const int here = lines - first < most ? int(lines - first) : most;
    x += start;
    y += start;
    const Tile<T> tile{reinterpret_cast<T*>(shared), here * len};
    wait_for_kernel_before();
    tile.fetch(x, start, (lines - first - here) * len, arrived[0]);

    const TileShare<T> own(tile.before(x), here, len, shift);
    auto* units = reinterpret_cast<Unit<T>*>(shared) + own.word;
    wait_for_tiles(arrived);
    TileUnits<T, WORDS> held_units;
    const R max = warp_group_reduce(held_units.load(own, tile.elements), group, [](R a, R b) { return greater(a, b); });
    const R reference = part_reference(max);
    auto& elements = held_units.elements;
    auto& ends = held_units.ends;

    // What is kept of an element, how far it is from the maximum or the exponential, becomes the result by a factor and a summand.
    Held held[WORDS * HELD], held_of_ends[HELD];
    R sums[4] = {0, 0, 0, 0};
    const auto exponentiate = [&](Unit<T> unit, Held* held, int k) {
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) {
            const R shifted = Element<T>::of_unit(unit, i) - reference, e = exponential_of<T>(shifted, scaling);
            if constexpr (KEEPS) held[i] = log ? shifted : e;
            sums[(k * PER_UNIT + i) % 4] += e;
        }
        if constexpr (!KEEPS) {
            held[0] = unit;
            forget(held[0]);
        }
    };
    if constexpr (PER_UNIT > 1) exponentiate(ends, held_of_ends, 0);
    each_few<WORDS>(own.share, [&](int from) {
#pragma unroll
        for (int k = from; k < from + FEW && k < WORDS; k++) exponentiate(elements[k], held + k * HELD, k);
    });
    const R sum = warp_group_reduce(pairwise_sum(sums), group, [](R a, R b) { return a + b; }) * unscale<T>() + scaling.least;
    const R factor = log ? scaling.scale : unscale<T>() / sum, summand = log ? -logarithm(sum) : R(0);
    const auto result = [&](const Held* held) {
        R results[PER_UNIT];
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) {
            R kept;
            if constexpr (KEEPS) {
                kept = held[i];
            } else {
                kept = Element<T>::of_unit(held[0], i) - reference;
                if (!log) kept = exponential_of<T>(kept, scaling);
            }
            results[i] = fma(kept, factor, summand);
        }
        return Element<T>::to_unit(results);
    };

    // Where the output lies otherwise in its 128 bytes, results go elsewhere than where the elements were.
    const int shifted = tile.before(y) - tile.before(x);
    if (shifted != 0) __syncthreads();
    if constexpr (PER_UNIT > 1) {
        ends = result(held_of_ends);
        if (own.has_first) tile.elements[own.begin + shifted] = ends.x;
        if (own.has_last) tile.elements[own.end - 1 + shifted] = ends.y;
    }
    T* to = reinterpret_cast<T*>(units) + shifted;
    const bool in_words = shifted % PER_UNIT == 0;
    each_few<WORDS>(own.share, [&](int from) {
        Unit<T> results[FEW];
#pragma unroll
        for (int k = 0; k < FEW && from + k < WORDS; k++) results[k] = result(held + (from + k) * HELD);
        if (in_words) {
#pragma unroll
            for (int k = 0; k < FEW && from + k < WORDS; k++) {
                if (from + k < own.mine) reinterpret_cast<Unit<T>*>(to)[from + k] = results[k];
            }
        } else if constexpr (PER_UNIT > 1) {
#pragma unroll
            for (int k = 0; k < FEW && from + k < WORDS; k++) {
                if (from + k >= own.mine) continue;
                to[2 * (from + k)] = results[k].x;
                to[2 * (from + k) + 1] = results[k].y;
            }
        }
    });
    tile.store(y);
}

// Named kernels: tile_softmax_WORDS_dtype. Up to 8, 16 and 32 words to a thread, and one more so that shares of an odd number fit.
#define TILE_KERNEL(dtype, T, WORDS)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                                        \
        tile_softmax_##WORDS##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int shift, int log, Scaling<Real<T>> scaling) { \
        tile_lines<T, WORDS>(x, y, lines, int(len), shift, log, scaling);                                                             \
    }
#define SINGLE(dtype, T) TILE_KERNEL(dtype, T, 9) TILE_KERNEL(dtype, T, 33)
#define HALF(dtype, T) TILE_KERNEL(dtype, T, 9) TILE_KERNEL(dtype, T, 17)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_HALF_DTYPE(HALF)
// Before Hopper conversions of half precision take so many instructions that the PTX would pass what a module shall have.
#if __CUDA_ARCH__ >= 900
#define WIDE_HALF(dtype, T) TILE_KERNEL(dtype, T, 33)
FOR_EACH_HALF_DTYPE(WIDE_HALF)
#endif
