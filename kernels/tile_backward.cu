// The gradient of the input from the result y and its gradient g, as kernels/register_backward.cuh has it, of short contiguous lines
// that are not whole packs of 16 bytes: tiles of both are in shared memory, so that they are read once. 3/2x the bytes of a copy.
#include "reduce.cuh"
#include "schedule.cuh"
#include "start.cuh"
#include "tile.cuh"

// 2^shift threads share a line, up to WORDS words each. All three tensors begin at multiples of 16 bytes. Shared memory: two tiles
// with their margins, each a multiple of 128 bytes.
template <typename T, int WORDS>
__device__ __forceinline__ void tile_backward_lines(const T* y, const T* g, T* dx, int64_t lines, int len, int shift, bool log) {
    using R = Real<T>;
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
    extern __shared__ __align__(128) unsigned char tiles[];
    __shared__ ArrivalBarrier arrived[2];
    prepare(arrived);
    const int group = 1 << shift, most = TILE_THREADS >> shift;
    const int64_t first = blockIdx.x * int64_t(most), start = first * len;
    const int here = lines - first < most ? int(lines - first) : most;
    y += start;
    g += start;
    dx += start;
    const int room = tile_room<T>(most * len);
    const Tile<T> of_y{reinterpret_cast<T*>(tiles), here * len}, of_g{reinterpret_cast<T*>(tiles + room), here * len};
    wait_for_kernel_before();
    const int64_t behind = (lines - first - here) * len;
    of_y.fetch(y, start, behind, arrived[0]);
    of_g.fetch(g, start, behind, arrived[1]);

    // Tensors may lie otherwise in 128 bytes, but not in 16, so that words are the same ones.
    const int before = Tile<T>::before(y);
    const TileShare<T> own(before, here, len, shift);
    const T* elements_y = of_y.elements;
    T* elements_g = of_g.elements + (Tile<T>::before(g) - before);
    wait_for_tiles(arrived);
    Unit<T> held_y[WORDS], held_g[WORDS], none, end_y, end_g;
    const R zeros[PER_UNIT] = {};
    none = end_y = end_g = Element<T>::to_unit(zeros);
    if constexpr (PER_UNIT > 1) {
        if (own.has_first) end_y.x = elements_y[own.begin], end_g.x = elements_g[own.begin];
        if (own.has_last) end_y.y = elements_y[own.end - 1], end_g.y = elements_g[own.end - 1];
    }
    R sums[4] = {0, 0, 0, 0};
    const auto add = [&](Unit<T> unit_y, Unit<T> unit_g, int k) {
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) {
            const R own_y = Element<T>::of_unit(unit_y, i), own_g = Element<T>::of_unit(unit_g, i);
            auto& sum = sums[(k * PER_UNIT + i) % 4];
            sum = log ? sum + own_g : fma(own_g, own_y, sum);
        }
    };
    if constexpr (PER_UNIT > 1) add(end_y, end_g, 0);
    each_few<WORDS>(own.share, [&](int from) {
#pragma unroll
        for (int k = from; k < from + FEW && k < WORDS; k++) {
            held_y[k] = held_g[k] = none;
            if (k < own.mine) {
                held_y[k] = reinterpret_cast<const Unit<T>*>(elements_y)[own.word + k];
                held_g[k] = reinterpret_cast<const Unit<T>*>(elements_g)[own.word + k];
            }
            add(held_y[k], held_g[k], k);
        }
    });
    const R sum = warp_group_reduce(pairwise_sum(sums), group, [](R a, R b) { return a + b; });
    const auto gradient = [&](Unit<T> unit_y, Unit<T> unit_g) {
        R of_unit[PER_UNIT];
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) {
            of_unit[i] = gradient_of<T>(Element<T>::of_unit(unit_y, i), Element<T>::of_unit(unit_g, i), sum, log);
        }
        return Element<T>::to_unit(of_unit);
    };

    // The gradient takes the place of g's tile, or where its own 128 bytes have it.
    const int shifted = Tile<T>::before(dx) - Tile<T>::before(g);
    if (shifted != 0) __syncthreads();
    T* to = elements_g + shifted;
    if constexpr (PER_UNIT > 1) {
        end_g = gradient(end_y, end_g);
        if (own.has_first) to[own.begin] = end_g.x;
        if (own.has_last) to[own.end - 1] = end_g.y;
    }
    each_few<WORDS>(own.share, [&](int from) {
#pragma unroll
        for (int k = from; k < from + FEW && k < WORDS; k++) {
            const Unit<T> unit = gradient(held_y[k], held_g[k]);
            if (k < own.mine) reinterpret_cast<Unit<T>*>(to)[own.word + k] = unit;
        }
    });
    of_g.store(dx);
}

// Named kernels: tile_backward_WORDS_dtype
#define TILE_BACKWARD_KERNEL(dtype, T, WORDS)                                                                      \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS) tile_backward_##WORDS##_##dtype(                    \
        const T* y, const T* g, T* dx, int64_t lines, int64_t len, int shift, int log) {                           \
        tile_backward_lines<T, WORDS>(y, g, dx, lines, int(len), shift, log);                                      \
    }
#define KERNELS(dtype, T)               \
    TILE_BACKWARD_KERNEL(dtype, T, 17)
FOR_EACH_HALF_DTYPE(KERNELS)
FOR_EACH_SINGLE_DTYPE(KERNELS)
