// Softmax of few long lines, on Hopper: a cluster of blocks takes a line, each keeps the online state of its share, and
// the states are exchanged through distributed shared memory, without workspace in global memory. Each element is read
// twice and written once; the second read comes from the L2 cache while the lines in flight fit there.
#include <cooperative_groups.h>

#include "../reduce.cuh"
#include "../schedule.cuh"

namespace cg = cooperative_groups;

constexpr int CLUSTER = 8;  // the largest that every Hopper GPU can place

// The merge of the states of a cluster's blocks, in the order of their ranks, the same bits for every thread.
template <typename State>
__device__ __forceinline__ State cluster_reduce(State state) {
    __shared__ State of_block;
    const auto cluster = cg::this_cluster();
    if (threadIdx.x == 0) of_block = state;
    cluster.sync();
    state = State::empty();
#pragma unroll 1
    for (int rank = 0; rank < CLUSTER; rank++) state.merge(*cluster.map_shared_rank(&of_block, rank));
    cluster.sync();  // of_block is free for the next line, and no block leaves while another reads from it
    return state;
}

template <typename T, template <typename> class Output>
__device__ __forceinline__ void cluster_lines(const T* x, T* y, int64_t lines, int64_t len, int64_t inner) {
    const int64_t threads = int64_t(CLUSTER) * blockDim.x;
    const int64_t thread = int64_t(blockIdx.x % CLUSTER) * blockDim.x + threadIdx.x;
    for (int64_t line = blockIdx.x / CLUSTER; line < lines; line += gridDim.x / CLUSTER) {
        DirectLogits<T> logits{StridedLine{line_start(line, len, inner), inner, thread, threads, len}, x, y};
        logits.map(Output<Real<T>>(cluster_reduce(block_reduce(online_state(logits))).finish()));
    }
}

#define KERNEL(name, dtype, T, Output)                                                                   \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(1024)                   \
        name##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int64_t inner) {                    \
        cluster_lines<T, Output>(x, y, lines, len, inner);                                               \
    }
#define KERNELS(dtype, T)                            \
    KERNEL(cluster_softmax, dtype, T, Probability)   \
    KERNEL(cluster_log_softmax, dtype, T, LogProbability)
FOR_EACH_DTYPE(KERNELS)
