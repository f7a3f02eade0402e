// Contiguous lines that a block or cluster reads in packs of 16 bytes, and what comes of such packs.
#pragma once
#include "cluster.cuh"
#include "pack.cuh"
#include "reduce.cuh"
#include "schedule.cuh"

// The sum of exponentials that a thread or lane found, relative to the maximum of a set that its elements are a part of.
template <typename R>
__device__ __forceinline__ R sum_relative_to(const SoftmaxState<R>& state, R max) {
    const R sum = state.sum.value();
    return state.max == negative_infinity<R>() ? sum : sum * exponential(state.reference() - max);
}

// PACKS packs are a thread's at once, while as many more are on their way.
template <typename T>
struct PackedLine {
    using R = Real<T>;
    static constexpr int SIZE = 16 / sizeof(T), PER_UNIT = Element<T>::PER_UNIT, UNITS = SIZE / PER_UNIT, PACKS = sizeof(T) == 8 ? 2 : 4;
    using Packs = Pack<T, SIZE>[PACKS];

    const T* first;
    int64_t len, packs;
    int head, tail;  // elements before the first whole pack, and after the last
    int thread, threads;

    __device__ __forceinline__ PackedLine(const T* first, int64_t len)
        : first(first), len(len), threads(Cluster::blocks() * blockDim.x) {
        // Warps of the cluster's blocks in turn, so that each block has as much of a line that is not enough for all.
        thread = (threadIdx.x / 32 * Cluster::blocks() + Cluster::rank()) * 32 + threadIdx.x % 32;
        const int before = -static_cast<int>(reinterpret_cast<uintptr_t>(first) / sizeof(T)) & (SIZE - 1);
        head = before < len ? before : static_cast<int>(len);
        packs = (len - head) / SIZE;
        tail = static_cast<int>(len - head - packs * SIZE);
    }

    // The packs from, from + apart, ...
    __device__ __forceinline__ void load(Packs& tile, int64_t from, int64_t apart) const {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const int64_t pack = from + k * apart;
            if (pack < packs) {
                tile[k] = ::load(reinterpret_cast<const Pack<T, SIZE>*>(first + head) + pack);
            } else {
#pragma unroll
                for (auto& unit : tile[k].units) unit = no_elements<T>();
            }
        }
    }

    // The element before or after the packs that this thread is to see to, or -1.
    __device__ __forceinline__ int64_t edge() const { return edge_of_line(thread, head, tail, len); }

    static __device__ __forceinline__ R max(const Packs& tile) {
        Unit<T> max = tile[0].units[0];
#pragma unroll
        for (int u = 1; u < PACKS * UNITS; u++) max = greater(max, tile[u / UNITS].units[u % UNITS]);
        return max_of_unit<T>(max);
    }

    static __device__ __forceinline__ R exp_sum(const Packs& tile, R reference) {
        R sums[4] = {};
#pragma unroll
        for (int i = 0; i < PACKS * SIZE; i++) {
            sums[i % 4] += Element<T>::exponential(element(tile, i) - reference);
        }
        return pairwise_sum(sums) * unscale<T>();
    }

    static __device__ __forceinline__ R element(const Packs& tile, int i) {
        return Element<T>::of_unit(tile[i / SIZE].units[i % SIZE / PER_UNIT], i % PER_UNIT);
    }
};
