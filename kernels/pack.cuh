// Neighbouring elements, moved with one access.
#pragma once
#include <cstdint>
#include <type_traits>

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

template <typename T, int SIZE>
__device__ __forceinline__ Pack<T, SIZE> load(const Pack<T, SIZE>* from) {
    using B = typename Bits<sizeof(*from)>::Type;
    const B bits = *reinterpret_cast<const B*>(from);
    return *reinterpret_cast<const Pack<T, SIZE>*>(&bits);
}

// The same for a pack that stays as it is where it is not `wanted`. In one instruction: the compiler would load into other
// registers, and move.
__device__ __forceinline__ void load_bits_if(bool wanted, uint4& to, const void* from) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
                 : "l"(__cvta_generic_to_global(from)), "r"(uint32_t(wanted)) : "memory");
}
__device__ __forceinline__ void load_bits_if(bool wanted, uint2& to, const void* from) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.global.v2.u32 {%0, %1}, [%2];\n}"
                 : "+r"(to.x), "+r"(to.y) : "l"(__cvta_generic_to_global(from)), "r"(uint32_t(wanted)) : "memory");
}
__device__ __forceinline__ void load_bits_if(bool wanted, uint32_t& to, const void* from) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.u32 %0, [%1];\n}"
                 : "+r"(to) : "l"(__cvta_generic_to_global(from)), "r"(uint32_t(wanted)) : "memory");
}
template <typename T, int SIZE>
__device__ __forceinline__ void load_if(bool wanted, Pack<T, SIZE>& pack, const T* from) {
    load_bits_if(wanted, reinterpret_cast<typename Bits<sizeof(pack)>::Type&>(pack), from);
}

// The two elements of a unit of half precision one by one, each where it is `wanted`; the others stay as they are.
template <typename U, typename T>
__device__ __forceinline__ void load_each_if(bool first_wanted, bool second_wanted, U& unit, const T* first, const T* second) {
    auto& bits = reinterpret_cast<uint32_t&>(unit);
    asm volatile("{\n.reg .pred p, q;\n.reg .b32 x, y;\nsetp.ne.u32 p, %2, 0;\nsetp.ne.u32 q, %3, 0;\nmov.b32 x, %0;\nshr.u32 y, %0, 16;\n"
                 "@p ld.global.u16 x, [%1];\n@q ld.global.u16 y, [%4];\nprmt.b32 %0, x, y, 0x5410;\n}"
                 : "+r"(bits) : "l"(__cvta_generic_to_global(first)), "r"(uint32_t(first_wanted)), "r"(uint32_t(second_wanted)),
                   "l"(__cvta_generic_to_global(second)) : "memory");
}

template <typename T, int SIZE>
__device__ __forceinline__ void store_streaming(Pack<T, SIZE>* to, const Pack<T, SIZE>& pack) {
    using B = typename Bits<sizeof(pack)>::Type;
    __stcs(reinterpret_cast<B*>(to), *reinterpret_cast<const B*>(&pack));
}

template <typename T, int SIZE>
__device__ __forceinline__ void store(Pack<T, SIZE>* to, const Pack<T, SIZE>& pack) {
    using B = typename Bits<sizeof(pack)>::Type;
    *reinterpret_cast<B*>(to) = *reinterpret_cast<const B*>(&pack);
}

// How packs of 16 bytes are accessed. Each element is read once and written once, and streaming accesses leave the rest of the L2
// cache as it is, for kernels that read something again. Others load plainly: what earlier kernels left there would stay for good,
// and a tensor that streams through the rest waits longer for the memory to turn from reading to writing (softmax's backward of
// 4096 x 128256 f32 after a copy: 1575 us, with plain loads 1457, with plain stores alone 1570). Stores of parts of 128 bytes had
// better stream, even so, where tensors are in the cache: 131072 x 32 f32 at an offset of one element 7.1 us, plain 10.4.

