// Softmax with what models put around it, of lines of any length and offset, in tiles: the scores are copied into shared memory
// and the results back as the runs that they are in memory, wherever lines end. Moves what the kernels for whole packs move.
#pragma once
#include "fused.cuh"
#include "tile.cuh"

// Called, since there would be one for each element that a thread holds.
__device__ __noinline__ float tangent(float x) { return hyperbolic_tangent(x); }
__device__ __forceinline__ double tangent(double x) { return hyperbolic_tangent(x); }
template <typename R>
__device__ __noinline__ bool is_dropped(const Fused<R>& call, int64_t line, int j) {
    return RandomBits(call, line, j).of(j & 7) < call.threshold;
}
template <typename R>
__device__ __noinline__ void store_rounded(Dtype dtype, void* to, int64_t at, R x) {
    by_dtype(dtype, [&](auto* type) {
        using O = std::remove_pointer_t<decltype(type)>;
        static_cast<O*>(to)[at] = rounded_to<O>(x);
    });
}

// The logits that one thread holds of a line in a tile: WORDS units of 4 bytes (f64: elements), as far from each other as there are
// threads that share the line, so that these read neighbours of what is added or masked. Of half precision a line may begin and
// end in the middle of a unit that it shares with its neighbours: these elements are its first and its last thread's.
template <typename T, int WORDS>
struct TileLogits {
    using R = Real<T>;
    static constexpr int PER_UNIT = Element<T>::PER_UNIT, COUNT = (WORDS + (PER_UNIT > 1)) * PER_UNIT;

    T* elements;  // of the line
    int len, first, step, units;  // this thread's first element in a unit, how far its next unit is, and where the line's units end
    bool has_first, has_last;
    R z[COUNT];

    // The line begins `begin` elements from a multiple of 4 bytes on.
    __device__ __forceinline__ TileLogits(T* line, int begin, int len, int rank, int threads) : elements(line), len(len) {
        const int before = PER_UNIT > 1 ? begin % 2 : 0;
        first = before + rank * PER_UNIT;
        step = threads * PER_UNIT;
        units = len - (PER_UNIT - 1);
        has_first = before > 0 && len > 0 && rank == 0;
        has_last = PER_UNIT > 1 && (len - before) % 2 == 1 && len > before && rank == threads - 1;
    }

    // Calls f with the place in z and the place in the line of each element.
    template <typename F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            if (first + k * step >= units) continue;
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) f(k * PER_UNIT + i, first + k * step + i);
        }
        if constexpr (PER_UNIT > 1) {
            if (has_first) f(WORDS * PER_UNIT, 0);
            if (has_last) f(WORDS * PER_UNIT + 1, len - 1);
        }
    }

    static __device__ __forceinline__ Exponential<T> exponential(R max) { return Exponential<T>(max); }
    static __device__ __forceinline__ R logit(R z) { return z; }

    // Answers the greatest.
    __device__ __forceinline__ R load(const Fused<R>& call, const Place& at) {
        const R absent = negative_infinity<R>();
#pragma unroll
        for (int k = 0; k < WORDS; k++) {
            Unit<T> unit = no_elements<T>();
            if (first + k * step < units) unit = *reinterpret_cast<const Unit<T>*>(elements + first + k * step);
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) z[k * PER_UNIT + i] = Element<T>::of_unit(unit, i);
        }
        if constexpr (PER_UNIT > 1) {
            z[WORDS * PER_UNIT] = has_first ? Element<T>::read(elements[0]) : absent;
            z[WORDS * PER_UNIT + 1] = has_last ? Element<T>::read(elements[len - 1]) : absent;
        }
        if (call.cap > R(0)) each([&](int n, int) { z[n] = tangent(z[n] * call.scale * call.inverse_cap); });
        const R scale = call.cap > R(0) ? call.cap : call.scale;
        const auto* bias = static_cast<const T*>(call.bias) + at.bias;
        if (call.adds == EACH) {
            each([&](int n, int j) { z[n] = z[n] * scale + Element<T>::read(bias[j * call.bias_step]); });
        } else {
            const R added = call.adds == ONE ? Element<T>::read(*bias) : R(0);
            each([&](int n, int) { z[n] = z[n] * scale + added; });
        }
        const auto* mask = static_cast<const uint8_t*>(call.mask) + at.mask;
        if (call.masks == EACH) {
            each([&](int n, int j) { z[n] = mask[j * call.mask_step] ? z[n] : absent; });
        } else if (call.masks == ONE && !*mask) {
#pragma unroll
            for (auto& x : z) x = absent;
        }
        if (call.window) each([&](int n, int j) { z[n] = j >= at.first && j < at.end ? z[n] : absent; });
        return max_of(z);
    }

    // Answers the sum of the exponentials, which are kept in place of the logits where it is said so.
    template <bool KEEP>
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential) {
        R sums[4] = {};
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const R e = exponential(z[n]);
            if (KEEP) z[n] = e;
            sums[n % 4] += e;
        }
        return pairwise_sum(sums);
    }
};

