// What the kernels have in common that go from strip to strip of lines side by side (strip_softmax.cuh, strip_odd_softmax.cuh): in registers a thread
// has ROWS rows of UNITS units of a strip's columns, which a cluster's warps have parts of.
#pragma once
#include "bulk.cuh"
#include "exchange.cuh"
#include "pack.cuh"
#include "schedule.cuh"

// tell(c, max, sum) for each of the thread's columns: the maximum of it in this warp, of whose threads ACROSS share a row, and the sum relative to that.
// Exponentials take the elements' places where that is as many registers, and the results are made of them.
template <typename T, typename Output, int ACROSS, int UNITS, int ROWS, typename F>
__device__ __forceinline__ void sum_columns(Unit<T> (&held)[ROWS * UNITS], Real<T> (&max)[UNITS * Element<T>::PER_UNIT], Scaling<Real<T>> scaling,
                                            const F& tell) {
    using R = Real<T>;
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        Unit<T> greatest = held[u];
#pragma unroll
        for (int k = 1; k < ROWS; k++) greatest = greater(greatest, held[k * UNITS + u]);
        if (ACROSS < 32) greatest = greater(greatest, __shfl_xor_sync(~0u, greatest, 16));
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) {
            const int c = u * PER_UNIT + i;
            max[c] = Element<T>::of_unit(greatest, i);
            const R reference = part_reference(max[c]);
            R sums[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const R e = exponential_of<T>(Element<T>::of_unit(held[k * UNITS + u], i) - reference, scaling);
                if constexpr (PER_UNIT == 1 && Output::OF_EXPONENTIAL) held[k * UNITS + u] = e;
                sums[k % 4] += e;
            }
            R sum = pairwise_sum(sums);
            if (ACROSS < 32) sum += __shfl_xor_sync(~0u, sum, 16);
            tell(c, max[c], sum);
        }
    }
}

// Each block merges its warps' parts and sends them to all; a column's are merged by several threads, for a block each. `of_blocks` and `exchanged`
// are two in turn: a block may be one strip ahead of another. Then `of_line` has each column's maximum and term.
template <typename Output, int THREADS, int COLUMNS, typename R>
__device__ __forceinline__ void merge_strip(const Normalizer<R>* of_warp, Normalizer<R>* of_blocks, Normalizer<R>* of_line,
                                            ArrivalBarrier* exchanged, int blocks, int rank, int turn, Scaling<R> scaling) {
    const Normalizer<R>* parts = of_warp;
    int count = THREADS / 32;
    if (blocks > 1) {
        auto* of_block = of_blocks + (turn & 1) * blocks * COLUMNS;
        auto& arrived = exchanged[turn & 1];
        if (threadIdx.x == 0) arrived.expect(blocks * COLUMNS * sizeof(Normalizer<R>));
        constexpr int ALIKE = THREADS / COLUMNS;
        const int c = threadIdx.x % COLUMNS;
        if (threadIdx.x < ALIKE * COLUMNS) {
            const auto part = merge_column(of_warp + c, THREADS / 32, COLUMNS, scaling.scale);
            for (int block = threadIdx.x / COLUMNS; block < blocks; block += ALIKE) {
                send(block, of_block + rank * COLUMNS + c, part, arrived);
            }
        }
        arrived.wait(turn / 2 & 1);
        parts = of_block;
        count = blocks;
    }
    for (int c = threadIdx.x; c < COLUMNS; c += THREADS) {
        const auto line = merge_column(parts + c, count, COLUMNS, scaling.scale);
        of_line[c] = {line.max, Output::term(line, scaling)};
    }
}
