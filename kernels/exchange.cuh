// What the warps that share a line tell each other: the maximum and sum of their parts, once.
#pragma once
#include <cstdint>

#include "bulk.cuh"
#include "cluster.cuh"
#include "reduce.cuh"

constexpr int MAX_WARPS = 32;

// The warps of a block, a line each.
template <typename R>
struct BlockExchange {
    static constexpr bool CLUSTER = false;
    Normalizer<R>* parts;  // MAX_WARPS, in shared memory

    __device__ __forceinline__ int64_t line() const { return blockIdx.x; }
    __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
    __device__ __forceinline__ int threads() const { return blockDim.x; }

    __device__ __forceinline__ Normalizer<R> merge(Normalizer<R> part, R scale = R(1)) const {
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
        __syncthreads();
        return merge_parts(parts, blockDim.x / 32, scale);
    }
};

// The merge of `count` parts of one column that stand `columns` apart.
template <typename R>
__device__ __forceinline__ Normalizer<R> merge_column(const Normalizer<R>* parts, int count, int columns, R scale = R(1)) {
    R max = negative_infinity<R>(), sum = 0;
#pragma unroll 4
    for (int i = 0; i < count; i++) max = greater(max, parts[i * columns].max);
    const R reference = part_reference(max);
#pragma unroll 4
    for (int i = 0; i < count; i++) sum += parts[i * columns].sum * quick_exponential(product(parts[i * columns].max - reference, scale));
    return {max, sum};
}

// The sum of `count` numbers of one column that stand `columns` apart
template <typename R>
__device__ __forceinline__ R sum_column(const R* numbers, int count, int columns) {
    R sum = 0;
    for (int i = 0; i < count; i++) sum += numbers[i * columns];
    return sum;
}

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
constexpr int MAX_CLUSTER = 16;

// As kernels/bulk.cuh has it of other parts.
__device__ __forceinline__ void send(unsigned block, Weighted<float>* to, Weighted<float> value, ArrivalBarrier& arrived) {
    asm volatile("{\n.reg .b32 there, barrier;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %5}, [barrier];\n}" ::"r"(shared_address(to)),
                 "r"(shared_address(&arrived)), "r"(block), "f"(value.max), "f"(value.sum), "f"(value.dot) : "memory");
}
__device__ __forceinline__ void send(unsigned block, Weighted<double>* to, Weighted<double> value, ArrivalBarrier& arrived) {
    asm volatile("{\n.reg .b32 there, barrier;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [there], {%3, %4}, [barrier];\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [there + 16], {%5, %5}, [barrier];\n}" ::"r"(shared_address(to)),
                 "r"(shared_address(&arrived)), "r"(block), "d"(value.max), "d"(value.sum), "d"(value.dot) : "memory");
}

// The warps of a cluster's blocks, a line each. Every warp sends its part into the shared memory of every block, where a barrier counts
// what has come: the cluster's own barrier would wait until the whole GPU can see what was written.
template <typename R>
struct ClusterExchange {
    static constexpr bool CLUSTER = true;
    Normalizer<R>* parts;  // the cluster's blocks times the warps of a block
    ArrivalBarrier& arrived;

    static __device__ __forceinline__ unsigned blocks() { return Cluster::blocks(); }
    static __device__ __forceinline__ unsigned rank() { return Cluster::rank(); }
    // Of a grid that is clusters in its first dimension
    static __device__ __forceinline__ unsigned cluster() {
        unsigned n;
        asm("mov.u32 %0, %%clusterid.x;" : "=r"(n));
        return n;
    }
    // Before anything else: no block may be sent anything before it has started. `bytes` are to come for each of `count` barriers.
    static __device__ __forceinline__ void begin(ArrivalBarrier* arrived, int count, int bytes) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < count; i++) arrived[i].init();
            ArrivalBarrier::announce();
            for (int i = 0; i < count; i++) arrived[i].expect(bytes);
        }
        begin();
    }
    static __device__ __forceinline__ void begin(ArrivalBarrier& arrived, int bytes) { begin(&arrived, 1, bytes); }
    // A part of each warp
    static __device__ __forceinline__ void begin(ArrivalBarrier& arrived) {
        begin(arrived, blocks() * (blockDim.x / 32) * sizeof(Normalizer<R>));
    }
    // By all threads, the one that made the barriers, too
    static __device__ __forceinline__ void begin() {
        __syncwarp();  // `aligned` is that all of a warp come here together.
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
    static __device__ __forceinline__ void wait() {
        __syncwarp();
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }

    __device__ __forceinline__ int64_t line() const { return blockIdx.x / blocks(); }
    __device__ __forceinline__ int warp() const { return (rank() * blockDim.x + threadIdx.x) / 32; }
    __device__ __forceinline__ int threads() const { return blocks() * blockDim.x; }

    __device__ __forceinline__ Normalizer<R> merge(Normalizer<R> part, R scale = R(1)) const {
        const unsigned warps = blockDim.x / 32, lane = threadIdx.x % 32;
        wait();
        if (lane < blocks()) send(lane, parts + rank() * warps + threadIdx.x / 32, part, arrived);
        arrived.wait(0);
        return merge_parts(parts, blocks() * warps, scale);
    }
};
#endif

// The threads that share a line: 2^shift of a warp, which needs nothing from other warps.
template <typename R>
struct WarpGroup {
    int shift;
    static constexpr bool BLOCK = false, CLUSTER = false;
    __device__ __forceinline__ int size() const { return 1 << shift; }
    __device__ __forceinline__ int rank() const { return threadIdx.x & (size() - 1); }
    __device__ __forceinline__ int64_t line() const {
        return blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift);
    }
    template <typename F>
    __device__ __forceinline__ R reduce(R value, F f) const { return warp_group_reduce(value, size(), f); }
    __device__ __forceinline__ Normalizer<R> merge(Normalizer<R> part, R scale = R(1)) const { return part; }
    __device__ __forceinline__ Weighted<R> merge(Weighted<R> part, bool) const { return part; }
    // Whether what holds for this line holds for all of the warp, whose threads go the same way
    __device__ __forceinline__ bool all(bool holds) const { return __all_sync(~0u, holds); }
    __device__ __forceinline__ bool any(bool holds) const { return __any_sync(~0u, holds); }
};

// A block, or a cluster of them.
template <typename R, typename Exchange>
struct WholeBlocks {
    Exchange exchange;
    Weighted<R>* weighted;  // MAX_WARPS, in shared memory
    static constexpr bool BLOCK = true, CLUSTER = Exchange::CLUSTER;
    __device__ __forceinline__ int rank() const { return threadIdx.x; }  // in a block
    __device__ __forceinline__ int64_t line() const { return exchange.line(); }
    template <typename F>
    __device__ __forceinline__ R reduce(R value, F f) const { return warp_group_reduce(value, 32, f); }
    __device__ __forceinline__ Normalizer<R> merge(Normalizer<R> part, R scale = R(1)) const { return exchange.merge(part); }
    // Of a block
    __device__ __forceinline__ Weighted<R> merge(Weighted<R> part, bool unweighted) const {
        if (threadIdx.x % 32 == 0) weighted[threadIdx.x / 32] = part;
        __syncthreads();
        return merge_parts(weighted, blockDim.x / 32, unweighted);
    }
    __device__ __forceinline__ bool all(bool holds) const { return holds; }
    __device__ __forceinline__ bool any(bool holds) const { return holds; }
};