// A block takes `lines` lines from `number` on, of which `own` is this thread's; `threads` share a line. Shared memory: the tile and
// its margin.
template <typename T, int WORDS, typename Group>
__device__ __forceinline__ void fused_tile(const Fused<Real<T>>& call, const Group& group, int64_t number, int lines, int own, int threads) {
    using R = Real<T>;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ ArrivalBarrier arrived[1];
    prepare(arrived);
    const int len = static_cast<int>(call.len), here = call.lines - number < lines ? int(call.lines - number) : lines;
    const int64_t start = number * call.len;
    const T* scores = static_cast<const T*>(call.scores) + start;
    const Tile<T> tile{reinterpret_cast<T*>(memory), here * len};
    tile.fetch(scores, start, (call.lines - number - here) * call.len, arrived[0]);
    const bool there = own < here;
    const Place at = locate<true>(call, there ? number + own : 0);
    const int begin = Tile<T>::before(scores) + own * len;
    TileLogits<T, WORDS> held(tile.elements + begin, begin, there ? len : 0, group.rank(), threads);
    wait_for_tiles(arrived);
    const R own_max = held.load(call, at);
    if (call.log) {
        const auto [line, factor, empty, warp_max] = normalize<false, T>(call, at, held, own_max, group);
        const R max = part_reference(line.max);
        // NaN where the line is, -inf where nothing takes part
        const R log_sum = empty ? factor : logarithm(line.sum);
#pragma unroll
        for (auto& z : held.z) z = (z - max) - log_sum;
    } else {
        const R factor = normalize<true, T>(call, at, held, own_max, group).factor * call.kept_scale;
#pragma unroll
        for (auto& e : held.z) e *= factor;
        if (call.threshold) {
            held.each([&](int n, int j) {
                if (is_dropped(call, at.line, j)) held.z[n] = R(0);
            });
        }
    }
    if (call.dtype == OWN<T>) {
        // Where the result lies otherwise in its 128 bytes, it goes elsewhere than where the scores were.
        T* result = static_cast<T*>(call.result) + start;
        T* to = held.elements + (Tile<T>::before(result) - Tile<T>::before(scores));
        __syncthreads();
        held.each([&](int n, int j) { to[j] = Element<T>::write(held.z[n]); });
        tile.store(result);
    } else {
        held.each([&](int n, int j) { store_rounded(call.dtype, call.result, at.scores + j, held.z[n]); });
    }
}

// 2^shift threads share a line, or a block takes one.
#define FUSED_WARP_ANY(dtype, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                        \
        fused_warp_any_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) {                              \
        const WarpGroup<Real<T>> group{shift};                                                                        \
        const int lines = TILE_THREADS >> shift;                                                                      \
        fused_tile<T, HELD_ANY>(call, group, blockIdx.x * int64_t(lines), lines, threadIdx.x >> shift, group.size()); \
    }
#define FUSED_BLOCK_ANY(dtype, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(512)                                                                 \
        fused_block_any_##dtype(const __grid_constant__ Fused<Real<T>> call, int) {                                   \
        using R = Real<T>;                                                                                            \
        __shared__ Normalizer<R> parts[MAX_WARPS];                                                                    \
        const WholeBlocks<R, BlockExchange<R>> group{{parts}, nullptr};                                               \
        const int64_t number = call.sharers.size > 0 ? shared_line(call, blockIdx.x) : blockIdx.x;                    \
        fused_tile<T, HELD_ANY>(call, group, number, 1, 0, blockDim.x);                                               \
    }
