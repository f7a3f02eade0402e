// The blocks of a cluster, which read each other's shared memory. Before Hopper every block is alone.
#pragma once
#include <cstdint>

struct Cluster {
    static __device__ __forceinline__ unsigned blocks() {
        unsigned n = 1;
#if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
        return n;
    }
    static __device__ __forceinline__ unsigned rank() {
        unsigned n = 0;
#if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
#endif
        return n;
    }
    // Waits for all threads of all blocks, and for what they have written into shared memory.
    static __device__ __forceinline__ void sync() {
#if __CUDA_ARCH__ >= 900
        __syncwarp();  // `aligned` is that all of a warp come here together.
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }
    // The same place of the shared memory of another block.
    template <typename S>
    static __device__ __forceinline__ S* of_block(unsigned rank, S* place) {
        uint64_t there = reinterpret_cast<uint64_t>(place);
#if __CUDA_ARCH__ >= 900
        asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(reinterpret_cast<uint64_t>(place)), "r"(rank));
#endif
        return reinterpret_cast<S*>(there);
    }
};
