// How threads walk lines. A line is one run of `len` elements along the softmax dimension, `inner` elements apart; the
// tensor holds `lines` of them, numbered along the other dimensions. All offsets are 64-bit.
#pragma once
#include <cstdint>

#include "element.cuh"
#include "pack.cuh"
#include "softmax_state.cuh"

// The offset of a line's first element.
__device__ __forceinline__ int64_t line_start(int64_t line, int64_t len, int64_t inner) {
    return inner == 1 ? line * len : line / inner * len * inner + line % inner;
}

// a / b, in 32 bits where that is enough
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
    return (a | b) >> 32 ? a / b : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

// The elements of a line that one thread takes: first, first + step, ...
struct StridedLine {
    static constexpr int TILE = 8;  // elements in flight at once

    int64_t start, stride, first, step, len;

    // The whole of a line.
    static __device__ StridedLine of_thread(int64_t line, int64_t len, int64_t inner) {
        return {line_start(line, len, inner), inner, 0, 1, len};
    }

    // The share of one of the blocks that have this thread's place in the grid's second dimension.
    __device__ __forceinline__ StridedLine of_grid() const { return {start, stride, first + blockIdx.y * step, step * gridDim.y, len}; }

    // This thread's share of its block's line.
    static __device__ StridedLine of_block(int64_t line, int64_t len, int64_t inner) {
        return {line_start(line, len, inner), inner, threadIdx.x, blockDim.x, len};
    }

    // Calls f with tiles of load(offset), filled up with `absent` at the end of the line.
    template <typename R, typename Load, typename F>
    __device__ __forceinline__ void each_tile(R absent, Load load, F f) const {
#pragma unroll 1
        for (int64_t j = first; j < len; j += TILE * step) {
            R tile[TILE];
            const int64_t offset = start + j * stride;
#pragma unroll
            for (int k = 0; k < TILE; k++) {
                tile[k] = j + k * step < len ? load(offset + k * step * stride) : absent;
            }
            f(tile);
        }
    }

    // Calls f with every offset.
    template <typename F>
    __device__ __forceinline__ void each_offset(F f) const {
#pragma unroll 1
        for (int64_t j = first; j < len; j += TILE * step) {
            const int64_t offset = start + j * stride;
#pragma unroll
            for (int k = 0; k < TILE; k++) {
                if (j + k * step < len) f(offset + k * step * stride);
            }
        }
    }

    // Calls f with the first of every COUNT elements of this thread that lie before `end`.
    template <int COUNT = TILE, typename F>
    __device__ __forceinline__ void each_first(int64_t end, F f) const {
#pragma unroll 1
        for (int64_t j = first; j < end; j += COUNT * step) f(j);
    }

    // The same for those in begin..end or, where it is asked for, the last one first: what was read last is still in a cache for those who then
    // begin with the first one.
    template <int COUNT = TILE, typename F>
    __device__ __forceinline__ void each_first_of(int64_t begin, int64_t end, bool backwards, F f) const {
        const int64_t apart = COUNT * step, start = first + (begin > 0 ? quotient(begin, apart) * apart : 0);
        if (start >= end) return;
        int64_t j = start;
        if (backwards && end - start > apart) j += quotient(end - start - 1, apart) * apart;
#pragma unroll 1
        while (true) {
            f(j);
            if (backwards ? j == start : end - j <= apart) return;
            j += backwards ? -apart : apart;
        }
    }

    // What follows is about the elements j, j + step, ... of a tile. How far it is from j to `end`, as far as that matters there
    __device__ __forceinline__ int left(int64_t j, int64_t end) const {
        return static_cast<int>(min(max(end - j, int64_t(-1)), int64_t(INT32_MAX)));
    }
    // How far element k of the tile is from its first, and whether it lies before the end, which is `left` away
    __device__ __forceinline__ int place(int k) const { return k * static_cast<int>(step); }
    __device__ __forceinline__ bool has(int k, int left) const { return place(k) < left; }

