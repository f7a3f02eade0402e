// Softmax along another dimension than the last, with the lines in registers: each element is read once and written once,
// so the ceiling is a copy. A block takes a strip of neighbouring lines: threads side by side read neighbouring packs of
// SIZE elements, rows of threads take rows of the strip, ROWS of them each. On Hopper a cluster of blocks shares a strip
// whose lines are too long for one.
#pragma once
#if __CUDA_ARCH__ >= 900
#include <cooperative_groups.h>
#endif

#include "pack.cuh"
#include "reduce.cuh"
#include "schedule.cuh"

constexpr int MAX_COLUMNS = 64;  // of a strip
constexpr int MAX_STRIP_CLUSTER = 8;

// `across` is a power of two up to 32, and across * SIZE at most MAX_COLUMNS.
template <typename T, template <typename> class Output, int SIZE, int ROWS>
__device__ __forceinline__ void column_lines(const T* x, T* y, int64_t len, int64_t inner, int across) {
    using R = Real<T>;
    using P = Pack<T, SIZE>;
    __shared__ Normalizer<R> of_warp[MAX_COLUMNS * 33];  // column * 33 + warp
    __shared__ Normalizer<R> of_block[MAX_STRIP_CLUSTER * MAX_COLUMNS], of_line[MAX_COLUMNS];
    int blocks = 1, rank = 0;
#if __CUDA_ARCH__ >= 900
    const auto cluster = cooperative_groups::this_cluster();
    blocks = cluster.num_blocks();
    rank = cluster.block_rank();
#endif
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int down = blockDim.x / across, column = threadIdx.x % across, columns = across * SIZE;
    const int packs = static_cast<int>(inner / SIZE), strips = (packs + across - 1) / across;
    const unsigned strip = blockIdx.x / blocks;
    const int64_t outer = strip / strips;
    const int pack = strip % strips * across + column;
    const int rows = static_cast<int>(len), row = rank * down * ROWS + threadIdx.x / across;
    const int64_t start = (outer * len + row) * packs + pack, step = int64_t(down) * packs;
    const P* from = reinterpret_cast<const P*>(x) + start;
    P* to = reinterpret_cast<P*>(y) + start;
    const int mine = pack < packs ? (rows - row + down - 1) / down : 0;  // rows of this thread

    R held[ROWS][SIZE];
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (k < mine) {
            widen(load_streaming(from + k * step), held[k]);
        } else {
#pragma unroll
            for (int i = 0; i < SIZE; i++) held[k][i] = negative_infinity<R>();
        }
    }
    // The maximum of a column in this warp, and the sum relative to it.
    R max[SIZE], sum[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        max[i] = held[0][i];
#pragma unroll
        for (int k = 1; k < ROWS; k++) max[i] = greater(max[i], held[k][i]);
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            if (mask >= across) max[i] = greater(max[i], __shfl_xor_sync(~0u, max[i], mask));
        }
        const R reference = part_reference(max[i]);
        sum[i] = 0;
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const R shifted = held[k][i] - reference;
            const R e = Element<T>::exponential(shifted);
            held[k][i] = Output<R>::keep(shifted, e);
            sum[i] += e;
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) {
            if (mask >= across) sum[i] += __shfl_xor_sync(~0u, sum[i], mask);
        }
    }
    // The first `across` lanes of each warp hold its columns; then a warp merges a column, a lane each warp's.
    if (lane < across) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) of_warp[(column * SIZE + i) * 33 + warp] = {max[i], sum[i] * unscale<T>()};
    }
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
        cluster.sync();  // and every block is there to be written to
        for (int c = warp; c < columns; c += warps) {
            const auto part = merge_parts(of_warp + c * 33, warps, 1);
            if (lane < blocks) *cluster.map_shared_rank(of_block + rank * MAX_COLUMNS + c, lane) = part;
        }
        cluster.sync();
        for (int c = warp; c < columns; c += warps) {
            const auto line = merge_parts(of_block + c, blocks, MAX_COLUMNS);
            if (lane == 0) of_line[c] = line;
        }
        __syncthreads();
    } else
#endif
    {
        __syncthreads();
        for (int c = warp; c < columns; c += warps) {
            const auto line = merge_parts(of_warp + c * 33, warps, 1);
            if (lane == 0) of_line[c] = line;
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        const auto output = Output<R>::of_part(max[i], of_line[column * SIZE + i], unscale<T>());
#pragma unroll
        for (int k = 0; k < ROWS; k++) held[k][i] = output.of_kept(held[k][i]);
    }
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (k < mine) store_streaming(to + k * step, narrow<T, SIZE>(held[k]));
    }
}