// Plainly, …
struct PlainAccess {
    template <typename P, typename T>
    __device__ __forceinline__ void load_if(bool wanted, P& pack, const T* from) const {
        ::load_if(wanted, pack, from);
    }
    template <typename P>
    __device__ __forceinline__ void store(P* to, const P& pack) const {
        ::store(to, pack);
    }
};

// … streaming, …
struct StreamingAccess {
    template <typename P, typename T>
    __device__ __forceinline__ void load_if(bool wanted, P& pack, const T* from) const {
        auto& to = reinterpret_cast<uint4&>(pack);
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                     : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
                     : "l"(__cvta_generic_to_global(from)), "r"(uint32_t(wanted)) : "memory");
    }
    template <typename P>
    __device__ __forceinline__ void store(P* to, const P& pack) const {
        store_streaming(to, pack);
    }
};

// … or as it is said when the kernel runs: on Hopper by a policy that each access is given, so that it takes no instruction more.
#if __CUDA_ARCH__ >= 900
// Of what the L2 cache is to give up first. Stores by it are not the streaming ones: in strips they take 0.98 to 1.0 of the time.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void store_bits_by(uint64_t policy, void* to, const uint4& bits) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w), "l"(policy) : "memory");
}
__device__ __forceinline__ void store_bits_by(uint64_t policy, void* to, const uint2& bits) {
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(__cvta_generic_to_global(to)), "r"(bits.x), "r"(bits.y),
                 "l"(policy) : "memory");
}
__device__ __forceinline__ void store_bits_by(uint64_t policy, void* to, uint32_t bits) {
    asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(__cvta_generic_to_global(to)), "r"(bits), "l"(policy) : "memory");
}
template <typename T, int SIZE>
__device__ __forceinline__ void store_by(uint64_t policy, Pack<T, SIZE>* to, const Pack<T, SIZE>& pack) {
    store_bits_by(policy, to, reinterpret_cast<const typename Bits<sizeof(pack)>::Type&>(pack));
}

struct EitherAccess {
    uint64_t policy;

    __device__ __forceinline__ explicit EitherAccess(bool streaming) {
        uint64_t plain;
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(plain));
        policy = streaming ? evict_first() : plain;
    }
    template <typename P, typename T>
    __device__ __forceinline__ void load_if(bool wanted, P& pack, const T* from) const {
        auto& to = reinterpret_cast<uint4&>(pack);
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;\n}"
                     : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
                     : "l"(__cvta_generic_to_global(from)), "r"(uint32_t(wanted)), "l"(policy) : "memory");
    }
    template <typename P>
    __device__ __forceinline__ void store(P* to, const P& pack) const {
        if constexpr (sizeof(P) < 16) ::store(to, pack);
        else store_by(policy, to, pack);
    }
};
#else
struct EitherAccess {
    bool streaming;

    __device__ __forceinline__ explicit EitherAccess(bool streaming) : streaming(streaming) {}
    template <typename P, typename T>
    __device__ __forceinline__ void load_if(bool wanted, P& pack, const T* from) const {
        StreamingAccess().load_if(wanted && streaming, pack, from);
        ::load_if(wanted && !streaming, pack, from);
    }
    template <typename P>
    __device__ __forceinline__ void store(P* to, const P& pack) const {
        if (streaming) store_streaming(to, pack);
        else ::store(to, pack);
    }
};
#endif

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

// Of a thread's ROWS rows of UNITS units, `step` apart, those behind the `mine` that there are become none.
template <typename T, int UNITS, int ROWS>
__device__ __forceinline__ void keep_rows(Unit<T> (&held)[ROWS * UNITS], int step, int mine) {
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (k * step < mine) continue;
#pragma unroll
        for (int u = 0; u < UNITS; u++) held[k * UNITS + u] = no_elements<T>();
    }
}

