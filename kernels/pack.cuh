// Neighbouring elements, moved with one access.
#pragma once
#include <cstdint>

#include "element.cuh"
#include "softmax_state.cuh"

// In units, so that what is not in use of half precision stays two to a register. Of one element where SIZE is 1.
template <typename T, int SIZE>
struct alignas(sizeof(T) * SIZE) Pack {
    static constexpr int UNITS = SIZE / Element<T>::PER_UNIT;
    Unit<T> units[UNITS];
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

// Each element is read once and written once: keep them out of the way of what is used again.
template <typename T, int SIZE>
__device__ __forceinline__ Pack<T, SIZE> load_streaming(const Pack<T, SIZE>* from) {
    using B = typename Bits<sizeof(*from)>::Type;
    const B bits = __ldcs(reinterpret_cast<const B*>(from));
    return *reinterpret_cast<const Pack<T, SIZE>*>(&bits);
}

// What may still be in the L2 cache, or shall be: where lines are long, this was faster by up to 5 %.
template <typename T, int SIZE>
__device__ __forceinline__ Pack<T, SIZE> load_cached(const Pack<T, SIZE>* from) {
    using B = typename Bits<sizeof(*from)>::Type;
    const B bits = *reinterpret_cast<const B*>(from);
    return *reinterpret_cast<const Pack<T, SIZE>*>(&bits);
}

// The same for a pack that stays as it is where it is not `wanted`. In one instruction: the compiler would load into other
// registers, and move.
template <bool STREAMING>
__device__ __forceinline__ void load_bits_if(bool wanted, uint4& to, const void* from) {
    const auto address = __cvta_generic_to_global(from);
    if constexpr (STREAMING) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w) : "l"(address), "r"(uint32_t(wanted)) : "memory");
    } else {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w) : "l"(address), "r"(uint32_t(wanted)) : "memory");
    }
}
template <bool STREAMING>
__device__ __forceinline__ void load_bits_if(bool wanted, uint2& to, const void* from) {
    const auto address = __cvta_generic_to_global(from);
    if constexpr (STREAMING) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.global.cs.v2.u32 {%0, %1}, [%2];\n}"
                     : "+r"(to.x), "+r"(to.y) : "l"(address), "r"(uint32_t(wanted)) : "memory");
    } else {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.global.v2.u32 {%0, %1}, [%2];\n}"
                     : "+r"(to.x), "+r"(to.y) : "l"(address), "r"(uint32_t(wanted)) : "memory");
    }
}
template <bool STREAMING>
__device__ __forceinline__ void load_bits_if(bool wanted, uint32_t& to, const void* from) {
    const auto address = __cvta_generic_to_global(from);
    if constexpr (STREAMING) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.cs.u32 %0, [%1];\n}"
                     : "+r"(to) : "l"(address), "r"(uint32_t(wanted)) : "memory");
    } else {
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.u32 %0, [%1];\n}"
                     : "+r"(to) : "l"(address), "r"(uint32_t(wanted)) : "memory");
    }
}
template <bool STREAMING, typename T, int SIZE>
__device__ __forceinline__ void load_if(bool wanted, Pack<T, SIZE>& pack, const T* from) {
    load_bits_if<STREAMING>(wanted, reinterpret_cast<typename Bits<sizeof(pack)>::Type&>(pack), from);
}

template <typename T, int SIZE>
__device__ __forceinline__ void store_streaming(Pack<T, SIZE>* to, const Pack<T, SIZE>& pack) {
    using B = typename Bits<sizeof(pack)>::Type;
    __stcs(reinterpret_cast<B*>(to), *reinterpret_cast<const B*>(&pack));
}

// -inf, as many times as a unit holds. By its bits, since a conversion would be done anew for each.
template <typename T>
__device__ __forceinline__ Unit<T> no_elements() {
    if constexpr (Element<T>::PER_UNIT == 1) {
        return negative_infinity<Real<T>>();
    } else {
        const uint32_t bits = Element<T>::NEGATIVE_INFINITY * 0x10001u;
        return reinterpret_cast<const Unit<T>&>(bits);
    }
}

// A pack of them
template <typename T, int SIZE>
__device__ __forceinline__ Pack<T, SIZE> no_pack() {
    Pack<T, SIZE> pack;
#pragma unroll
    for (auto& unit : pack.units) unit = no_elements<T>();
    return pack;
}

template <typename T>
__device__ __forceinline__ Real<T> max_of_unit(Unit<T> unit) {
    Real<T> max = Element<T>::of_unit(unit, 0);
    if (Element<T>::PER_UNIT > 1) max = greater(max, Element<T>::of_unit(unit, 1));
    return max;
}

// Keeps the compiler from keeping what it has computed of this unit: it is to be computed again.
template <typename U>
__device__ __forceinline__ void forget(U& unit) {
    if constexpr (sizeof(U) == 4) asm volatile("" : "+r"(reinterpret_cast<uint32_t&>(unit)));
}

// Fetches `count` elements into the L2 cache. What of them shares 16 bytes with others at either end may be left out.
template <typename T>
__device__ __forceinline__ void prefetch(const T* from, int count) {
#if __CUDA_ARCH__ >= 900
    const auto begin = (reinterpret_cast<uintptr_t>(from) + 15) & ~uintptr_t(15);
    const auto bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(from + count) - begin) & ~15;
    if (bytes > 0) {
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(reinterpret_cast<void*>(begin))),
                     "r"(int(bytes)) : "memory");
    }
#endif
}

// The same for the 128 bytes of the cache's line that this element is in.
template <typename T>
__device__ __forceinline__ void prefetch(const T* of) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(of)));
}
