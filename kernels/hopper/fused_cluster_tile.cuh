// Lines of any length and offset, too long for a block, in the tiles of a cluster's blocks: each has a part of the line. Moves what fused_tile and
// fused_backward_tile move.
#pragma once
#include "../fused_tile.cuh"

// A cluster of blocks, each of which has a part of the line in its own tile.
template <typename R>
struct TileCluster {
    static constexpr bool CLUSTER = true;
    // In shared memory: a part of each warp of the cluster, …
    Normalizer<R>* parts;
    Weighted<R>* weighted;     // … or as many of these, for each time that they are merged
    ArrivalBarrier* arrived;   // for each time
    mutable int times = 0;

    using Exchange = ClusterExchange<R>;
    // Before anything else, if parts are weighted and merged up to so many times
    __device__ __forceinline__ void begin(int times) const {
        Exchange::begin(arrived, times, Exchange::blocks() * (blockDim.x / 32) * sizeof(Weighted<R>));
    }
    static __device__ constexpr bool is_block() { return true; }
    static __device__ __forceinline__ int size() { return blockDim.x; }
    static __device__ __forceinline__ int rank() { return threadIdx.x; }  // in a block
    static __device__ constexpr int lines() { return 1; }
    static __device__ constexpr int own() { return 0; }
    static __device__ __forceinline__ int64_t first_line() { return blockIdx.x / Exchange::blocks(); }
    // Whole eights, of which each has random bits of its own: src/cuda/plan sees to it that every block has some.
    static __device__ __forceinline__ int most(int len) { return ((len + Exchange::blocks() - 1) / Exchange::blocks() + 7) & ~7; }
    static __device__ __forceinline__ LinePart part(int len) {
        const int most = TileCluster::most(len), first = Exchange::rank() * most;
        return {first, min(most, len - first)};
    }
    static __device__ __forceinline__ int fews_below(int count, int few) { return static_cast<uint32_t>(max(count, 1) - 1) / few / blockDim.x; }

    template <typename F>
    __device__ __forceinline__ R reduce(R value, F f) const { return warp_group_reduce(value, 32, f); }
    __device__ __forceinline__ Normalizer<R> merge(Normalizer<R> part) const { return Exchange{parts, *arrived}.merge(part); }
    __device__ __forceinline__ Weighted<R> merge(Weighted<R> part, bool unweighted) const {
        const int warps = Exchange::blocks() * (blockDim.x / 32), lane = threadIdx.x % 32, time = times++;
        if (time == 0) Exchange::wait();
        auto* all = weighted + time * warps;
        if (lane < Exchange::blocks()) send(lane, all + (Exchange::rank() * blockDim.x + threadIdx.x) / 32, part, arrived[time]);
        arrived[time].wait(0);
        return merge_parts(all, warps, unweighted);
    }
    static __device__ constexpr bool all(bool holds) { return holds; }
    static __device__ __forceinline__ bool is_first() { return rank() == 0 && Exchange::rank() == 0; }
};

// Parts of the warps of a cluster's blocks, of up to so many threads
template <int THREADS>
constexpr int CLUSTER_PARTS = MAX_CLUSTER * THREADS / 32;

// Named kernels. THREADS: those of a block at most, of which a multiprocessor is to have two (f64: one).
#define FUSED_CLUSTER_TILE_KERNEL(name, dtype, T, Held, THREADS, WINDOW)                   \
    extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)          \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int ahead) {           \
        using R = Real<T>;                                                                 \
        __shared__ Normalizer<R> parts[CLUSTER_PARTS<THREADS>];                            \
        __shared__ ArrivalBarrier arrived;                                                 \
        ClusterExchange<R>::begin(arrived);                                                \
        const TileCluster<R> group{parts, nullptr, &arrived};                              \
        fused_tile<T, Held<T>, WINDOW>(call, group, ahead);                                \
    }
// TIMES: that parts may be merged.
#define FUSED_BACKWARD_CLUSTER_TILE_KERNEL(name, dtype, T, Held, THREADS, TIMES, WINDOW)   \
    extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)          \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int ahead) {           \
        using R = Real<T>;                                                                 \
        __shared__ Weighted<R> parts[TIMES * CLUSTER_PARTS<THREADS>];                      \
        __shared__ ArrivalBarrier arrived[TIMES];                                          \
        const TileCluster<R> group{nullptr, parts, arrived};                               \
        group.begin(TIMES);                                                                \
        fused_backward_tile<T, Held<T>, WINDOW>(call, group, ahead);                       \
    }
#define FUSED_CLUSTER_TILE(name, dtype, T, Held, THREADS)                    \
    FUSED_CLUSTER_TILE_KERNEL(name, dtype, T, Held, THREADS, false)          \
    FUSED_CLUSTER_TILE_KERNEL(name##_window, dtype, T, Held, THREADS, true)
#define FUSED_BACKWARD_CLUSTER_TILE(name, dtype, T, Held, THREADS, TIMES)                    \
    FUSED_BACKWARD_CLUSTER_TILE_KERNEL(name, dtype, T, Held, THREADS, TIMES, false)          \
    FUSED_BACKWARD_CLUSTER_TILE_KERNEL(name##_window, dtype, T, Held, THREADS, TIMES, true)
