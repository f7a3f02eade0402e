// Softmax with the line in registers: each element is read once and written once, so the ceiling is a copy. A group of
// threads takes a line, COUNT elements each: a part of a warp or a warp (several lines to a block), a block, or on Hopper
// the blocks of a cluster. Blocks are small and take one line each, so that a multiprocessor holds several in different
// phases: while one waits for memory, others compute or store.
#pragma once
#include <type_traits>

#include "exchange.cuh"
#include "pack.cuh"
#include "reduce.cuh"
#include "schedule.cuh"

// The elements of one line that one thread holds: packs at equal distances. WHOLE: lines are whole packs of 16 bytes, at
// addresses that are multiples of it. Otherwise accesses are of 4 bytes, and lines may have any length and start anywhere: a
// warp's accesses are of neighbouring elements, which the memory system joins. STEP is the distance in packs, or 0 where it
// is not known beforehand.
template <typename T, int COUNT, bool WHOLE, int STEP>
struct RegisterLine {
    using R = Real<T>;
    static constexpr int PER_UNIT = Element<T>::PER_UNIT;
    static constexpr int SIZE = WHOLE ? 16 / sizeof(T) : PER_UNIT;  // of a pack
    static constexpr int PACKS = COUNT / SIZE;
    static_assert(PACKS * SIZE == COUNT, "whole packs");
    // Exponentials take the place of the elements, but many of half precision stay two to a register and are computed twice.
    static constexpr bool KEEPS = PER_UNIT == 1 || !WHOLE || COUNT <= 16;
    using Held = std::conditional_t<KEEPS, R, Unit<T>>;
    static constexpr int PER_HELD = KEEPS ? 1 : PER_UNIT;

    Held x[COUNT / PER_HELD];
    int64_t start;  // of the first pack, which may lie before the line
    int before;     // elements of the first pack that lie before the line
    int left;       // elements of the line from `start` on
    int step;

    // The line of `len` elements begins at `line`; packs first, first + step, ... of it are this thread's. `step` packs of
    // neighbouring threads make up an access; `y` is the output.
    __device__ __forceinline__ RegisterLine(const T* y, int64_t line, int len, int first, int step) : step(STEP ? STEP : step) {
        int own = first * SIZE;
        // Accesses begin where sectors of the output do.
        if (!WHOLE) own -= static_cast<int>(reinterpret_cast<uintptr_t>(y) / sizeof(T) + line) & ((STEP ? STEP : step) * SIZE - 1);
        start = line + own;
        before = WHOLE ? 0 : -own;
        left = len - own;
    }

    __device__ __forceinline__ int place(int k) const { return k * (STEP ? STEP : step) * SIZE; }
    // Whether element i of pack k is one of the line.
    __device__ __forceinline__ bool has(int k, int i) const {
        return place(k) + i < left && (WHOLE || k > 0 || i >= before);
    }

    __device__ __forceinline__ void load(const T* from) {
        load(from, [](const auto* pack) { return load_streaming(pack); });
    }
    __device__ __forceinline__ void load_cached(const T* from) {
        load(from, [](const auto* pack) { return ::load_cached(pack); });
    }

