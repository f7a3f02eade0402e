// Lines side by side that are split over many blocks: what a block, and what a thread of it takes.
#pragma once
#include "narrow.cuh"
#include "start.cuh"

constexpr int SPLIT_COLUMNS_THREADS = 512, SPLIT_COLUMNS_WARPS = SPLIT_COLUMNS_THREADS / 32, SPLIT_COLUMNS_TILE = 8;
constexpr int SPLIT_COLUMNS_SHARERS = 16;  // threads that merge what is known of a column

// Blocks that a multiprocessor shall hold, which bounds the registers
template <typename T>
constexpr int COLUMNS_BLOCKS = sizeof(T) == 8 ? 1 : 2;

// What a thread takes of a part: up to `across` units of a row, or of a strip of it, in a warp, and rows below each other in others. Grid:
// parts x strips, times outer.
template <typename T, bool WHOLE>
struct ColumnsPart {
    using Unit = NarrowUnit<T, WHOLE>;
    using R = Real<T>;
    static constexpr int SIZE = Unit::SIZE, TILE = SPLIT_COLUMNS_TILE;
    NarrowLanes group;
    int columns, part, parts;
    int64_t start, step, states;  // in elements; where what is known of the strip's parts begins
    int count;                    // units of this thread

    // `rows` of a part, all of them whole units. `block`, `outer`: of the grid
    __device__ __forceinline__ ColumnsPart(int64_t len, int64_t inner, int rows, int across, unsigned block, unsigned outer)
        : group(32, across, SIZE == 2 && inner % 2 == 1 ? int(inner) : 0), columns(across * SIZE) {
        parts = static_cast<int>((len + rows - 1) / rows);
        const unsigned strip = block / parts, warp = threadIdx.x / 32;
        part = block - strip * parts;
        const int64_t first_row = int64_t(part) * rows, left = len - first_row, here = left < rows ? left : rows;
        states = (int64_t(outer) * (gridDim.x / parts) + strip) * parts * columns;
        start = (outer * len + first_row) * inner;
        int64_t units;  // from this thread's first one on, as far as the next is a step away
        if (gridDim.x > parts) {
            const int64_t column = (int64_t(strip) * across + group.lane) * SIZE;
            start += warp * inner + column;
            step = SPLIT_COLUMNS_WARPS * inner;
            units = group.has_row() && column < inner ? here - warp : 0;
            count = units > 0 ? static_cast<int>((units + SPLIT_COLUMNS_WARPS - 1) / SPLIT_COLUMNS_WARPS) : 0;
        } else {
            const int first = warp * group.count() + group.lane, units_of_step = SPLIT_COLUMNS_WARPS * group.count();
            start += first * SIZE;
            step = units_of_step * SIZE;
            units = group.has_row() ? here * inner / SIZE - first : 0;
            count = units > 0 ? static_cast<int>((units + units_of_step - 1) / units_of_step) : 0;
        }
    }

    __device__ __forceinline__ void fetch(const T* x, int first, Unit (&units)[TILE]) const {
#pragma unroll
        for (int k = 0; k < TILE; k++) {
            if (first + k < count) units[k] = Unit::load(x + start + (first + k) * step, 0);
        }
    }
    // As numbers; behind the thread's last unit there are those of `absent`.
    __device__ __forceinline__ void read(const Unit (&units)[TILE], int first, R absent, R (&tile)[SIZE][TILE]) const {
#pragma unroll
        for (int k = 0; k < TILE; k++) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) tile[i][k] = first + k < count ? units[k].number(i) : absent;
        }
    }
    // Calls f(first, tile) with the thread's units, TILE at once, while the next ones are on their way.
    template <typename F>
    __device__ __forceinline__ void each_tile(const T* x, R absent, const F& f) const {
        Unit next[TILE];
        fetch(x, 0, next);
#pragma unroll 1
        for (int first = 0; first < count; first += TILE) {
            R tile[SIZE][TILE];
            read(next, first, absent, tile);
            fetch(x, first + TILE, next);
            f(first, tile);
        }
    }
    // The same of two tensors
    template <typename F>
    __device__ __forceinline__ void each_tile(const T* x, const T* y, R absent, const F& f) const {
        Unit next[TILE], other[TILE];
        fetch(x, 0, next);
        fetch(y, 0, other);
#pragma unroll 1
        for (int first = 0; first < count; first += TILE) {
            R of_x[SIZE][TILE], of_y[SIZE][TILE];
            read(next, first, absent, of_x);
            read(other, first, absent, of_y);
            fetch(x, first + TILE, next);
            fetch(y, first + TILE, other);
            f(first, of_x, of_y);
        }
    }
    // number(i, k) for element i of unit k of those
    template <typename F>
    __device__ __forceinline__ void store(T* y, int first, const F& number) const {
#pragma unroll
        for (int k = 0; k < TILE; k++) {
            R results[SIZE];
#pragma unroll
            for (int i = 0; i < SIZE; i++) results[i] = number(i, k);
            if (first + k < count) Unit::of(results).store(y + start + (first + k) * step, 0);
        }
    }
};
