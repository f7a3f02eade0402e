// Lines side by side whose rows are narrow: what lies so many rows behind an element is of the same column, and neighbours in memory are of
// neighbouring columns, whichever row they are in.
#pragma once
#include "exchange.cuh"
#include "pack.cuh"
#include "schedule.cuh"

// Units of a thread that holds them; how many of them are passed over at once where there are fewer.
constexpr int NARROW_UNITS = 16, NARROW_STEP = 4;

// What a thread accesses at once: a unit of T, of half precision two elements, or, if not WHOLE, one element.
template <typename T, bool WHOLE>
struct NarrowUnit {
    static constexpr int SIZE = WHOLE ? Element<T>::PER_UNIT : 1;
    std::conditional_t<WHOLE, Unit<T>, T> bits;

    static __device__ __forceinline__ NarrowUnit load(const T* from, int64_t at) { return reinterpret_cast<const NarrowUnit*>(from)[at]; }
    __device__ __forceinline__ void store(T* to, int64_t at) const { reinterpret_cast<NarrowUnit*>(to)[at] = *this; }
    __device__ __forceinline__ Real<T> number(int i) const {
        if constexpr (WHOLE) return Element<T>::of_unit(bits, i);
        else return Element<T>::read(bits);
    }
    static __device__ __forceinline__ NarrowUnit of(const Real<T> (&numbers)[SIZE]) {
        if constexpr (WHOLE) return {Element<T>::to_unit(numbers)};
        else return {Element<T>::write(numbers[0])};
    }
};

// The lanes that a matrix is shared by in a warp: rows of them, `across` side by side, which have the same columns.
struct NarrowLanes {
    int lanes, lane, row, column, rows, across;
    int split;  // a row's elements where its columns are in the first and in the second half of a word by turns; otherwise 0

    __device__ __forceinline__ NarrowLanes(int lanes, int across, int split)
        : lanes(lanes), lane(threadIdx.x & (lanes - 1)), row(lane / across), column(lane - row * across), rows(lanes / across), across(across),
          split(split) {}
    // Lanes that take part, and whether this one does
    __device__ __forceinline__ int count() const { return rows * across; }
    __device__ __forceinline__ bool has_row() const { return row < rows; }

    // What f makes of all lanes' `of`, column by column
    template <int SIZE, typename R, typename F>
    __device__ __forceinline__ void reduce(R (&of)[SIZE], const F& f) const {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
#pragma unroll 1
            for (int count = rows; count > 1;) {
                const int half = (count + 1) / 2;
                const R other = __shfl_down_sync(~0u, of[i], half * across, lanes);
                if (row + half < count) of[i] = f(of[i], other);
                count = half;
            }
            of[i] = __shfl_sync(~0u, of[i], column, lanes);
        }
        if (SIZE == 1 || split == 0) return;
        // The word and half that the column of this half is in in the row after, or before
        const int first = column * 2, second = first + 1;
        const int of_first = (first < split ? first + split : first - split) / 2;
        const int of_second = (second < split ? second + split : second - split) / 2;
        const R in_first = __shfl_sync(~0u, of[SIZE - 1], of_first, lanes), in_second = __shfl_sync(~0u, of[0], of_second, lanes);
        of[0] = f(of[0], in_first);
        of[SIZE - 1] = f(of[SIZE - 1], in_second);
    }
};

// What a thread holds of the lines side by side that 2^shift lanes of a warp take or, if `alone`, a block: units `step` apart from `start`
// on. `across`: after so many units, up to a warp, it is the same columns again.
template <typename T, bool WHOLE>
struct NarrowShare {
    using Unit = NarrowUnit<T, WHOLE>;
    static constexpr int SIZE = Unit::SIZE, COUNT = NARROW_UNITS;
    NarrowLanes group;
    int warps, warp, units, step, left;  // `units` of all threads; `left` from this one's first on
    int64_t start;

    __device__ __forceinline__ NarrowShare(int64_t outers, int len, int inner, int across, int shift, bool alone)
        : group(1 << shift, across, SIZE == 2 && inner % 2 == 1 ? inner : 0) {
        warps = alone ? blockDim.x / 32 : 1;
        warp = alone ? threadIdx.x / 32 : 0;
        const int64_t outer = alone ? blockIdx.x : blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift);
        units = len * inner / SIZE;
        step = warps * group.count();
        const int first = warp * group.count() + group.lane;
        left = group.has_row() && outer < outers ? units - first : 0;
        start = outer * len * inner + first * SIZE;
    }
    __device__ __forceinline__ bool has(int k) const { return k * step < left; }
    // f(k) for each unit that a thread may have
    template <typename F>
    __device__ __forceinline__ void each(const F& f) const { each_place<COUNT, NARROW_STEP>(step, units, f); }
};

// Instantiates kernels for each dtype: KERNELS(what their names have where units are elements, dtype, element type, WHOLE).
#define NARROW_HALF(dtype, T) KERNELS(, dtype, T, true) KERNELS(_any, dtype, T, false)
#define NARROW_WIDE(dtype, T) KERNELS(, dtype, T, true)
#define FOR_EACH_NARROW_UNIT          \
    FOR_EACH_HALF_DTYPE(NARROW_HALF)  \
    FOR_EACH_SINGLE_DTYPE(NARROW_WIDE) \
    FOR_EACH_DOUBLE_DTYPE(NARROW_WIDE)