    template <typename Load>
    __device__ __forceinline__ void load(const T* from, Load load_pack) {
        from += start;
        // Whether packs of the input lie as those of the output do
        const bool aligned = WHOLE || SIZE == 1 || reinterpret_cast<uintptr_t>(from) % (SIZE * sizeof(T)) == 0;
        if (!WHOLE && is_full()) {
            if (aligned) {
#pragma unroll
                for (int k = 0; k < PACKS; k++) hold(k, load_pack(reinterpret_cast<const Pack<T, SIZE>*>(from + place(k))));
            } else {
#pragma unroll
                for (int k = 0; k < PACKS; k++) {
#pragma unroll
                    for (int i = 0; i < SIZE; i++) hold_element(k, i, from[place(k) + i]);
                }
            }
            return;
        }
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (WHOLE && has(k, 0)) {
                hold(k, load_pack(reinterpret_cast<const Pack<T, SIZE>*>(from + place(k))));
                continue;
            }
#pragma unroll
            for (int i = 0; i < COUNT / PACKS / PER_HELD; i++) x[k * (SIZE / PER_HELD) + i] = nothing();
            if constexpr (!WHOLE) {
#pragma unroll
                for (int i = 0; i < SIZE; i++) {
                    if (has(k, i)) hold_element(k, i, from[place(k) + i]);
                }
            }
        }
    }

    static __device__ __forceinline__ Held nothing() {
        if constexpr (KEEPS) return negative_infinity<R>();
        else return no_elements<T>();
    }
    __device__ __forceinline__ void hold(int k, const Pack<T, SIZE>& pack) {
#pragma unroll
        for (int i = 0; i < SIZE / PER_HELD; i++) {
            if constexpr (KEEPS) x[k * SIZE + i] = Element<T>::of_unit(pack.units[i / PER_UNIT], i % PER_UNIT);
            else x[k * (SIZE / PER_HELD) + i] = pack.units[i];
        }
    }
    __device__ __forceinline__ void hold_element(int k, int i, T element) {
        if constexpr (KEEPS) x[k * SIZE + i] = Element<T>::read(element);
    }
    __device__ __forceinline__ R element(int i) const {
        if constexpr (KEEPS) return x[i];
        else return Element<T>::of_unit(x[i / PER_UNIT], i % PER_UNIT);
    }
    // Whether this whole warp's elements all lie in the line.
    __device__ __forceinline__ bool is_full() const {
        return COUNT >= 8 && __all_sync(~0u, before <= 0 && place(PACKS - 1) + SIZE <= left);
    }

    __device__ __forceinline__ R max() const {
        if constexpr (KEEPS) return max_of(x);
        else return max_of_unit<T>(max_of(x));
    }

    // Answers the sum of exp(x - reference) times EXP_SCALE, and keeps what Output needs for the result.
    template <typename Output>
    __device__ __forceinline__ R exponentiate(R reference) {
        constexpr int SUMS = COUNT < 8 ? COUNT : 8;
        R sums[SUMS];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const R shifted = element(i) - reference;
            const R e = Element<T>::exponential(shifted);
            if constexpr (KEEPS) x[i] = Output::keep(shifted, e);
            sums[i % SUMS] = i < SUMS ? e : sums[i % SUMS] + e;
        }
        return pairwise_sum(sums);
    }

    // Stores the result, given the reference that was exponentiated with.
    template <typename Output>
    __device__ __forceinline__ void store(T* to, R reference, const Output& output) {
        // What is cheap to compute again must not take registers from the loads on.
        if constexpr (!WHOLE) asm volatile("" : "+r"(left), "+r"(before));
        to += start;
        const bool full = !WHOLE && is_full();
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            Pack<T, SIZE> pack;
            if constexpr (!KEEPS) {
#pragma unroll
                for (int i = 0; i < SIZE / PER_UNIT; i++) forget(x[k * (SIZE / PER_UNIT) + i]);
            }
#pragma unroll
            for (int u = 0; u < SIZE / PER_UNIT; u++) {
                R result[PER_UNIT];
#pragma unroll
                for (int i = 0; i < PER_UNIT; i++) {
                    R kept = element(k * SIZE + u * PER_UNIT + i);
                    if constexpr (!KEEPS) kept = Output::keep(kept - reference, Element<T>::exponential(kept - reference));
                    result[i] = output.of_kept(kept);
                }
                pack.units[u] = Element<T>::to_unit(result);
            }
            if (full || (has(k, 0) && has(k, SIZE - 1))) {
                store_streaming(reinterpret_cast<Pack<T, SIZE>*>(to + place(k)), pack);
            } else if constexpr (!WHOLE && SIZE > 1) {
                if (has(k, 0)) to[place(k)] = pack.units[0].x;
                if (has(k, 1)) to[place(k) + 1] = pack.units[0].y;
            }
        }
    }
};