// A pack of what is computed, number(i) for element i
template <typename T, int SIZE, typename F>
__device__ __forceinline__ Pack<T, SIZE> pack_of(const F& number) {
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
    Pack<T, SIZE> pack;
#pragma unroll
    for (int u = 0; u < pack.UNITS; u++) {
        Real<T> of_unit[PER_UNIT];
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) of_unit[i] = number(u * PER_UNIT + i);
        pack.units[u] = Element<T>::to_unit(of_unit);
    }
    return pack;
}

// f(k) for each of up to MOST places of a thread, `step` apart, that any thread may have of `all`: FEW at a time.
template <int MOST, int FEW, typename F>
__device__ __forceinline__ void each_place(int step, int all, const F& f) {
#pragma unroll
    for (int from = 0; from < MOST; from += FEW) {
        if (from * step >= all) break;
#pragma unroll
        for (int k = from; k < from + FEW; k++) f(k);
    }
}

// Element i of a pack, as it is in memory
template <typename T, int SIZE>
__device__ __forceinline__ T& element(Pack<T, SIZE>& pack, int i) {
    return reinterpret_cast<T*>(&pack)[i];
}

// A unit of half precision as a number
template <typename U>
__device__ __forceinline__ auto& bits_of(U& unit) {
    return reinterpret_cast<std::conditional_t<std::is_const_v<U>, const uint32_t, uint32_t>&>(unit);
}

// Element i of a pack is to be that of a unit.
template <typename T, int SIZE>
__device__ __forceinline__ void set(Pack<T, SIZE>& pack, int i, Unit<T> to) {
    if constexpr (Element<T>::PER_UNIT == 1) {
        pack.units[i] = to;
    } else {
        const uint32_t mask = i % 2 ? 0xffff0000u : 0xffffu;
        auto& bits = bits_of(pack.units[i / 2]);
        bits = (bits & ~mask) | (bits_of(to) & mask);
    }
}

// Elements begin..end of a pack, and -inf for the others
template <typename T, int SIZE>
__device__ __forceinline__ Pack<T, SIZE> part_of(Pack<T, SIZE> pack, int begin, int end) {
    const auto has = [&](int i) { return i >= begin && i < end; };
#pragma unroll
    for (int u = 0; u < pack.UNITS; u++) {
        if constexpr (Element<T>::PER_UNIT == 1) {
            if (!has(u)) pack.units[u] = no_elements<T>();
        } else {
            const uint32_t mask = (has(2 * u) ? 0xffffu : 0) | (has(2 * u + 1) ? 0xffff0000u : 0);
            const auto none = no_elements<T>();
            bits_of(pack.units[u]) = (bits_of(pack.units[u]) & mask) | (bits_of(none) & ~mask);
        }
    }
    return pack;
}

template <typename T>
__device__ __forceinline__ Real<T> max_of_unit(Unit<T> unit) {
    Real<T> max = Element<T>::of_unit(unit, 0);
    if (Element<T>::PER_UNIT > 1) max = greater(max, Element<T>::of_unit(unit, 1));
    return max;
}

// Which element of a line that is read in packs a thread sees to beside them, or -1: there are `head` before them and `tail` behind, up to fifteen each,
// of the first and the next sixteen threads.
__device__ __forceinline__ int64_t edge_of_line(int thread, int head, int tail, int64_t len) {
    if (thread < head) return thread;
    return thread >= 16 && thread < 16 + tail ? len - tail + thread - 16 : -1;
}

// Keeps the compiler from keeping what it has computed of this unit: it is to be computed again.
template <typename U>
__device__ __forceinline__ void forget(U& unit) {
    if constexpr (sizeof(U) == 4) asm volatile("" : "+r"(reinterpret_cast<uint32_t&>(unit)));
}
// Nor is the assembler to keep it: for GPUs before 8.0 it does so in memory where it has no registers. `none` is 0, which it must not be able to tell.
template <typename U>
__device__ __forceinline__ void forget(U& unit, uint32_t none) {
    forget(unit);
#if __CUDA_ARCH__ < 800
    if constexpr (sizeof(U) == 4) bits_of(unit) ^= none;
#endif
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
