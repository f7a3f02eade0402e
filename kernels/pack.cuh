// Neighbouring elements, moved with one access of 16 bytes (or of one element).
#pragma once
#include <cstdint>

#include "element.cuh"
#include "softmax_state.cuh"

template <typename T, int N = 16 / sizeof(T)>
struct alignas(sizeof(T) * N) Pack {
    static constexpr int SIZE = N;
    T elements[N];
};

// The type that moves as many bytes with one instruction.
template <int BYTES>
struct Bits;
template <>
struct Bits<16> { using Type = uint4; };
template <>
struct Bits<8> { using Type = uint2; };
template <>
struct Bits<4> { using Type = uint32_t; };
template <>
struct Bits<2> { using Type = unsigned short; };

// Each element is read once and written once: keep them out of the way of what is used again.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> load_streaming(const Pack<T, N>* from) {
    using B = typename Bits<sizeof(Pack<T, N>)>::Type;
    const B bits = __ldcs(reinterpret_cast<const B*>(from));
    return *reinterpret_cast<const Pack<T, N>*>(&bits);
}

template <typename T, int N>
__device__ __forceinline__ void store_streaming(Pack<T, N>* to, const Pack<T, N>& pack) {
    using B = typename Bits<sizeof(Pack<T, N>)>::Type;
    __stcs(reinterpret_cast<B*>(to), *reinterpret_cast<const B*>(&pack));
}

template <typename T, int N>
__device__ __forceinline__ void widen(const Pack<T, N>& pack, Real<T>* to) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = Element<T>::read(pack.elements[i]);
}

template <typename T, int N = 16 / sizeof(T)>
__device__ __forceinline__ Pack<T, N> narrow(const Real<T>* from) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; i++) pack.elements[i] = Element<T>::write(from[i]);
    return pack;
}

// A contiguous input, read in the packs of an output that starts at a multiple of 16 bytes. Where the input itself starts
// elsewhere, a pack is put together from two neighbouring aligned ones (the second comes from the L1 cache: it is the first
// of the next thread).
template <typename T>
struct Input {
    static constexpr int SIZE = Pack<T>::SIZE;
    const T* start;
    int64_t total;  // elements

    __device__ __forceinline__ int shift() const {
        return static_cast<int>(reinterpret_cast<uintptr_t>(start) % 16 / sizeof(T));
    }

    // The elements from `from` on, which is `by` elements behind the first of an aligned pack.
    __device__ __forceinline__ Pack<T> load(const T* from, int by) const {
        if (by == 0) return load_streaming(reinterpret_cast<const Pack<T>*>(from));
        const T* aligned = from - by;
        if (aligned >= start && aligned + 2 * SIZE <= start + total) {
            const uint4* packs = reinterpret_cast<const uint4*>(aligned);
            return joined(__ldg(packs), __ldg(packs + 1), by * int(sizeof(T)));
        }
        Pack<T> single;
#pragma unroll
        for (int i = 0; i < SIZE; i++) single.elements[i] = from[i];
        return single;
    }

    static __device__ __forceinline__ Pack<T> bits(uint4 bits) { return *reinterpret_cast<const Pack<T>*>(&bits); }

    // 16 of the 32 bytes of two neighbours, from byte `by` on.
    static __device__ __forceinline__ Pack<T> joined(uint4 low, uint4 high, int by) {
        uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (by & 8) {
#pragma unroll
            for (int i = 0; i < 6; i++) words[i] = words[i + 2];
        }
        if (by & 4) {
#pragma unroll
            for (int i = 0; i < 5; i++) words[i] = words[i + 1];
        }
        const int bits = by % 4 * 8;
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = __funnelshift_r(words[i], words[i + 1], bits);
        return *reinterpret_cast<const Pack<T>*>(out);
    }
};
