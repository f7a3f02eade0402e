// Softmax with what models put around it, of lines of any length and offset, in tiles: the scores are copied into shared memory
// and the results back as the runs that they are in memory, wherever lines end. Moves what the kernels for whole packs move.
#pragma once
#include "fused.cuh"
#include "tile.cuh"

// As many numbers as a few units of a thread have.
template <typename R, int COUNT>
struct Few {
    R of[COUNT];
};

// Results and their gradients that have not the scores' dtype: f32 beside others, and half precision beside f32. Of more
// src/cuda/fused.rs gives none to these kernels.
template <typename T>
struct OtherDtype {
    using Stored = float;
    static __device__ __forceinline__ Stored write(Dtype, Real<T> x) { return static_cast<float>(x); }
    static __device__ __forceinline__ Real<T> read(Dtype, Stored x) { return x; }
};
template <>
struct OtherDtype<float> {
    using Stored = uint16_t;  // their bits
    static __device__ __forceinline__ Stored write(Dtype dtype, float x) {
        const auto half = Element<__half>::write(x);
        const auto other = Element<__nv_bfloat16>::write(x);
        return dtype == F16 ? reinterpret_cast<const Stored&>(half) : reinterpret_cast<const Stored&>(other);
    }
    static __device__ __forceinline__ float read(Dtype dtype, Stored x) {
        return dtype == F16 ? Element<__half>::read(reinterpret_cast<const __half&>(x)) : __uint_as_float(uint32_t(x) << 16);
    }
};

// What softcap's cap is multiplied with, and what gradients are. Called, since there would be one for each few elements of a thread.
template <typename R, int COUNT>
__device__ __noinline__ Few<R, COUNT> tangents(const Fused<R>& call, Few<R, COUNT> scores) {
#pragma unroll 1
    for (int i = 0; i < COUNT; i++) scores.of[i] = hyperbolic_tangent(scores.of[i] * call.scale * call.inverse_cap);
    return scores;
}
template <typename R, int COUNT>
__device__ __noinline__ Few<R, COUNT> slopes(const Fused<R>& call, Few<R, COUNT> scores) {
#pragma unroll 1
    for (int i = 0; i < COUNT; i++) scores.of[i] = slope(call, scores.of[i]);
    return scores;
}

// What is in shared memory or, below, in global memory, if j < end, and anything otherwise: no branch, no register to be filled first.
#define READ_BELOW(read, type, constraint, to, address_constraint, from, j, end)                               \
    asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p,%2,%3;\n@p " read "." type " %0,[%1];\n}" : constraint(to) \
                 : address_constraint(from), "r"(j), "r"(end) : "memory")
template <typename U>
__device__ __forceinline__ U read_shared_below(int j, int end, uint32_t from) {
    std::conditional_t<sizeof(U) == 8, uint64_t, uint32_t> bits;
    if constexpr (sizeof(U) == 8) READ_BELOW("ld.shared", "u64", "=l", bits, "r", from, j, end);
    else READ_BELOW("ld.shared", "u32", "=r", bits, "r", from, j, end);
    return reinterpret_cast<const U&>(bits);
}
template <typename P>
__device__ __forceinline__ P read_below(int j, int end, uint64_t from) {
    if constexpr (sizeof(P) == 1) {
        uint32_t bits;
        READ_BELOW("ld.global", "u8", "=r", bits, "l", from, j, end);
        return static_cast<P>(bits);
    } else {
        using B = std::conditional_t<sizeof(P) == 8, uint64_t, std::conditional_t<sizeof(P) == 4, uint32_t, uint16_t>>;
        B bits;
        if constexpr (sizeof(P) == 8) READ_BELOW("ld.global", "u64", "=l", bits, "l", from, j, end);
        else if constexpr (sizeof(P) == 4) READ_BELOW("ld.global", "u32", "=r", bits, "l", from, j, end);
        else READ_BELOW("ld.global", "u16", "=h", bits, "l", from, j, end);
        return reinterpret_cast<const P&>(bits);
    }
}
#undef READ_BELOW
// j * distance bytes behind, in one instruction, for which the compiler would take four
__device__ __forceinline__ uint64_t address_at(uint64_t from, uint32_t j, uint32_t distance) {
    asm("mad.wide.u32 %0,%1,%2,%0;" : "+l"(from) : "r"(j), "r"(distance));
    return from;
}
template <typename P>
__device__ __forceinline__ uint64_t global_address(const P* at) { return __cvta_generic_to_global(at); }
template <typename U>
__device__ __forceinline__ void write_shared(uint32_t to, U unit) {
    if constexpr (sizeof(U) == 8) asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(reinterpret_cast<const uint64_t&>(unit)) : "memory");
    else asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(reinterpret_cast<const uint32_t&>(unit)) : "memory");
}

