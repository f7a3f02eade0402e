// Hopper's copies that run by themselves, and the barriers in shared memory that count what has arrived.
#pragma once
#include <cstdint>

#include "softmax_state.cuh"

__device__ __forceinline__ uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Opens when a thread, or several, has said how many bytes are to come and these have come; then it counts for the next time, and what
// is waited for is the parity of how often it has opened before.
struct ArrivalBarrier {
    uint64_t bits;

    // By one thread, before any other use. It opens when so many threads have said how much is to come.
    __device__ __forceinline__ void init(int threads = 1) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(threads) : "memory");
    }
    // What was initialised can be seen by the cluster's blocks, and by copies.
    static __device__ __forceinline__ void announce() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
    __device__ __forceinline__ void expect(uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes) : "memory");
    }
    __device__ __forceinline__ void wait(int parity) {
        asm volatile("{\n.reg .pred opened;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 opened, [%0], %1;\n@!opened bra AGAIN;\n}" ::"r"(
                         shared_address(this)), "r"(parity) : "memory");
    }
};

// Copies 16 bytes into shared memory, from and to multiples of 16 bytes. There they are, for the thread that asked, when copied_packs() returns.
__device__ __forceinline__ void copy_pack(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
#else
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}
__device__ __forceinline__ void copied_packs() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Copies a run into shared memory, and one from there: multiples of 16 bytes, from and to multiples of 16.
__device__ __forceinline__ void copy_in(void* to, const void* from, uint32_t bytes, ArrivalBarrier& arrived) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(&arrived)) : "memory");
}
// What threads have written into shared memory can be seen by copies of those that they meet afterwards.
__device__ __forceinline__ void announce_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Returns when shared memory has been read.
__device__ __forceinline__ void copy_out(void* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;\n"
                 "cp.async.bulk.wait_group.read 0;" ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// What cuTensorMapEncodeTiled makes: where a tensor of three dimensions lies, and the box of it that is copied at once.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// Copies the box at x, y, z into shared memory; what of it lies outside of the tensor becomes zeros.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, int x, int y, int z, ArrivalBarrier& arrived) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                     shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&arrived)) : "memory");
}

// The same by a policy of the L2 cache.
__device__ __forceinline__ void copy_box(void* to, const TensorMap& map, int x, int y, int z, ArrivalBarrier& arrived, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], "
                 "[%5], %6;" ::"r"(shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&arrived)), "l"(policy)
                 : "memory");
}

// Writes to where `to` lies in this block's shared memory, but of another block of the cluster, where it counts as arrived.
__device__ __forceinline__ void send(unsigned block, Normalizer<float>* to, Normalizer<float> value, ArrivalBarrier& arrived) {
    asm volatile("{\n.reg .b32 there, barrier;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [barrier];\n}" ::"r"(
                     shared_address(to)), "r"(shared_address(&arrived)), "r"(block), "f"(value.max), "f"(value.sum) : "memory");
}
__device__ __forceinline__ void send(unsigned block, Normalizer<double>* to, Normalizer<double> value, ArrivalBarrier& arrived) {
    asm volatile("{\n.reg .b32 there, barrier;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [there], {%3, %4}, [barrier];\n}" ::"r"(
                     shared_address(to)), "r"(shared_address(&arrived)), "r"(block), "d"(value.max), "d"(value.sum) : "memory");
}
// The same of one number
__device__ __forceinline__ void send(unsigned block, float* to, float value, ArrivalBarrier& arrived) {
    asm volatile("{\n.reg .b32 there, barrier;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [barrier];\n}" ::"r"(shared_address(to)),
                 "r"(shared_address(&arrived)), "r"(block), "f"(value) : "memory");
}
__device__ __forceinline__ void send(unsigned block, double* to, double value, ArrivalBarrier& arrived) {
    asm volatile("{\n.reg .b32 there, barrier;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 barrier, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [there], %3, [barrier];\n}" ::"r"(shared_address(to)),
                 "r"(shared_address(&arrived)), "r"(block), "d"(value) : "memory");
}
