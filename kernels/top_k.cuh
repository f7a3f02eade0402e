// The k greatest elements of each contiguous line, greatest first, of equal ones the first first: their places, and their weights in the
// softmax of all elements of the line or, renormalised, of the k.
#pragma once
#include "reduce.cuh"

// The least number of T above -inf
template <typename T> constexpr Real<T> LOWEST = -3.40282347e38f;
template <> constexpr double LOWEST<double> = -1.7976931348623157e308;
template <> constexpr float LOWEST<__half> = -65504.0f;
template <> constexpr float LOWEST<__nv_bfloat16> = -3.38953139e38f;

// Numbers in an order without exceptions: -0 is 0, and NaN, all of them equal, is greater than +inf, as in torch.topk.
__device__ __forceinline__ uint32_t rank_of(float x) {
    const int32_t bits = __float_as_int(x == 0.0f ? 0.0f : x);
    return isnan(x) ? ~0u : static_cast<uint32_t>(bits < 0 ? ~bits : bits ^ INT32_MIN);
}
__device__ __forceinline__ uint64_t rank_of(double x) {
    const int64_t bits = __double_as_longlong(x == 0.0 ? 0.0 : x);
    return isnan(x) ? ~uint64_t(0) : static_cast<uint64_t>(bits < 0 ? ~bits : bits ^ INT64_MIN);
}

// Bits of a rank that are not the same for all numbers of T, and a number's rank of so many
template <typename T> using RankOf = decltype(rank_of(Real<T>()));
template <typename T> constexpr int RANK_BITS = sizeof(Real<T>) * 8;
template <> constexpr int RANK_BITS<__half> = 19;
template <> constexpr int RANK_BITS<__nv_bfloat16> = 16;
template <typename T> constexpr int UNUSED_BITS = sizeof(RankOf<T>) * 8 - RANK_BITS<T>;

template <typename T>
__device__ __forceinline__ RankOf<T> short_rank_of(T x) {
    return rank_of(Element<T>::read(x)) >> UNUSED_BITS<T>;
}

__device__ __forceinline__ float number_of_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ double number_of_bits(uint64_t bits) { return __longlong_as_double(static_cast<int64_t>(bits)); }
// The number that has it, 0 for -0
template <typename T>
__device__ __forceinline__ Real<T> number_of(RankOf<T> short_rank) {
    using Rank = RankOf<T>;
    constexpr Rank SIGN = Rank(1) << (sizeof(Rank) * 8 - 1), USED = ~Rank(0) << UNUSED_BITS<T>;
    const Rank rank = short_rank << UNUSED_BITS<T>;
    return number_of_bits(Rank((rank & SIGN ? rank ^ SIGN : ~rank) & USED));
}

// The greatest that so many lanes side by side have
template <int LANES>
__device__ __forceinline__ uint32_t greatest_of(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    if constexpr (LANES == 32) return __reduce_max_sync(~0u, x);
#endif
    return warp_group_reduce(x, LANES, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
template <int LANES>
__device__ __forceinline__ uint64_t greatest_of(uint64_t x) {
    const auto high = static_cast<uint32_t>(x >> 32), greatest = greatest_of<LANES>(high);
    return uint64_t(greatest) << 32 | greatest_of<LANES>(high == greatest ? static_cast<uint32_t>(x) : 0u);
}

// A rank above the complement of a place: numbers of which no two of a line are equal, in the order of its elements, and above 0.
template <typename T>
struct Keys {
    using Key = uint64_t;
    static __device__ __forceinline__ Key of(uint32_t rank, uint32_t place) { return uint64_t(rank) << 32 | ~place; }
    static __device__ __forceinline__ uint32_t rank(Key key) { return key >> 32; }
    static __device__ __forceinline__ uint32_t place(Key key) { return ~uint32_t(key); }
};
struct WideKey {
    uint64_t rank;
    uint32_t before;

    __device__ __forceinline__ bool operator==(const WideKey& other) const { return rank == other.rank && before == other.before; }
    __device__ __forceinline__ bool operator>(const WideKey& other) const {
        return rank > other.rank || (rank == other.rank && before > other.before);
    }
};
template <>
struct Keys<double> {
    using Key = WideKey;
    static __device__ __forceinline__ Key of(uint64_t rank, uint32_t place) { return {rank, ~place}; }
    static __device__ __forceinline__ uint64_t rank(Key key) { return key.rank; }
    static __device__ __forceinline__ uint32_t place(Key key) { return ~key.before; }
};
template <int LANES>
__device__ __forceinline__ WideKey greatest_of(WideKey x) {
    const uint64_t rank = greatest_of<LANES>(x.rank);
    return {rank, greatest_of<LANES>(x.rank == rank ? x.before : 0u)};
}

// What is asked for, and where it goes: k places and weights of each line, and the sum of exponentials that weights are shares of, if
// that is asked for.
template <typename T>
struct TopK {
    T* weights;
    uint32_t* places;
    Real<T>* sums;
    int k;
    bool renormalise;
};