// The threads that share a line: 2^shift of a warp, or, where shift is WHOLE_BLOCK, a block.
constexpr int WHOLE_BLOCK = 6;
template <typename R>
struct TileGroup {
    int shift;
    Normalizer<R>* parts;   // MAX_WARPS, in shared memory, …
    Weighted<R>* weighted;  // … or as many of these

    __device__ __forceinline__ bool is_block() const { return shift == WHOLE_BLOCK; }
    __device__ __forceinline__ int size() const { return is_block() ? blockDim.x : 1 << shift; }
    __device__ __forceinline__ int rank() const { return is_block() ? threadIdx.x : threadIdx.x & ((1 << shift) - 1); }
    // How many lines a block takes, and which of them is this thread's
    __device__ __forceinline__ int lines() const { return is_block() ? 1 : blockDim.x >> shift; }
    __device__ __forceinline__ int own() const { return is_block() ? 0 : threadIdx.x >> shift; }

    template <typename F>
    __device__ __forceinline__ R reduce(R value, F f) const { return warp_group_reduce(value, 1 << shift, f); }
    __device__ __forceinline__ Normalizer<R> merge(Normalizer<R> part) const {
        return is_block() ? BlockExchange<R>{parts}.merge(part) : part;
    }
    __device__ __forceinline__ Weighted<R> merge(Weighted<R> part, bool unweighted) const {
        return is_block() ? WholeBlocks<R, BlockExchange<R>>{{}, weighted}.merge(part, unweighted) : part;
    }
    // As WarpGroup's
    __device__ __forceinline__ bool all(bool holds) const { return is_block() ? holds : __all_sync(~0u, holds); }
};

// Which elements of a line in a tile are one thread's: up to WORDS units of 4 bytes (f64: elements), as far from each other as there are
// threads that share the line, so that these read neighbours of what is added or masked. Of half precision a line may begin and end
// in the middle of a unit that it shares with its neighbours: these elements are its first and its last thread's.
template <typename T, int WORDS>
struct TilePlaces {
    static constexpr int PER_UNIT = Element<T>::PER_UNIT, ENDS = PER_UNIT > 1 ? 2 : 0, COUNT = WORDS * PER_UNIT + ENDS;

    T* elements;                  // of the line
    uint32_t at;                  // where it is in shared memory
    int len, first, step, units;  // this thread's first element in a unit, how far its next unit is, and where the line's units end
    int longest;                  // where those of any line of the block do
    bool has_first, has_last;

    // The line begins `begin` elements from a multiple of 4 bytes on, and other lines of the block have `of_any` elements.
    __device__ __forceinline__ TilePlaces(T* line, int begin, int len, int of_any, int rank, int threads) : elements(line), len(len) {
        const int before = PER_UNIT > 1 ? begin & 1 : 0;
        first = before + rank * PER_UNIT;
        step = threads * PER_UNIT;
        units = len - (PER_UNIT - 1);
        longest = of_any - (PER_UNIT - 1);
        has_first = before > 0 && len > 0 && rank == 0;
        has_last = PER_UNIT > 1 && (len - before) % 2 == 1 && len > before && rank == threads - 1;
        at = shared_address(line);
        // Computed once: it is cheap to compute again, but not for every access.
        asm("" : "+r"(at), "+r"(first));
    }