    // Loads a tile of x, whose elements are `apart` from each other. If the end is in it, what lies behind that is the first again, so that no
    // load is a branch and all are asked for before any is waited for.
    template <int COUNT, typename O>
    __device__ __forceinline__ void load(O (&tile)[COUNT], const O* x, int64_t apart, int64_t j, int left) const {
        x += j * apart;
        const int64_t next = step * apart;
        if (has(COUNT - 1, left)) {
#pragma unroll
            for (int k = 0; k < COUNT; k++, x += next) tile[k] = *x;
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; k++) tile[k] = x[has(k, left) ? k * next : 0];
        }
    }

    // Writes of(k) for what lies before the end.
    template <int COUNT, typename O, typename F>
    __device__ __forceinline__ void store(O* x, int64_t apart, int64_t j, int left, F of) const {
        x += j * apart;
        const int64_t next = step * apart;
#pragma unroll
        for (int k = 0; k < COUNT; k++, x += next) {
            if (has(k, left)) *x = of(k);
        }
    }
};

// A strided line of logits: what the schedules in schedule.cuh walk.
template <typename T>
struct DirectLogits {
    static constexpr int TILE = StridedLine::TILE;
    using R = Real<T>;

    StridedLine line;
    const T* x;
    T* y;
    Scaling<R> scaling;

    __device__ __forceinline__ R logit(int64_t i) const { return scaling.logit(Element<T>::read(x[i])); }

    template <typename F>
    __device__ __forceinline__ void each_tile(F f) const {
        line.each_tile(negative_infinity<R>(), [&](int64_t i) { return logit(i); }, f);
    }

    template <typename F>
    __device__ __forceinline__ void map(F f) const {
        line.each_offset([&](int64_t i) { y[i] = Element<T>::write(f(logit(i))); });
    }
};

// What is divided by again and again: i / n by a multiplication, exact while i * n is below 2^32.
struct Divisor {
    int n;
    uint32_t inverse;
    __device__ __forceinline__ explicit Divisor(int n) : n(n), inverse(0xffffffffu / n + 1) {}
    __device__ __forceinline__ int quotient(int i) const { return n == 1 ? i : __umulhi(i, inverse); }
};

// Calls f with tiles of a line in shared memory, filled up with -inf at its end.
template <int TILE, typename R, typename F>
__device__ __forceinline__ void each_tile_of(const R* line, int len, F f) {
#pragma unroll 1
    for (int from = 0; from < len; from += TILE) {
        R tile[TILE];
#pragma unroll
        for (int k = 0; k < TILE; k++) tile[k] = from + k < len ? line[from + k] : negative_infinity<R>();
        f(tile);
    }
}

// One contiguous line for each thread of a block. The block moves tiles of all its lines through shared memory, so that
// global accesses are coalesced although each thread works on a line of its own. Every thread of the block must make
// the same calls.
template <typename T>
struct StagedLogits {
    static constexpr int TILE = 8;              // what each_tile hands out
    static constexpr int COLUMNS = sizeof(Real<T>) == 8 ? 32 : 64;  // columns staged at once
    static constexpr int LINES = 128;           // lines of a block, and its threads
    static constexpr int PITCH = COLUMNS + 1;   // keeps the lines of a column in banks of their own
    using R = Real<T>;

    const T* x;  // the block's first line
    T* y;
    int64_t len;
    int lines;      // lines in this block
    Scaling<R> scaling;
    R* shared;      // LINES * PITCH
    int64_t staged; // the first column in shared memory, or -1

    __device__ __forceinline__ R* own() const { return shared + threadIdx.x * PITCH; }

    __device__ __forceinline__ int columns_at(int64_t column) const {
        return column + COLUMNS <= len ? COLUMNS : static_cast<int>(len - column);
    }

    // f(place in shared memory, offset in global memory) for this thread's share of what is staged; neighbouring threads
    // take neighbouring elements.
    template <typename F>
    __device__ __forceinline__ void each_staged(int64_t column, F f) const {
        const int columns = columns_at(column);
        const Divisor by_columns(columns);
#pragma unroll 4
        for (int i = threadIdx.x; i < lines * columns; i += LINES) {
            const int line = by_columns.quotient(i), at = i - line * columns;
            f(line * PITCH + at, line * len + column + at);
        }
    }

