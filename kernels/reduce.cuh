// Reductions over the threads of a block, of anything with empty(), merge(), shuffle_xor() and of_first_lane().
#pragma once
#include "softmax_state.cuh"

template <typename State>
__device__ __forceinline__ State warp_reduce(State state) {
#pragma unroll 1
    for (int mask = 16; mask > 0; mask /= 2) state.merge(state.shuffle_xor(mask));
    return state;
}

// The merge of all threads' states, the same bits for each of them. The block is a number of whole warps.
template <typename State>
__device__ __forceinline__ State block_reduce(State state) {
    state = warp_reduce(state);
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (warps > 1) {
        __shared__ State of_warp[32];
        if (lane == 0) of_warp[threadIdx.x / 32] = state;
        __syncthreads();
        state = lane < warps ? of_warp[lane] : State::empty();
        __syncthreads();  // of_warp is free for the next line
        state = warp_reduce(state);
    }
    return state.of_first_lane();
}

// Of one number over the group of threads that shares a line: a power of two up to 32 neighbours in a warp. The same bits for each of them.
template <typename R, typename F>
__device__ __forceinline__ R warp_group_reduce(R value, int group, F f) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        if (mask < group) value = f(value, __shfl_xor_sync(~0u, value, mask));
    }
    return value;
}

// The same over the lanes of a warp that have the same of `across` columns
template <typename V, typename F>
__device__ __forceinline__ V reduce_column(V value, int across, F f) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        if (mask >= across) value = f(value, __shfl_xor_sync(~0u, value, mask));
    }
    return value;
}

// The sum over a block, the same bits for each thread. Between two of them there is to be a barrier, which frees the memory of the first.
template <typename R>
__device__ __forceinline__ R block_sum(R value) {
    __shared__ R of_warp[32];
    const auto add = [](R a, R b) { return a + b; };
    value = warp_group_reduce(value, 32, add);
    if (blockDim.x > 32) {
        const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) of_warp[threadIdx.x / 32] = value;
        __syncthreads();
        value = warp_group_reduce(lane < warps ? of_warp[lane] : R(0), 32, add);
    }
    return value;
}

// The maximum and sum of a line from those of its parts, each relative to its own maximum. Called by whole warps; the same
// bits in every lane. `scale`: what maxima are multiplied with to be logits.
template <typename R>
__device__ __forceinline__ Normalizer<R> merge_parts(const Normalizer<R>* parts, int count, R scale = R(1)) {
    // A few are read by every lane; of more, each lane takes some.
    const bool few = count <= 8;
    const int first = few ? 0 : threadIdx.x % 32, step = few ? 1 : 32;
    R max = negative_infinity<R>(), sum = 0;
    for (int i = first; i < count; i += step) max = greater(max, parts[i].max);
    if (!few) max = warp_group_reduce(max, 32, [](R a, R b) { return greater(a, b); });
    const R reference = part_reference(max);
    for (int i = first; i < count; i += step) sum += parts[i].sum * quick_exponential(product(parts[i].max - reference, scale));
    if (!few) sum = warp_group_reduce(sum, 32, [](R a, R b) { return a + b; });
    return {max, sum};
}

// The same, and the sum of something that has the exponentials as its weights or, where it is said so, none.
template <typename R>
struct alignas(4 * sizeof(R)) Weighted {
    R max, sum, dot;
};

template <typename R>
__device__ __forceinline__ Weighted<R> merge_parts(const Weighted<R>* parts, int count, bool unweighted) {
    const bool few = count <= 8;
    const int first = few ? 0 : threadIdx.x % 32, step = few ? 1 : 32;
    R max = negative_infinity<R>(), sum = 0, dot = 0;
    for (int i = first; i < count; i += step) max = greater(max, parts[i].max);
    if (!few) max = warp_group_reduce(max, 32, [](R a, R b) { return greater(a, b); });
    const R reference = part_reference(max);
    for (int i = first; i < count; i += step) {
        const Weighted<R> part = parts[i];
        const R weight = quick_exponential(part.max - reference);
        sum += part.sum * weight;
        dot += unweighted ? part.dot : part.dot * weight;
    }
    const auto add = [](R a, R b) { return a + b; };
    if (!few) sum = warp_group_reduce(sum, 32, add), dot = warp_group_reduce(dot, 32, add);
    return {max, sum, dot};
}

// The same of what the lanes of a warp have.
template <typename R>
__device__ __forceinline__ Normalizer<R> warp_merge(Normalizer<R> part, R scale = R(1)) {
    const R max = warp_group_reduce(part.max, 32, [](R a, R b) { return greater(a, b); });
    const R sum = part.sum * exponential(product(part.max - part_reference(max), scale));
    return {max, warp_group_reduce(sum, 32, [](R a, R b) { return a + b; })};
}

// The same of parts in global memory, the same bits for each thread of the block: one warp asks for AT_ONCE x 32 of them at once and
// tells the others by way of `told`, which took 0.5 us less than a part for each thread and `block_merge`.
template <int AT_ONCE, typename R>
__device__ __forceinline__ Normalizer<R> merge_far_parts(const Normalizer<R>* parts, int count, Normalizer<R>* told, R scale = R(1)) {
    if (threadIdx.x < 32) {
        Normalizer<R> line{negative_infinity<R>(), 0};
#pragma unroll 1
        for (int first = threadIdx.x; first < count; first += AT_ONCE * 32) {
            Normalizer<R> some[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                const int i = first + k * 32;
                some[k] = i < count ? parts[i] : Normalizer<R>{negative_infinity<R>(), 0};
            }
            R max = line.max;
#pragma unroll
            for (const auto& part : some) max = greater(max, part.max);
            const R reference = part_reference(max);
            line = {max, line.sum * quick_exponential(product(line.max - reference, scale))};
#pragma unroll
            for (const auto& part : some) line.sum += part.sum * quick_exponential(product(part.max - reference, scale));
        }
        line = warp_merge(line, scale);
        if (threadIdx.x == 0) *told = line;
    }
    __syncthreads();
    return *told;
}

// The same of what the threads of a block have, the same bits for each of them. `of_warps` has room for a part of each warp.
template <typename R>
__device__ __forceinline__ Normalizer<R> block_merge(Normalizer<R> part, Normalizer<R>* of_warps, R scale = R(1)) {
    part = warp_merge(part, scale);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = part;
    __syncthreads();
    return merge_parts(of_warps, blockDim.x / 32, scale);
}
