// What a thread has of lines along another dimension than the last, in registers: a block takes a strip of neighbouring lines as in
// column_softmax.cuh, threads side by side neighbouring packs, rows of threads rows of the strip. On Hopper a cluster of blocks shares a strip
// whose lines are too long for one.
#pragma once
#include "columns.cuh"
#include "exchange.cuh"
#include "pack.cuh"
#include "start.cuh"

constexpr int COLUMN_THREADS = 256;

// SIZE elements of a pack, ROWS of each for a thread. WHOLE: rows are whole packs, and tensors begin at one.
template <typename T, int SIZE, bool WHOLE, int ROWS>
struct ColumnShare {
    using R = Real<T>;
    using P = Pack<T, SIZE>;
    static constexpr int PER_UNIT = Element<T>::PER_UNIT, FEW_ROWS = 4;
    using Columns = StripColumns<T, SIZE, WHOLE ? Rows::PACKS : Rows::ANY>;
    int across, down, blocks, rank, rows, step;  // packs side by side, and rows of threads; rows of a line, and from one of this thread's to the next
    Columns of_strip;
    int64_t start, jump;                         // the first element, and from a row to the next
    int mine;                                    // rows from the thread's first on
    ArrivalBarrier* arrived;

    // 2^shift packs lie side by side, up to a warp, or more where a thread has whole lines. `bytes`: that each block is to send of each column.
    __device__ __forceinline__ ColumnShare(int64_t len, int64_t inner, int shift, ArrivalBarrier& arrived, int bytes)
        : across(1 << shift), down(blockDim.x >> shift), blocks(Cluster::blocks()), rank(Cluster::rank()), rows(static_cast<int>(len)),
          step(blocks * down), of_strip(blockIdx.x / blocks, shift, inner), jump(step * inner), arrived(&arrived) {
#if __CUDA_ARCH__ >= 900
        if (blocks > 1) ClusterExchange<R>::begin(arrived, blocks * columns() * bytes);
#endif
        const int row = rank * down + (threadIdx.x >> shift);
        mine = of_strip.has(0) ? rows - row : 0;
        start = (of_strip.outer * len + row) * inner + of_strip.first;
    }
    __device__ __forceinline__ int columns() const { return Columns::count(across); }
    // Whether other threads have parts of this one's lines.
    __device__ __forceinline__ bool shares() const { return down > 1 || blocks > 1; }

    // f(k) for each row that a thread may have
    template <typename F>
    __device__ __forceinline__ void each(const F& f) const { each_place<ROWS, FEW_ROWS>(step, rows, f); }

    // The packs of a row of each tensor, `none` where there is none. All are asked for before any is waited for.
    template <int COUNT>
    __device__ __forceinline__ void load(const T* const (&tensors)[COUNT], const Unit<T> (&none)[COUNT], P (&packs)[COUNT][ROWS]) const {
        int64_t at = start;
        int left = mine;
        each([&](int k) {
#pragma unroll
            for (int t = 0; t < COUNT; t++) {
                P& pack = packs[t][k];
#pragma unroll
                for (auto& unit : pack.units) unit = none[t];
                of_strip.load_if(left > 0, pack, tensors[t] + at);
            }
            at += jump, left -= step;
        });
    }

    // result(k, i) for element i of row k
    template <typename F>
    __device__ __forceinline__ void store(T* to, const F& result) const {
        int64_t next = jump;
        int left = mine, rows_on = step;
        // The places of rows are to be computed again, not to be kept since they were read.
        asm volatile("" : "+l"(next), "+r"(rows_on));
        to += start;
        each([&](int k) {
            const auto pack = pack_of<T, SIZE>([&](int i) { return result(k, i); });
            if (left > 0) of_strip.store(PlainAccess{}, to, pack);
            to += next, left -= rows_on;
        });
    }

    // Merges what the threads of a block or cluster have of each column, whose warps' lanes have merged it already: `own` becomes the whole, the
    // same bits for each of them. merge(parts, count, columns) merges what stands `columns` apart. Shared memory: (warps + blocks + 1) x columns.
    template <typename State, typename F>
    __device__ __forceinline__ void merge(State (&own)[SIZE], void* shared, const F& merge_parts) const {
        const int warps = blockDim.x / 32;
        if (warps * blocks == 1) return;
        auto* of_warp = static_cast<State*>(shared);
        auto* of_block = of_warp + warps * columns();
        auto* of_line = of_block + blocks * columns();
        // The first `across` lanes of each warp hold its columns.
        if (threadIdx.x % 32 < across) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) of_warp[(threadIdx.x / 32) * columns() + of_strip.place(i)] = own[i];
        }
        __syncthreads();
        int parts = warps;
#if __CUDA_ARCH__ >= 900
        if (blocks > 1) {
            ClusterExchange<R>::wait();
            // Several threads tell what a column has, a block each.
            for (int i = threadIdx.x; i < columns() * blocks; i += blockDim.x) {
                const int block = i / columns(), c = i - block * columns();
                send(block, of_block + rank * columns() + c, merge_parts(of_warp + c, warps, columns()), *arrived);
            }
            arrived->wait(0);
            parts = blocks;
            of_warp = of_block;
        }
#endif
        for (int c = threadIdx.x; c < columns(); c += blockDim.x) of_line[c] = merge_parts(of_warp + c, parts, columns());
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SIZE; i++) own[i] = of_line[of_strip.place(i)];
    }
};

// Element i of a pack
template <typename T, int SIZE>
__device__ __forceinline__ Real<T> element_of(const Pack<T, SIZE>& pack, int i) {
    return Element<T>::of_unit(pack.units[i / Element<T>::PER_UNIT], i % Element<T>::PER_UNIT);
}

// What is to be computed again must not be kept from the first time, as numbers of half precision.
template <typename T, int SIZE, int ROWS>
__device__ __forceinline__ void forget(Pack<T, SIZE> (&packs)[ROWS]) {
    if constexpr (Element<T>::PER_UNIT > 1) {
#pragma unroll
        for (auto& pack : packs) {
#pragma unroll
            for (auto& unit : pack.units) forget(unit);
        }
    }
}