    // Calls f with each multiple k of FEW, and the place in the line of this unit, as long as the line has units there.
    template <typename F>
    __device__ __forceinline__ void each_few_words(F f) const {
        int j = first;
#pragma unroll
        for (int k = 0; k < WORDS; k += FEW, j += FEW * step) {
            if (k * step >= longest) break;
            f(k, j);
        }
    }
    // Calls f with each k and the place of its unit.
    template <typename F>
    __device__ __forceinline__ void each_word(F f) const {
        each_few_words([&](int from, int j) {
#pragma unroll
            for (int k = from; k < from + FEW; k++, j += step) f(k, j);
        });
    }
    // Calls f(n, read) with the place n in z of each element, and what was read for it at so many bytes times its place in the line:
    // several are asked for before one is waited for.
    template <typename P, typename F>
    __device__ __forceinline__ void each_read(const P* from, int64_t distance_between, F f) const {
        const auto distance = static_cast<uint32_t>(distance_between);
        const auto at = [&, begin = global_address(from)](int j) { return address_at(begin, j, distance); };
        each_few_words([&](int few, int place) {
            P found[FEW * PER_UNIT];
            int j = place;
#pragma unroll
            for (int k = 0; k < FEW; k++, j += step) {
#pragma unroll
                for (int i = 0; i < PER_UNIT; i++) found[k * PER_UNIT + i] = read_below<P>(j, units, at(j + i));
            }
#pragma unroll
            for (int n = 0; n < FEW * PER_UNIT; n++) f(few * PER_UNIT + n, found[n]);
        });
        if constexpr (PER_UNIT > 1) {
            f(COUNT - 2, read_below<P>(0, has_first, at(0)));
            f(COUNT - 1, read_below<P>(0, has_last, at(len - 1)));
        }
    }
    // Calls f with each place in z where there may be an element.
    template <typename F>
    __device__ __forceinline__ void each_held(F f) const {
        each_word([&](int k, int) {
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) f(k * PER_UNIT + i);
        });
#pragma unroll
        for (int n = WORDS * PER_UNIT; n < COUNT; n++) f(n);
    }
    // Calls f with the place in z and the place in the line of each element.
    template <typename F>
    __device__ __forceinline__ void each(F f) const {
        each_word([&](int k, int j) {
            if (j >= units) return;
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) f(k * PER_UNIT + i, j + i);
        });
        each_end(f);
    }
    // The same of the elements without a unit
    template <typename F>
    __device__ __forceinline__ void each_end(F f) const {
        if constexpr (PER_UNIT > 1) {
            if (has_first) f(WORDS * PER_UNIT, 0);
            if (has_last) f(WORDS * PER_UNIT + 1, len - 1);
        }
    }

    // Calls f(n, few) with the place n in z of the first of a few elements, and these from shared memory, or anything where the line
    // has none; the ends are the last.
    template <typename F>
    __device__ __forceinline__ void each_few_scores(F f) const {
        using R = Real<T>;
        each_few_words([&](int few, int place) {
            Few<R, FEW * PER_UNIT> found;
            int j = place;
#pragma unroll
            for (int k = 0; k < FEW; k++, j += step) {
                const auto unit = read_shared_below<Unit<T>>(j, units, at + j * int(sizeof(T)));
#pragma unroll
                for (int i = 0; i < PER_UNIT; i++) found.of[k * PER_UNIT + i] = Element<T>::of_unit(unit, i);
            }
            f(few * PER_UNIT, found);
        });
        if constexpr (PER_UNIT > 1) {
            Few<R, FEW * PER_UNIT> found = {};
            if (has_first) found.of[0] = Element<T>::read(elements[0]);
            if (has_last) found.of[1] = Element<T>::read(elements[len - 1]);
            f(WORDS * PER_UNIT, found);
        }
    }
    // Whether there is the element with this place in z.
    __device__ __forceinline__ bool is_of_line(int n) const {
        if (n >= WORDS * PER_UNIT) return n % 2 ? has_last : has_first;
        return first + n / PER_UNIT * step < units;
    }

    // Calls f with each unit in shared memory, or anything where the line has none.
    template <typename F>
    __device__ __forceinline__ void each_unit(F f) const {
        each_word([&](int k, int j) { f(k, j < units, read_shared_below<Unit<T>>(j, units, at + j * int(sizeof(T)))); });
    }

    // Writes unit(k) and element(n) to where the line is, so many units further.
    template <typename UnitOf, typename ElementOf>
    __device__ __forceinline__ void store(int shifted, UnitOf unit, ElementOf element) const {
        each_word([&](int k, int j) {
            const Unit<T> own = unit(k);
            if (j < units) write_shared(at + j * int(sizeof(T)) + shifted * int(sizeof(Unit<T>)), own);
        });
        each_end([&](int n, int j) { elements[j + shifted * PER_UNIT] = element(n); });
    }

    // Asks for the line's mask, as far as it lies in one piece, before it is needed: it comes by single bytes.
    template <typename R>
    __device__ __forceinline__ void touch_mask(const Fused<R>& call, const Place& place) const {
        if (call.masks != EACH || call.mask_step != 1) return;
        const auto* mask = static_cast<const uint8_t*>(call.mask) + place.mask;
        for (int j = first / PER_UNIT * 64; j < len; j += step / PER_UNIT * 64) read_below<uint8_t>(j, len, global_address(mask + j));
    }
};

// The logits of these elements.
template <typename T, int WORDS>
struct TileLogits : TilePlaces<T, WORDS> {
    using R = Real<T>;
    using Places = TilePlaces<T, WORDS>;
    using Places::COUNT, Places::ENDS, Places::PER_UNIT, Places::Places, Places::each, Places::each_few_scores, Places::each_held,
        Places::each_read, Places::each_unit, Places::each_word, Places::elements, Places::has_first, Places::has_last, Places::is_of_line,
        Places::len, Places::longest, Places::step, Places::touch_mask, Places::units;
    static constexpr bool ONCE = true;
    static constexpr int PACKS = COUNT / PER_UNIT, SIZE = PER_UNIT;  // a unit is a pack, and so are the ends

