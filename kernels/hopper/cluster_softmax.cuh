// Softmax of long lines on Hopper, with the line in the registers of a cluster of blocks: each element is read once and
// written once, so the ceiling is a copy. Clusters stay and take one line after the other; while one is worked on, the next
// is already copied to shared memory, so that memory and arithmetic overlap. The blocks of a cluster exchange the maximum and
// sum of their parts through distributed shared memory.
#pragma once
#include <cooperative_groups.h>

#include "../register_softmax.cuh"

namespace cg = cooperative_groups;

constexpr int MAX_CLUSTER = 16;

// The packs of one block's part of a line, copied to shared memory asynchronously: slot k * threads + thread is the
// thread's k-th pack. Where the input is not aligned as the output is, slots hold the aligned packs of the input, and one
// more behind the last.
template <typename T, int PACKS>
struct Staged {
    using Line = RegisterLine<T, PACKS, false>;
    static constexpr int SIZE = Pack<T>::SIZE;

    uint4* slots;
    Input<T> input;

    // Copies the aligned pack at `element`; of one that lies in the input only in part, that part.
    __device__ __forceinline__ void copy(int64_t element, int slot) const {
        if (element >= 0 && element + SIZE <= input.total) {
            const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(slots + slot));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(input.start + element) : "memory");
        } else {
            T* to = reinterpret_cast<T*>(slots + slot);
            for (int i = 0; i < SIZE; i++) {
                if (element + i >= 0 && element + i < input.total) to[i] = input.start[element + i];
            }
        }
    }

    __device__ __forceinline__ void begin(const Line& line) const {
        const int by = input.shift();
        if (by == 0) {
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                if (line.inside(line.place(k))) copy(line.start + line.place(k), k * blockDim.x + threadIdx.x);
            }
        } else if (line.len > 0) {
            // Packs are put together from two: the one behind the line's last is needed, too.
#pragma unroll
            for (int k = 0; k <= PACKS; k++) {
                if (k == PACKS && threadIdx.x > 0) break;
                if (line.place(k) < line.len + SIZE) copy(line.start + line.place(k) - by, k * blockDim.x + threadIdx.x);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // Waits for the copies and widens them into the line's registers.
    __device__ __forceinline__ void finish(Line& line) const {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        const int by = input.shift();
        if (by) __syncthreads();  // packs of other threads are read, too
        line.fill([&](int k, int, Real<T>* at) {
            const uint4* slot = slots + k * blockDim.x + threadIdx.x;
            widen(by ? Input<T>::joined(slot[0], slot[1], by * int(sizeof(T))) : Input<T>::bits(slot[0]), at);
        }, [&](int place) { return Element<T>::read(input.start[line.start + place]); });
    }
};

// The exchange of one number pair between the blocks of a cluster, of every line. A block writes its pair to all others with
// asynchronous stores that count down a barrier in the receiver's shared memory: unlike a barrier of the cluster, that
// does not wait for the stores of the line before.
template <typename R>
struct Exchange {
    Normalizer<R> parts[2][MAX_CLUSTER];  // of the cluster's blocks, for this line and the next
    uint64_t barriers[2];

    static __device__ __forceinline__ uint32_t address(const void* shared) {
        return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    }

    static __device__ __forceinline__ uint32_t in_block(uint32_t address, int rank) {
        uint32_t there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
        return there;
    }

    // By one thread, before a barrier of the cluster.
    __device__ __forceinline__ void prepare() {
        for (auto& barrier : barriers) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&barrier)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // The merge of all blocks' parts. By all threads; `turn` counts the lines.
    __device__ __forceinline__ Normalizer<R> merge(Normalizer<R> part, int turn, int blocks, int rank) {
        const int slot = turn % 2;
        const uint32_t barrier = address(&barriers[slot]);
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(blocks * int(sizeof(part)))
                         : "memory");
        }
        if (threadIdx.x < blocks) {
            send(part, in_block(address(&parts[slot][rank]), threadIdx.x), in_block(barrier, threadIdx.x));
        }
        uint32_t done;
        do {
            asm volatile(
                "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                : "=r"(done) : "r"(barrier), "r"(turn / 2 % 2) : "memory");
        } while (!done);
        return merge_parts(parts[slot], blocks, 1);
    }

    static __device__ __forceinline__ void send(Normalizer<float> part, uint32_t to, uint32_t barrier) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(part.max),
                     "f"(part.sum), "r"(barrier) : "memory");
    }
    static __device__ __forceinline__ void send(Normalizer<double> part, uint32_t to, uint32_t barrier) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];" ::"r"(to), "d"(part.max),
                     "d"(part.sum), "r"(barrier) : "memory");
    }
};

template <typename T, template <typename> class Output, int PACKS>
__device__ __forceinline__ void cluster_lines(const T* x, T* y, int64_t lines, int64_t len) {
    using R = Real<T>;
    extern __shared__ uint4 slots[];
    __shared__ alignas(16) Exchange<R> exchange;
    const auto cluster = cg::this_cluster();
    const int blocks = cluster.num_blocks(), rank = cluster.block_rank();
    const Staged<T, PACKS> staged{slots, {x, lines * len}};
    const int thread = rank * PACKS * blockDim.x + threadIdx.x;
    const auto line_at = [&](int64_t line) {
        return RegisterLine<T, PACKS, false>(line * len, line < lines ? int(len) : 0, thread, blockDim.x);
    };
    int64_t line = blockIdx.x / blocks;
    const int64_t step = gridDim.x / blocks;
    staged.begin(line_at(line));
    if (blocks > 1) {
        if (threadIdx.x == 0) exchange.prepare();
        cluster.sync();  // every block is there to be written to
    }
    for (int turn = 0; line < lines; line += step, turn++) {
        auto held = line_at(line);
        staged.finish(held);
        const R max = group_max(held.max(), blockDim.x);
        // The barrier of the maximum is behind every thread's last look at its slots.
        staged.begin(line_at(line + step));
        const R sum = group_sum(held.template exponentiate<Output<R>>(part_reference(max)), blockDim.x);
        Normalizer<R> whole{max, sum * unscale<T>()};
        if (blocks > 1) whole = exchange.merge(whole, turn, blocks, rank);
        held.apply(Output<R>::of_part(max, whole, unscale<T>()));
        held.store(y);
    }
}
