// Lines of any length and offset, too long for a block, in the tiles of a cluster's blocks: each has a part of the line. Moves what fused_tile and
// fused_backward_tile move, the scores as far as they are in the window.
#pragma once
#include "../fused_tile.cuh"

// Parts of the warps of a cluster's blocks, of up to so many threads
template <int THREADS>
constexpr int CLUSTER_PARTS = MAX_CLUSTER * THREADS / 32;

// Named kernels. THREADS: those of a block at most, of which a multiprocessor is to have two (f64: one).
#define FUSED_CLUSTER_TILE(name, dtype, T, Held, THREADS)                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)          \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int ahead) {           \
        using R = Real<T>;                                                                 \
        __shared__ Normalizer<R> parts[CLUSTER_PARTS<THREADS>];                            \
        __shared__ ArrivalBarrier arrived;                                                 \
        ClusterExchange<R>::begin(arrived);                                                \
        fused_tile<T, Held<T>>(call, TileCluster<R>{parts, nullptr, &arrived}, ahead);     \
    }
// TIMES: that parts may be merged.
#define FUSED_BACKWARD_CLUSTER_TILE(name, dtype, T, Held, THREADS, TIMES)                  \
    extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)          \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int ahead) {           \
        using R = Real<T>;                                                                 \
        __shared__ Weighted<R> parts[TIMES * CLUSTER_PARTS<THREADS>];                      \
        __shared__ ArrivalBarrier arrived[TIMES];                                          \
        const TileCluster<R> group{nullptr, parts, arrived};                               \
        group.begin(TIMES);                                                                \
        fused_backward_tile<T, Held<T>>(call, group, ahead);                               \
    }