    bool log;
    R z[COUNT];

    static __device__ __forceinline__ Exponential<T> exponential(R max) { return Exponential<T>(max); }
    static __device__ __forceinline__ R logit(R z) { return z; }

    // While the scores come: what is added to them.
    __device__ __forceinline__ void prepare(const Fused<R>& call, const Place& place) {
        log = call.log;
        const auto* bias = static_cast<const T*>(call.bias) + place.bias;
        if (call.adds == EACH) {
            each_read(bias, call.bias_step * sizeof(T), [&](int n, T read) { z[n] = Element<T>::read(read); });
        } else {
            const R added = call.adds == ONE ? Element<T>::read(*bias) : R(0);
            each_held([&](int n) { z[n] = added; });
        }
        touch_mask(call, place);
    }

    // Answers the greatest.
    __device__ __forceinline__ R load(const Fused<R>& call, const Place& place) {
        const R absent = negative_infinity<R>();
        if (call.cap > R(0)) {
            each_few_scores([&](int few, const Few<R, FEW * PER_UNIT>& found) {
                const auto tangent = tangents(call, found);
#pragma unroll
                for (int i = 0; i < FEW * PER_UNIT && few + i < COUNT; i++) {
                    const R logit = fma(tangent.of[i], call.cap, z[few + i]);
                    z[few + i] = is_of_line(few + i) ? logit : absent;
                }
            });
        } else {
            R scale = call.scale;
            if constexpr (sizeof(R) == 4) asm("" : "+f"(scale));  // not read anew for each
            each_unit([&](int k, bool is, Unit<T> unit) {
#pragma unroll
                for (int i = 0; i < PER_UNIT; i++) {
                    R& own = z[k * PER_UNIT + i];
                    const R logit = fma(Element<T>::of_unit(unit, i), scale, own);
                    own = is ? logit : absent;
                }
            });
            if constexpr (PER_UNIT > 1) {
                auto& ends = reinterpret_cast<R(&)[2]>(z[COUNT - 2]);
                ends[0] = has_first ? fma(Element<T>::read(elements[0]), scale, ends[0]) : absent;
                ends[1] = has_last ? fma(Element<T>::read(elements[len - 1]), scale, ends[1]) : absent;
            }
        }
        const auto* mask = static_cast<const uint8_t*>(call.mask) + place.mask;
        if (call.masks == EACH) each_read(mask, call.mask_step, [&](int n, uint8_t keep) { z[n] = keep ? z[n] : absent; });
        const bool nothing = call.masks == ONE && !*mask;
        if (call.window || nothing) {
            const int begin = static_cast<int>(place.first);
            const auto size = nothing ? 0u : static_cast<uint32_t>(place.end - place.first);
            const auto takes = [&](int j) { return static_cast<uint32_t>(j - begin) < size; };
            each_word([&](int k, int j) {
#pragma unroll
                for (int i = 0; i < PER_UNIT; i++) z[k * PER_UNIT + i] = takes(j + i) ? z[k * PER_UNIT + i] : absent;
            });
            if constexpr (PER_UNIT > 1) {
                z[COUNT - 2] = takes(0) ? z[COUNT - 2] : absent;
                z[COUNT - 1] = takes(len - 1) ? z[COUNT - 1] : absent;
            }
        }
        R max = absent;
        each_held([&](int n) { max = greater(max, z[n]); });
        return max;
    }

    // Answers the sum of the exponentials, which are kept in place of the logits unless logarithms are asked for.
    template <bool>
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential) {
        R sums[4] = {};
        each_held([&](int n) {
            const R e = exponential(z[n]);
            z[n] = log ? z[n] : e;
            sums[n % 4] += e;
        });
        return pairwise_sum(sums);
    }

    __device__ __forceinline__ bool takes(int k) const { return k * PER_UNIT >= COUNT - ENDS || k * step < longest; }
    // Of element i of unit k, which is kept in place of the logit
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential, int k, int i) {
        R& own = z[k * PER_UNIT + i];
        return own = exponential(own);
    }

    // What becomes of each element by `f`.
    template <typename F>
    __device__ __forceinline__ void results(F f) {
        each_held([&](int n) { z[n] = f(z[n]); });
    }
    __device__ __forceinline__ void store(int shifted) const {
        Places::store(
            shifted,
            [&](int k) {
                R numbers[PER_UNIT];
#pragma unroll
                for (int i = 0; i < PER_UNIT; i++) numbers[i] = z[k * PER_UNIT + i];
                return Element<T>::to_unit(numbers);
            },
            [&](int n) { return Element<T>::write(z[n]); });
    }
};