    __device__ __forceinline__ void stage(int64_t column) {
        if (staged == column) return;
        __syncthreads();  // the tile before is done with
        each_staged(column, [&](int place, int64_t i) { shared[place] = scaling.logit(Element<T>::read(x[i])); });
        __syncthreads();
        staged = column;
    }

    template <typename F>
    __device__ __forceinline__ void each_tile(F f) {
        for (int64_t column = 0; column < len; column += COLUMNS) {
            stage(column);
            each_tile_of<TILE>(own(), threadIdx.x < lines ? columns_at(column) : 0, f);
        }
    }

    template <typename F>
    __device__ __forceinline__ void map(F f) {
        for (int64_t column = 0; column < len; column += COLUMNS) {
            stage(column);
            const int columns = threadIdx.x < lines ? columns_at(column) : 0;
#pragma unroll 4
            for (int k = 0; k < columns; k++) own()[k] = f(own()[k]);
            __syncthreads();
            each_staged(column, [&](int place, int64_t i) { y[i] = Element<T>::write(shared[place]); });
            staged = -1;
        }
    }
};

// One short contiguous line for each lane of a warp, which moves all of them at once through shared memory: global accesses
// are of neighbouring elements, in packs of 16 bytes where lines are whole packs.
template <typename T>
struct WarpLogits {
    static constexpr int TILE = 8;
    static constexpr int SIZE = 16 / sizeof(T), PER_UNIT = Element<T>::PER_UNIT;
    using R = Real<T>;

    const T* x;  // the warp's first line
    T* y;
    int len, lines;
    Scaling<R> scaling;
    int pitch;   // odd, so that lanes read different banks
    R* shared;   // 32 * pitch

    static __device__ __forceinline__ int pitch_of(int len) { return len | 1; }
    __device__ __forceinline__ R* own() const { return shared + threadIdx.x % 32 * pitch; }
    __device__ __forceinline__ bool in_packs() const {
        return len % SIZE == 0 && (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y)) % 16 == 0;
    }

    // f(place in shared memory, offset in global memory) for every `step`-th element of the lines.
    template <typename F>
    __device__ __forceinline__ void each(int step, F f) const {
        const Divisor by_len(len);
#pragma unroll 4
        for (int i = threadIdx.x % 32 * step; i < lines * len; i += 32 * step) {
            const int line = by_len.quotient(i);
            f(line * pitch + i - line * len, i);
        }
    }

    __device__ __forceinline__ void stage() const {
        if (in_packs()) {
            each(SIZE, [&](int place, int i) {
                const auto pack = load(reinterpret_cast<const Pack<T, SIZE>*>(x + i));
#pragma unroll
                for (int k = 0; k < SIZE; k++) shared[place + k] = scaling.logit(Element<T>::of_unit(pack.units[k / PER_UNIT], k % PER_UNIT));
            });
        } else {
            each(1, [&](int place, int i) { shared[place] = scaling.logit(Element<T>::read(x[i])); });
        }
        __syncwarp();
    }

    template <typename F>
    __device__ __forceinline__ void each_tile(F f) const {
        each_tile_of<TILE>(own(), len, f);
    }

    template <typename F>
    __device__ __forceinline__ void map(F f) const {
#pragma unroll 8
        for (int k = 0; k < len; k++) own()[k] = f(own()[k]);
        __syncwarp();
        if (in_packs()) {
            each(SIZE, [&](int place, int i) {
                const auto pack = pack_of<T, SIZE>([&](int k) { return shared[place + k]; });
                store_streaming(reinterpret_cast<Pack<T, SIZE>*>(y + i), pack);
            });
        } else {
            each(1, [&](int place, int i) { y[i] = Element<T>::write(shared[place]); });
        }
    }
};
