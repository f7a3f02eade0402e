// Reductions over the threads of a block, of anything with empty(), merge(), shuffle_xor() and of_first_lane().
#pragma once

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