// Scores of half precision, which are the logits but for a scale above 0, a mask and a window, as they lie in memory: a thread has room
// for twice as many, and what it does once is done half as often. In return exponentials are computed twice.
template <typename T, int WORDS>
struct TileScores : TilePlaces<T, WORDS> {
    using R = Real<T>;
    using Places = TilePlaces<T, WORDS>;
    using Places::Places, Places::each_read, Places::each_unit, Places::each_word, Places::elements, Places::has_first, Places::has_last,
        Places::len, Places::longest, Places::step, Places::touch_mask;
    static constexpr bool ONCE = false;
    static constexpr int PACKS = WORDS + 1, SIZE = 2;

    R scale;
    Unit<T> held[WORDS + 1];  // and the ends

    __device__ __forceinline__ Exponential<T> exponential(R max) const { return Exponential<T>(max, scale); }
    __device__ __forceinline__ R logit(R score) const { return score * scale; }

    __device__ __forceinline__ void prepare(const Fused<R>& call, const Place& place) {
        scale = call.scale;
        touch_mask(call, place);
    }

    // Calls f with each place in `held` where there may be elements.
    template <typename F>
    __device__ __forceinline__ void each_held_unit(F f) const {
        each_word([&](int k, int) { f(k); });
        f(WORDS);
    }

    // Answers the greatest.
    __device__ __forceinline__ R load(const Fused<R>& call, const Place& place) {
        const auto absent = no_elements<T>();
        each_unit([&](int k, bool is, Unit<T> unit) { held[k] = is ? unit : absent; });
        held[WORDS] = absent;
        if (has_first) held[WORDS].x = elements[0];
        if (has_last) held[WORDS].y = elements[len - 1];
        const auto* mask = static_cast<const uint8_t*>(call.mask) + place.mask;
        if (call.masks == EACH) {
            uint32_t low = 0;
            each_read(mask, call.mask_step, [&](int n, uint8_t takes) {
                if (n % 2 == 0) low = takes;
                else keep(held[n / 2], low, takes);
            });
        }
        const bool nothing = call.masks == ONE && !*mask;
        if (call.window || nothing) {
            const int begin = static_cast<int>(place.first);
            const auto size = nothing ? 0u : static_cast<uint32_t>(place.end - place.first);
            const auto takes = [&](int j) { return static_cast<uint32_t>(j - begin) < size; };
            each_word([&](int k, int j) { keep(held[k], takes(j), takes(j + 1)); });
            keep(held[WORDS], takes(0), takes(len - 1));
        }
        auto max = held[WORDS];
        each_word([&](int k, int) { max = greater(max, held[k]); });
        return max_of_unit<T>(max);
    }

    __device__ __forceinline__ bool takes(int k) const { return k == WORDS || k * step < longest; }
    __device__ __forceinline__ R score(int k, int i) const { return Element<T>::of_unit(held[k], i); }
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential, int k, int i) const { return exponential(score(k, i)); }

    // The elements of a unit that are to be kept, and -inf for the others.
    static __device__ __forceinline__ void keep(Unit<T>& unit, bool low, bool high) {
        const auto absent = no_elements<T>();
        const uint32_t kept = (low ? 0xffffu : 0) | (high ? 0xffff0000u : 0);
        bits_of(unit) = (bits_of(unit) & kept) | (bits_of(absent) & ~kept);
    }

    // Answers the sum of the exponentials.
    template <bool KEEP>
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential) const {
        R sums[4] = {};
        each_held_unit([&](int k) {
#pragma unroll
            for (int i = 0; i < 2; i++) sums[(k * 2 + i) % 4] += exponential(Element<T>::of_unit(held[k], i));
        });
        return pairwise_sum(sums);
    }

    template <typename F>
    __device__ __forceinline__ void results(F f) {
        each_held_unit([&](int k) {
            forget(held[k]);  // what is to be computed again must not be kept from the first time
            const R numbers[2] = {f(Element<T>::of_unit(held[k], 0)), f(Element<T>::of_unit(held[k], 1))};
            held[k] = Element<T>::to_unit(numbers);
        });
    }
    __device__ __forceinline__ void store(int shifted) const {
        Places::store(shifted, [&](int k) { return held[k]; }, [&](int n) { return n % 2 ? held[n / 2].y : held[n / 2].x; });
    }
};

