// The places of the k greatest elements of each contiguous line, greatest first, of equal ones the first first: k passes, each
// for the greatest that comes after the one found before. An element is read k times, all but the first from a cache
// where a line fits one, and k numbers are written for a line: meant for small k, where the ceiling is half a copy.
#include "reduce.cuh"

// Numbers in an order without exceptions: -0 is 0, and NaN, all of them equal, is greater than +inf, as in torch.topk.
__device__ __forceinline__ uint32_t rank_of(float x) {
    const int32_t bits = __float_as_int(x == 0.0f ? 0.0f : x);
    return isnan(x) ? ~0u : static_cast<uint32_t>(bits < 0 ? ~bits : bits ^ INT32_MIN);
}
__device__ __forceinline__ uint64_t rank_of(double x) {
    const int64_t bits = __double_as_longlong(x == 0.0 ? 0.0 : x);
    return isnan(x) ? ~uint64_t(0) : static_cast<uint64_t>(bits < 0 ? ~bits : bits ^ INT64_MIN);
}

// An element's rank and place. `empty` comes after every element of a line.
template <typename R>
struct Candidate {
    using Rank = decltype(rank_of(R()));
    Rank rank;
    uint32_t place;

    static __device__ __forceinline__ Candidate empty() { return {0, ~0u}; }
    __device__ __forceinline__ bool before(const Candidate& other) const {
        return rank > other.rank || (rank == other.rank && place < other.place);
    }
    __device__ __forceinline__ void merge(const Candidate& other) {
        if (other.before(*this)) *this = other;
    }
    __device__ __forceinline__ Candidate shuffle_xor(int mask) const {
        return {__shfl_xor_sync(~0u, rank, mask), __shfl_xor_sync(~0u, place, mask)};
    }
    __device__ __forceinline__ Candidate of_first_lane() const { return {__shfl_sync(~0u, rank, 0), __shfl_sync(~0u, place, 0)}; }
};

// `reduce` gives every thread that shares the line the first of their candidates.
template <typename T, typename Reduce>
__device__ __forceinline__ void top_k(const T* x, uint32_t* out, uint32_t len, uint32_t k, uint32_t thread, uint32_t threads, Reduce reduce) {
    using C = Candidate<Real<T>>;
    C last{};
    for (uint32_t n = 0; n < k; n++) {
        auto found = C::empty();
#pragma unroll 4
        for (int64_t i = thread; i < len; i += threads) {
            const C here{rank_of(Element<T>::read(x[i])), static_cast<uint32_t>(i)};
            if ((n == 0 || last.before(here)) && here.before(found)) found = here;
        }
        last = reduce(found);
        if (thread == 0) out[n] = last.place;
    }
}

// A warp takes a line.
template <typename T>
__device__ __forceinline__ void short_rows(const T* x, uint32_t* out, int64_t lines, int64_t len, int k) {
    const int64_t line = blockIdx.x * int64_t(blockDim.x / 32) + threadIdx.x / 32;
    if (line >= lines) return;
    top_k(x + line * len, out + line * k, uint32_t(len), k, threadIdx.x % 32, 32,
          [](auto found) { return warp_reduce(found).of_first_lane(); });
}

// A block takes a line.
template <typename T>
__device__ __forceinline__ void rows(const T* x, uint32_t* out, int64_t lines, int64_t len, int k) {
    const int64_t line = blockIdx.x;
    top_k(x + line * len, out + line * k, uint32_t(len), k, threadIdx.x, blockDim.x,
          [](auto found) { return block_reduce(found); });
}

#define KERNEL(name, body, dtype, T, THREADS)                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                \
        name##_##dtype(const T* x, uint32_t* out, int64_t lines, int64_t len, int k) {   \
        body(x, out, lines, len, k);                                                     \
    }
#define KERNELS(dtype, T)                                   \
    KERNEL(top_k_rows, rows, dtype, T, 1024)                \
    KERNEL(top_k_short_rows, short_rows, dtype, T, 128)
FOR_EACH_DTYPE(KERNELS)