// Groups of 2^shift threads up to a warp take a line each.
template <typename T, template <typename> class Output, int COUNT, bool WHOLE>
__device__ __forceinline__ void warp_lines(const T* x, T* y, int64_t lines, int64_t len, int shift) {
    using R = Real<T>;
    const int group = 1 << shift;
    const int64_t line = blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift);
    RegisterLine<T, COUNT, WHOLE, 0> held(y, line * len, line < lines ? int(len) : 0, threadIdx.x & (group - 1), group);
    held.load(x);
    const R max = warp_group_reduce(held.max(), group, [](R a, R b) { return greater(a, b); });
    const R sum =
        warp_group_reduce(held.template exponentiate<Output<R>>(max), group, [](R a, R b) { return a + b; });
    held.store(y, max, Output<R>::of_part(max, {max, sum * unscale<T>()}, unscale<T>()));
}

// A block, or a cluster of them, takes a line; each warp a run of it. What the line `ahead` lines on will need is fetched
// into the L2 cache: the registers do not hold enough to keep the memory busy while a cluster waits for its last block.
template <typename T, template <typename> class Output, int COUNT, bool WHOLE, typename Exchange>
__device__ __forceinline__ void block_lines(const T* x, T* y, int64_t lines, int64_t len, int ahead, Exchange exchange) {
    using R = Real<T>;
    using Line = RegisterLine<T, COUNT, WHOLE, 32>;
    const int64_t line = exchange.line();
    Line held(y, line * len, int(len), exchange.warp() * Line::PACKS * 32 + threadIdx.x % 32, 32);
    if (Exchange::CLUSTER && sizeof(T) == 2) {
        held.load_cached(x);
    } else {
        held.load(x);
    }
    if (ahead > 0 && line + ahead < lines && threadIdx.x % 32 == 0) {
        prefetch(x + held.start + ahead * len, held.left < 32 * COUNT ? held.left : 32 * COUNT);
    }
    // Each warp's sum is relative to its own maximum, so that one exchange is enough.
    const R max = warp_group_reduce(held.max(), 32, [](R a, R b) { return greater(a, b); });
    const R reference = part_reference(max);
    const R sum = warp_group_reduce(held.template exponentiate<Output<R>>(reference), 32, [](R a, R b) { return a + b; });
    const auto whole = exchange.merge({max, sum * unscale<T>()});
    held.store(y, reference, Output<R>::of_part(max, whole, unscale<T>()));
}

// Named kernels: NAME_COUNT_dtype. BLOCKS: that a multiprocessor shall hold of THREADS threads each, which bounds the registers.
#define WARP_KERNEL(name, dtype, T, Output, COUNT, WHOLE)                                   \
    extern "C" __global__ void __launch_bounds__(128)                                       \
        name##_##COUNT##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int shift) { \
        warp_lines<T, Output, COUNT, WHOLE>(x, y, lines, len, shift);                       \
    }
#define BLOCK_KERNEL(name, dtype, T, Output, COUNT, WHOLE, THREADS, BLOCKS)                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                        \
        name##_##COUNT##_##dtype(const T* x, T* y, int64_t lines, int64_t len) {                         \
        __shared__ Normalizer<Real<T>> parts[MAX_WARPS];                                                 \
        block_lines<T, Output, COUNT, WHOLE>(x, y, lines, len, 0, BlockExchange<Real<T>>{parts});        \
    }
#define CLUSTER_KERNEL(name, dtype, T, Output, COUNT, WHOLE, THREADS, BLOCKS)                            \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                        \
        name##_##COUNT##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int ahead) {              \
        __shared__ Normalizer<Real<T>> parts[MAX_CLUSTER * THREADS / 32];                                \
        ClusterExchange<Real<T>>::begin();                                                               \
        block_lines<T, Output, COUNT, WHOLE>(x, y, lines, len, ahead, ClusterExchange<Real<T>>{parts});  \
    }