// What is dropped of a line's results becomes 0. Eight neighbours share random bits.
template <typename O, typename R>
__device__ __forceinline__ void drop(const Fused<R>& call, int64_t line, O* results, int len, int rank, int threads) {
    const O zero = {};
#pragma unroll 1
    for (int j = rank * 8; j < len; j += threads * 8) {
        each_dropped<8>(call, line, j, [&](int i) {
            if (j + i < len) results[j + i] = zero;
        });
    }
}

// Writes what is held of lines that lay in a tile from element `from` on to where they are to be. `change` is given this line in
// shared memory before it leaves that.
template <typename T, typename Held, typename Change>
__device__ __forceinline__ void store_tile(const Held& held, const Tile<T>& tile, int from, T* result, Change change) {
    // Where the result lies otherwise in its 128 bytes, it goes elsewhere than where the scores were, as far as whole units do.
    const int difference = Tile<T>::before(result) - from;
    const bool in_units = difference % Held::PER_UNIT == 0;
    const int shifted = in_units ? difference / Held::PER_UNIT : 0;
    if (shifted != 0) __syncthreads();
    held.store(shifted);
    change(held.elements + shifted * Held::PER_UNIT);
    if (in_units) tile.store(result);
    else tile.store_elements(result, from);
}

// Shared memory: the tile and its margin.
template <typename T, typename Held>
__device__ __forceinline__ void fused_tile(const Fused<Real<T>>& call, const TileGroup<Real<T>>& group) {
    using R = Real<T>;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ ArrivalBarrier arrived[1];
    prepare(arrived);
    const int64_t number = call.sharers.size > 0 ? shared_line(call, blockIdx.x) : blockIdx.x * int64_t(group.lines());
    const int len = static_cast<int>(call.len), here = call.lines - number < group.lines() ? int(call.lines - number) : group.lines();
    const int64_t start = number * call.len;
    const T* scores = static_cast<const T*>(call.scores) + start;
    const Tile<T> tile{reinterpret_cast<T*>(memory), here * len};
    tile.fetch(scores, start, (call.lines - number - here) * call.len, arrived[0]);
    const bool there = group.own() < here;
    const Place at = locate<true>(call, there ? number + group.own() : 0);
    const int begin = Tile<T>::before(scores) + group.own() * len;
    Held held(tile.elements + begin, begin, there ? len : 0, len, group.rank(), group.size());
    held.prepare(call, at);
    wait_for_tiles(arrived);
    const R own_max = held.load(call, at);
    const auto normalized = normalize<Held::ONCE, T>(call, at, held, own_max, group);
    if (call.log) {
        const R max = part_reference(normalized.line.max);
        // NaN where the line is, -inf where nothing takes part
        const R log_sum = normalized.empty ? normalized.factor : logarithm(normalized.line.sum);
        held.results([&](R x) { return (held.logit(x) - max) - log_sum; });
    } else {
        const R factor = normalized.factor * call.kept_scale;
        if constexpr (Held::ONCE) {
            held.results([&](R e) { return e * factor; });
        } else {
            const auto exponential = held.exponential(normalized.warp_max);
            held.results([&](R x) { return exponential(x) * factor; });
        }
    }
    if constexpr (Held::ONCE) {
        if (call.dtype != OWN<T>) {
            using Other = OtherDtype<T>;
            auto* to = static_cast<typename Other::Stored*>(call.result) + at.scores;
            held.each([&](int n, int j) { to[j] = Other::write(call.dtype, held.z[n]); });
            if (!call.threshold) return;
            __syncthreads();
            return drop(call, at.line, to, held.len, group.rank(), group.size());
        }
    }
    store_tile(held, tile, Tile<T>::before(scores), static_cast<T*>(call.result) + start, [&](T* results) {
        if (!call.threshold) return;
        __syncthreads();
        drop(call, at.line, results, held.len, group.rank(), group.size());
    });
}

// The gradients that belong to logits, …
template <typename T, int WORDS>
struct TileGradients {
    using R = Real<T>;
    static constexpr int PER_UNIT = Element<T>::PER_UNIT;
    R of_element[TilePlaces<T, WORDS>::COUNT];

    // Of the scores' dtype, in shared memory.
    template <typename Held>
    __device__ __forceinline__ void load(const Held& held, const T* line, int) {
        load_each(held, [&](int j) { return Element<T>::read(line[j]); });
    }
    // Of another dtype, in global memory
    template <typename Held>
    __device__ __forceinline__ void load_other(const Held& held, Dtype dtype, const void* gradient, int64_t offset) {
        using Other = OtherDtype<T>;
        const auto* line = static_cast<const typename Other::Stored*>(gradient) + offset;
        load_each(held, [&](int j) { return Other::read(dtype, line[j]); });
    }
    template <typename Held, typename F>
    __device__ __forceinline__ void load_each(const Held& held, F read) {
        held.each_held([&](int n) { of_element[n] = R(0); });
        held.each([&](int n, int j) { of_element[n] = read(j); });
    }
    __device__ __forceinline__ R of(int k, int i) const { return of_element[k * PER_UNIT + i]; }
};
// … and to scores of half precision, as they lie in memory.
template <typename T, int WORDS>
struct TileGradientUnits {
    Unit<T> units[WORDS + 1];

    // Lines begin so many elements apart in their units.
    template <typename Held>
    __device__ __forceinline__ void load(const Held& held, const T* line, int apart) {
        if (apart % 2 == 0) {
            const uint32_t at = shared_address(line);
            held.each_word([&](int k, int j) {
                const auto unit = read_shared_below<Unit<T>>(j, held.units, at + j * int(sizeof(T)));
                units[k] = j < held.units ? unit : Unit<T>{};
            });
        } else {
            held.each_word([&](int k, int j) {
                units[k] = Unit<T>{};
                if (j < held.units) units[k].x = line[j], units[k].y = line[j + 1];
            });
        }
        units[WORDS] = Unit<T>{};
        if (held.has_first) units[WORDS].x = line[0];
        if (held.has_last) units[WORDS].y = line[held.len - 1];
    }
    __device__ __forceinline__ float of(int k, int i) const { return Element<T>::of_unit(units[k], i); }
    __device__ __forceinline__ void clear(int k, int i) { bits_of(units[k]) &= i ? 0xffffu : 0xffff0000u; }
};

// The gradients of the scores and what is around them. `held` becomes the gradients of the scores.
template <typename T, int WORDS>
__device__ __forceinline__ void tile_gradients(const Fused<Real<T>>& call, const Place& at, bool there, TileLogits<T, WORDS>& held,
                                               TileGradients<T, WORDS>& g, const TileGroup<Real<T>>& group) {
    using R = Real<T>;
    const R own_max = held.load(call, at);
    // What takes no part does not count, even if it is not a number.
    held.each_held([&](int n) { g.of_element[n] = held.z[n] == negative_infinity<R>() ? R(0) : g.of_element[n]; });
    const auto line = weigh<T>(call, at, held, g, own_max, group);
    if (there && call.sinks_gradient && group.rank() == 0) call.sinks_gradient[at.line] = -line.sink * line.dot;
    const bool finite = !call.log && isfinite(line.dot);
    if (finite) held.each_held([&](int n) { held.z[n] = logit_gradient<true>(call, line, held.z[n], g.of_element[n]); });
    else held.each_held([&](int n) { held.z[n] = logit_gradient<false>(call, line, held.z[n], g.of_element[n]); });
    if (call.logits_gradient) {
        R* to = call.logits_gradient + at.scores;
        held.each([&](int n, int j) { to[j] = held.z[n]; });
    }
    if (call.cap > R(0)) {
        // What takes no part has none, whatever its score is.
        held.each_few_scores([&](int few, const auto& scores) {
            const auto of = slopes(call, scores);
#pragma unroll
            for (int i = 0; i < int(sizeof(of.of) / sizeof(R)) && few + i < held.COUNT; i++) {
                R& own = held.z[few + i];
                own = own != R(0) ? own * of.of[i] : own;
            }
        });
    } else {
        held.results([&](R z) { return z * call.scale; });
    }
}
template <typename T, int WORDS>
__device__ __forceinline__ void tile_gradients(const Fused<Real<T>>& call, const Place& at, bool there, TileScores<T, WORDS>& held,
                                               TileGradientUnits<T, WORDS>& g, const TileGroup<Real<T>>& group) {
    using R = Real<T>;
    const R own_max = held.load(call, at);
    WeighedLine<R> line;
    bool finite;
    // The g of what takes no part does not count, which matters only where it is no number: then once more.
#pragma unroll 1
    for (int time = 0; time < 2; time++) {
        line = weigh<T>(call, at, held, g, own_max, group);
        finite = group.all(isfinite(line.dot));
        if (finite || time > 0) break;
        held.each_held_unit([&](int k) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (held.score(k, i) == negative_infinity<R>()) g.clear(k, i);
            }
        });
        if (group.is_block()) __syncthreads();  // All have read the parts.
    }
    if (there && call.sinks_gradient && group.rank() == 0) call.sinks_gradient[at.line] = -line.sink * line.dot;
    const auto exponential = held.exponential(line.warp_max);
    line.factor *= call.scale;
    held.each_held_unit([&](int k) {
        forget(held.held[k]);  // as above
        R results[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const R e = exponential(held.score(k, i));
            results[i] = finite ? logit_gradient<true>(call, line, e, g.of(k, i)) : logit_gradient<false>(call, line, e, g.of(k, i));
        }
        held.held[k] = Element<T>::to_unit(results);
    });
}

// The same in tiles: moves what fused_backward_lines moves. Shared memory: two tiles with their margins, of scores and of the
// result's gradient.
template <typename T, typename Held, typename Gradients>
__device__ __forceinline__ void fused_backward_tile(const Fused<Real<T>>& call, const TileGroup<Real<T>>& group) {
    using R = Real<T>;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ ArrivalBarrier arrived[2];
    prepare(arrived);
    const int64_t number = blockIdx.x * int64_t(group.lines());
    const int len = static_cast<int>(call.len), here = call.lines - number < group.lines() ? int(call.lines - number) : group.lines();
    const int64_t start = number * call.len, behind = (call.lines - number - here) * call.len;
    const T* scores = static_cast<const T*>(call.scores) + start;
    const T* gradient = static_cast<const T*>(call.gradient) + start;
    const bool own_dtype = call.dtype == OWN<T>;
    const int room = tile_room<T>(group.lines() * len);
    const Tile<T> tile{reinterpret_cast<T*>(memory), here * len};
    const Tile<T> of_gradient{reinterpret_cast<T*>(memory + room), own_dtype ? here * len : 0};
    tile.fetch(scores, start, behind, arrived[0]);
    of_gradient.fetch(own_dtype ? gradient : scores, own_dtype ? start : 0, own_dtype ? behind : 0, arrived[1]);
    const bool there = group.own() < here;
    const Place at = locate<true>(call, there ? number + group.own() : 0);
    const int offset = group.own() * len, begin = Tile<T>::before(scores) + offset;
    Held held(tile.elements + begin, begin, there ? len : 0, len, group.rank(), group.size());
    held.prepare(call, at);
    wait_for_tiles(arrived);
    Gradients g;
    if (Held::ONCE && !own_dtype) {
        if constexpr (Held::ONCE) g.load_other(held, call.dtype, call.gradient, at.scores);
    } else {
        T* gradients = of_gradient.elements + Tile<T>::before(gradient) + offset;
        if (call.threshold) {
            drop(call, at.line, gradients, held.len, group.rank(), group.size());
            __syncthreads();
        }
        g.load(held, gradients, Tile<T>::before(gradient) - Tile<T>::before(scores));
    }
    tile_gradients(call, at, there, held, g, group);
    if (call.result) store_tile(held, tile, Tile<T>::before(scores), static_cast<T*>(call.result) + start, [](T*) {});
}

// Units of a thread, as src/cuda/plan.rs has them: of f32 24 (115977 x 577 with a scale 1.06 copies, sixteen 1.8), of half precision
// sixteen as numbers. In 64 registers (f32 1.03 to 1.2 copies, in 76 1.15 to 1.5; f16 with a bias 1.53, in 80 1.61).
template <typename T>
constexpr int LOGITS_IN_TILE = sizeof(T) == 8 ? 8 : sizeof(T) == 4 ? 24 : 16;
template <typename T>
constexpr int SCORES_IN_TILE = 32;
// Of gradients
template <typename T>
constexpr int LOGITS_IN_TILES = sizeof(T) == 4 ? 12 : 8;
template <typename T>
constexpr int SCORES_IN_TILES = 16;

#define FUSED_TILE(name, dtype, T, Held, WORDS)                                                  \
    extern "C" __global__ void __launch_bounds__(512, sizeof(T) == 8 ? 1 : 2)                    \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) {                 \
        __shared__ Normalizer<Real<T>> parts[MAX_WARPS];                                         \
        fused_tile<T, Held<T, WORDS<T>>>(call, TileGroup<Real<T>>{shift, parts, nullptr});       \
    }
#define FUSED_BACKWARD_TILE(name, dtype, T, Held, Gradients, WORDS)                              \
    extern "C" __global__ void __launch_bounds__(512, sizeof(T) == 8 ? 1 : 2)                    \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) {                 \
        __shared__ Weighted<Real<T>> parts[MAX_WARPS];                                           \
        const TileGroup<Real<T>> group{shift, nullptr, parts};                                   \
        fused_backward_tile<T, Held<T, WORDS<T>>, Gradients<T, WORDS<T>>>(call, group);          \
    }
