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

// An element in global memory whose address was reckoned here
template <typename P>
__device__ __forceinline__ P read_global(uint64_t from) {
    return *reinterpret_cast<const P*>(__cvta_global_to_generic(from));
}
template <typename U>
__device__ __forceinline__ U read_shared(uint32_t from) {
    std::conditional_t<sizeof(U) == 8, uint64_t, uint32_t> bits;
    if constexpr (sizeof(U) == 8) asm volatile("ld.shared.u64 %0, [%1];" : "=l"(bits) : "r"(from) : "memory");
    else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
    return reinterpret_cast<const U&>(bits);
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
// Neighbouring bytes in shared memory, two of them, and one if j < end, or 0
__device__ __forceinline__ uint2 read_bytes(uint32_t from) {
    uint2 bytes;
    asm volatile("ld.shared.u8 %0, [%2];\nld.shared.u8 %1, [%2+1];" : "=r"(bytes.x), "=r"(bytes.y) : "r"(from) : "memory");
    return bytes;
}
__device__ __forceinline__ uint32_t read_byte_below(int j, int end, uint32_t from) {
    uint32_t byte = 0;
    READ_BELOW("ld.shared", "u8", "+r", byte, "r", from, j, end);
    return byte;
}
template <typename P>
__device__ __forceinline__ auto read_below(int j, int end, uint64_t from) {
    if constexpr (sizeof(P) == 1) {
        uint32_t bits;
        READ_BELOW("ld.global", "u8", "=r", bits, "l", from, j, end);
        return bits;
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

// The mask of a line of half precision, in shared memory, as it lies in its 16 bytes of global memory: from there one byte after the other would be waited
// for, and takes more instructions than the scores.
struct MaskRow {
    static constexpr int PACK = 16, SINGLE = 4;  // bytes; those by themselves that a thread asks for at once
    uint32_t bytes;                              // the address of the first element's; 0 where there is no mask

    // What a line of so many elements takes.
    static __device__ __forceinline__ int room(int len) { return (len + 2 * PACK - 2) / PACK * PACK; }

    // Copies it to this room, by so many threads, for which it is there when each has called copied_packs() and they have met.
    __device__ __forceinline__ void fetch(unsigned char* room, const uint8_t* mask, int64_t step, int len, int rank, int threads) const {
        const int before = static_cast<int>(reinterpret_cast<uintptr_t>(mask) % PACK), lead = (PACK - before) % PACK;
        const int packs = step == 1 ? max(len - lead, 0) / PACK : 0;
        unsigned char* to = room + before;
#pragma unroll 1
        for (int p = rank; p < packs; p += threads) copy_pack(to + lead + p * PACK, mask + lead + p * PACK);
        // Those in no whole pack, before and behind these
        const int first = packs > 0 ? lead : len, end = first + packs * PACK, single = first + len - end;
        const auto place = [&](int i) { return i < first ? i : i - first + end; };
#pragma unroll 1
        for (int i = rank; i < single; i += SINGLE * threads) {
            uint8_t found[SINGLE];
#pragma unroll
            for (int k = 0; k < SINGLE; k++) {
                if (i + k * threads < single) found[k] = mask[place(i + k * threads) * step];
            }
#pragma unroll
            for (int k = 0; k < SINGLE; k++) {
                if (i + k * threads < single) to[place(i + k * threads)] = found[k];
            }
        }
    }
    // The bits that are kept of a unit, given the bytes of both elements.
    static __device__ __forceinline__ uint32_t kept(uint32_t low, uint32_t high) {
        // What is not 0 reaches the highest bit of its half, which all bits of it become.
        uint32_t bits = high * 0x10000u + (low + 0x7fff7fffu);
        asm("prmt.b32 %0, %0, 0, 0xbb99;" : "+r"(bits));
        return bits;
    }
};

// The elements of a line that a block takes.
struct LinePart {
    int first, len;

    // Where they are, given where the line is.
    template <typename R>
    __device__ __forceinline__ Place of(const Fused<R>& call, Place line) const {
        line.scores += first;
        line.bias += first * call.bias_step;
        line.mask += first * call.mask_step;
        line.first = min(max(line.first - first, int64_t(0)), int64_t(len));
        line.end = min(max(line.end - first, int64_t(0)), int64_t(len));
        return line;
    }
};

// What is in the window of a line, or of a part of one, which is a line of that length.
template <typename R>
__device__ __forceinline__ Place in_window(const Fused<R>& call, Place line) {
    line.scores += line.first;
    line.bias += line.first * call.bias_step;
    line.mask += line.first * call.mask_step;
    return line;
}
__device__ __forceinline__ int window_len(const Place& at) { return static_cast<int>(at.end - at.first); }

// Calls f with the place of each element of a part of a line outside of its window.
template <typename Group, typename F>
__device__ __forceinline__ void each_outside(const Place& at, LinePart part, const Group& group, F f) {
    const int inside = window_len(at);
#pragma unroll 1
    for (int j = group.rank(); j < part.len - inside; j += group.size()) f(j < at.first ? j : j + inside);
}

// Makes each of these neighbours in shared memory that number.
template <typename T, typename Group>
__device__ __forceinline__ void fill(T* run, int count, T number, const Group& group) {
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
    Unit<T> unit;
    if constexpr (PER_UNIT > 1) unit.x = unit.y = number;
    else unit = number;
    const int before = PER_UNIT > 1 ? shared_address(run) / sizeof(T) % 2 : 0, step = group.size() * PER_UNIT;
#pragma unroll 1
    for (int j = before + group.rank() * PER_UNIT; j + PER_UNIT <= count; j += step) write_shared(shared_address(run + j), unit);
    // Those that share a unit with others
    if (PER_UNIT > 1 && count > 0 && group.rank() == 0) run[0] = run[count - 1] = number;
}
// The same of what is outside of its window of a part of a line, of which this is what is inside.
template <typename T, typename Group>
__device__ __forceinline__ void fill_outside(T* inside, const Place& at, LinePart part, T number, const Group& group) {
    fill(inside - at.first, static_cast<int>(at.first), number, group);
    fill(inside + window_len(at), part.len - static_cast<int>(at.end), number, group);
}

// The threads that share a line: 2^shift of a warp, or, where shift is WHOLE_BLOCK, a block.
constexpr int WHOLE_BLOCK = 6;
template <typename R>
struct TileGroup {
    int shift;
    Normalizer<R>* parts;   // MAX_WARPS, in shared memory, …
    Weighted<R>* weighted;  // … or as many of these
    static constexpr bool CLUSTER = false;

    __device__ __forceinline__ bool is_block() const { return shift == WHOLE_BLOCK; }
    __device__ __forceinline__ int size() const { return is_block() ? blockDim.x : 1 << shift; }
    __device__ __forceinline__ int rank() const { return is_block() ? threadIdx.x : threadIdx.x & ((1 << shift) - 1); }
    // How many lines a block takes, and which of them is this thread's
    __device__ __forceinline__ int lines() const { return is_block() ? 1 : blockDim.x >> shift; }
    __device__ __forceinline__ int own() const { return is_block() ? 0 : threadIdx.x >> shift; }
    __device__ __forceinline__ int64_t first_line() const { return blockIdx.x * int64_t(lines()); }
    // How many elements of a line a block takes at most, and which
    static __device__ __forceinline__ int most(int len) { return len; }
    static __device__ __forceinline__ LinePart part(int len) { return {0, len}; }
    // How often `few` for each thread are in less than so many.
    __device__ __forceinline__ int fews_below(int count, int few) const {
        const auto less = static_cast<uint32_t>(max(count, 1) - 1) / few;
        return is_block() ? less / blockDim.x : less >> shift;
    }

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
    // Whether this thread is the first of its line's.
    __device__ __forceinline__ bool is_first() const { return rank() == 0; }
};

// What was read for the elements of a unit: for each by itself or, IN_PAIRS, for two of half precision as one word. A mask's bytes come as words of 4 bytes, which
// are not looked at while they are on their way.
template <typename P, int PER_UNIT, bool IN_PAIRS>
struct UnitRead {
    using Stored = std::conditional_t<IN_PAIRS, uint32_t, P>;
    using Word = std::conditional_t<sizeof(P) == 1, uint32_t, Stored>;
    Word words[IN_PAIRS ? 1 : PER_UNIT];
};

// Which elements of a line in a tile are one thread's: up to WORDS units of 4 bytes (f64: elements), as far from each other as there are
// threads that share the line, so that these read neighbours of what is added or masked. They come FEW at a time: first those
// behind the others, of which alone it is to be asked whether the line has them, and then whole fews from the line's beginning on. Of
// half precision a line may begin and end in the middle of a unit that it shares with its neighbours: these elements are its
// first and its last thread's.
template <typename T, int WORDS, int FEW>
struct TilePlaces {
    static constexpr int PER_UNIT = Element<T>::PER_UNIT, ENDS = PER_UNIT > 1 ? 2 : 0, COUNT = WORDS * PER_UNIT + ENDS;
    static_assert(WORDS % FEW == 0, "whole fews");

    T* elements;               // of the line
    uint32_t at;               // this thread's first unit in shared memory
    int len, first, step;      // its first element in a unit, and how far its next unit is
    int units;                 // where the line's units end
    int filled;                // its units in whole fews
    bool has_first, has_last;

    // The line begins `begin` elements from a multiple of 4 bytes on.
    template <typename Group>
    __device__ __forceinline__ TilePlaces(T* line, int begin, int len, const Group& group) : elements(line), len(len) {
        const int before = PER_UNIT > 1 ? begin & 1 : 0, rank = group.rank(), threads = group.size();
        first = before + rank * PER_UNIT;
        step = threads * PER_UNIT;
        units = len - (PER_UNIT - 1);
        filled = FEW * group.fews_below(len / PER_UNIT, FEW);
        has_first = before > 0 && len > 0 && rank == 0;
        has_last = PER_UNIT > 1 && (len - before) % 2 == 1 && len > before && rank == threads - 1;
        at = shared_address(line + first);
        // Computed once: it is cheap to compute again, but not for every access.
        asm("" : "+r"(at), "+r"(first), "+r"(filled));
    }

    // Calls f(whole, k, j) with each place k in `held` of the first of a few units, and the place j of that one in the line; `whole`, a
    // constant, says that the line has all of them.
    template <typename F>
    __device__ __forceinline__ void each_few_units(F f) const {
        f(Constant<false>{}, 0, first + filled * step);
        int j = first;
#pragma unroll
        for (int k = FEW; k < WORDS; k += FEW, j += FEW * step) {
            if (k > filled) break;
            f(Constant<true>{}, k, j);
        }
    }
    // Calls f(k, j, is) with each unit's place in `held` and in the line, and whether it is there.
    template <typename F>
    __device__ __forceinline__ void each_place(F f) const {
        each_few_units([&](auto whole, int from, int j) {
#pragma unroll
            for (int k = from; k < from + FEW; k++, j += step) f(k, j, whole || j < units);
        });
    }
    // Calls f with each place in `held` where there may be a unit or, the last one, the ends.
    template <typename F>
    __device__ __forceinline__ void each_pack(F f) const {
        each_few_units([&](auto, int from, int) {
#pragma unroll
            for (int k = from; k < from + FEW; k++) f(k);
        });
        if (PER_UNIT > 1) f(WORDS);
    }
    // Calls f(k, read) with the place k in `held` of each unit or, the last one, of the ends, and what was read for it at so many bytes times its
    // place in the line: several are asked for before one is waited for. Answers whether that was IN_PAIRS, which all threads of a warp are to
    // be able to: 256 x 16 x 77 x 77 bf16 with a bias for each head 42 us, by two bytes at a time 50.
    template <bool IN_PAIRS, typename P, typename F>
    __device__ __forceinline__ bool each_read(const P* from, int64_t distance, F f) const {
        if constexpr (IN_PAIRS) {
            const bool lies_so = distance == sizeof(P) && reinterpret_cast<uintptr_t>(from + first) % (2 * sizeof(P)) == 0;
            if (__all_sync(~0u, lies_so)) {
                each_read_as<UnitRead<P, PER_UNIT, true>>(from, sizeof(P), f);
                return true;
            }
        }
        each_read_as<UnitRead<P, PER_UNIT, false>>(from, distance, f);
        return false;
    }
    // Calls f with each place in z where there may be an element.
    template <typename F>
    __device__ __forceinline__ void each_held(F f) const {
        each_pack([&](int k) {
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) f(k * PER_UNIT + i);
        });
    }
    // Calls f with the place in z and the place in the line of each element.
    template <typename F>
    __device__ __forceinline__ void each(F f) const {
        each_place([&](int k, int j, bool is) {
            if (!is) return;
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

    template <typename Read, typename P, typename F>
    __device__ __forceinline__ void each_read_as(const P* from, int64_t distance_between, F f) const {
        using Word = typename Read::Word;
        constexpr int PER_READ = sizeof(Read) / sizeof(Word);
        const auto distance = static_cast<uint32_t>(distance_between);
        const auto at = [&, begin = global_address(from)](int j) { return address_at(begin, j, distance); };
        const uint64_t step_distance = uint64_t(step) * distance;
        uint64_t next = at(first);  // of the whole fews
        each_few_units([&](auto whole, int few, int j) {
            Read found[FEW];
            uint64_t unit_at = whole ? next : at(j);
#pragma unroll
            for (int k = 0; k < FEW; k++, j += step, unit_at += step_distance) {
                uint64_t word_at = unit_at;
#pragma unroll
                for (int i = 0; i < PER_READ; i++, word_at += distance) {
                    Word& own = found[k].words[i];
                    if constexpr (whole) own = read_global<typename Read::Stored>(word_at);
                    else own = read_below<typename Read::Stored>(j, units, word_at);
                }
            }
            if (whole) next = unit_at;
#pragma unroll
            for (int k = 0; k < FEW; k++) f(few + k, found[k]);
        });
        if constexpr (PER_UNIT > 1) {
            f(WORDS, UnitRead<P, PER_UNIT, false>{read_below<P>(0, has_first, at(0)), read_below<P>(0, has_last, at(len - 1))});
        }
    }

    // Where the few units are whose first one has the place j in the line, if the thread's first one is at `at`.
    __device__ __forceinline__ uint32_t few_at(uint32_t at, int j) const { return at + (j - first) * int(sizeof(T)); }
    // Calls f(k, is, unit) with each unit in shared memory, or anything where the line has none.
    template <typename F>
    __device__ __forceinline__ void each_unit(uint32_t at, F f) const {
        each_few_units([&](auto whole, int from, int j) {
            uint32_t unit_at = few_at(at, j);
#pragma unroll
            for (int k = from; k < from + FEW; k++, j += step, unit_at += step * int(sizeof(T))) {
                if constexpr (whole) f(k, true, read_shared<Unit<T>>(unit_at));
                else f(k, j < units, read_shared_below<Unit<T>>(j, units, unit_at));
            }
        });
    }
    template <typename F>
    __device__ __forceinline__ void each_unit(F f) const { each_unit(at, f); }

    // Calls f(n, few) with the place n in z of the first of a few elements, and these from shared memory, or anything where the line
    // has none; the ends are the last.
    template <typename F>
    __device__ __forceinline__ void each_few_scores(F f) const {
        Few<Real<T>, FEW * PER_UNIT> found;
        each_unit([&](int k, bool, Unit<T> unit) {
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) found.of[k % FEW * PER_UNIT + i] = Element<T>::of_unit(unit, i);
            if (k % FEW == FEW - 1) f((k - k % FEW) * PER_UNIT, found);
        });
        if constexpr (PER_UNIT > 1) {
            found = {};
            if (has_first) found.of[0] = Element<T>::read(elements[0]);
            if (has_last) found.of[1] = Element<T>::read(elements[len - 1]);
            f(WORDS * PER_UNIT, found);
        }
    }
    // Calls f(k, low, high) with what a mask in shared memory says of each unit's elements and, the last ones, of the ends; 0 where the line has none.
    template <typename F>
    __device__ __forceinline__ void each_kept(const MaskRow& row, F f) const {
        each_few_units([&](auto whole, int from, int j) {
            uint32_t byte_at = row.bytes + j;
#pragma unroll
            for (int k = from; k < from + FEW; k++, j += step, byte_at += step) {
                if constexpr (whole) {
                    const uint2 bytes = read_bytes(byte_at);
                    f(k, bytes.x, bytes.y);
                } else {
                    f(k, read_byte_below(j, units, byte_at), read_byte_below(j, units, byte_at + 1));
                }
            }
        });
        const uint2 bytes = ends_kept(row);
        f(WORDS, bytes.x, bytes.y);
    }
    __device__ __forceinline__ uint2 ends_kept(const MaskRow& row) const {
        return {read_byte_below(0, has_first, row.bytes), read_byte_below(0, has_last, row.bytes + len - 1)};
    }
    // … and f(k, is, unit, low, high) with each unit before them as each_unit has it, but for the ends.
    template <typename F>
    __device__ __forceinline__ void each_unit_and_kept(const MaskRow& row, F f) const {
        each_few_units([&](auto whole, int from, int j) {
            uint32_t unit_at = few_at(at, j), byte_at = row.bytes + j;
#pragma unroll
            for (int k = from; k < from + FEW; k++, j += step, unit_at += step * int(sizeof(T)), byte_at += step) {
                if constexpr (whole) {
                    const auto unit = read_shared<Unit<T>>(unit_at);
                    const uint2 bytes = read_bytes(byte_at);
                    f(k, true, unit, bytes.x, bytes.y);
                } else {
                    f(k, j < units, read_shared_below<Unit<T>>(j, units, unit_at), read_byte_below(j, units, byte_at), read_byte_below(j, units, byte_at + 1));
                }
            }
        });
    }
    // Whether there is the element with this place in z, of a few units that may be there.
    __device__ __forceinline__ bool is_of_line(int n) const {
        if (n >= WORDS * PER_UNIT) return n % 2 ? has_last : has_first;
        return n >= FEW * PER_UNIT || first + (filled + n / PER_UNIT) * step < units;
    }

    // Writes unit(k) and element(n) to where the line is, so many units further.
    template <typename UnitOf, typename ElementOf>
    __device__ __forceinline__ void store(int shifted, UnitOf unit, ElementOf element) const {
        each_few_units([&](auto whole, int from, int j) {
            uint32_t to = few_at(at, j) + shifted * int(sizeof(Unit<T>));
#pragma unroll
            for (int k = from; k < from + FEW; k++, j += step, to += step * int(sizeof(T))) {
                const Unit<T> own = unit(k);
                if (whole || j < units) write_shared(to, own);
            }
        });
        each_end([&](int n, int j) { elements[j + shifted * PER_UNIT] = element(n); });
    }

    // Asks for the line's mask, as far as it lies in one piece, before it is needed: it comes by single bytes.
    template <typename R>
    __device__ __forceinline__ void touch_mask(const Fused<R>& call, const Place& place) const {
        if (call.masks != EACH || call.mask_step != 1) return;
        const auto* mask = static_cast<const uint8_t*>(call.mask) + place.mask;
        for (int j = first * 64; j < len; j += step * 64) read_below<uint8_t>(j, len, global_address(mask + j));
    }
};

template <typename T, int WORDS> struct TileGradients;
template <typename T, int WORDS> struct TileGradientUnits;

// The logits of these elements. CAPPED: there is a softcap. MASKS_FIRST: a mask comes into z before the scores do, unless what is added has to, for
// more text.
template <typename T, int WORDS, int FEW, bool CAPPED, bool MASKS_FIRST = false>
struct TileLogits : TilePlaces<T, WORDS, FEW> {
    using R = Real<T>;
    using Places = TilePlaces<T, WORDS, FEW>;
    using Places::COUNT, Places::PER_UNIT, Places::Places, Places::each, Places::each_few_scores, Places::each_held,
        Places::each_kept, Places::each_pack, Places::each_read, Places::each_unit, Places::elements, Places::has_first,
        Places::has_last, Places::is_of_line, Places::len, Places::touch_mask;
    using Gradients = std::conditional_t<PER_UNIT == 1, TileGradients<T, WORDS>, TileGradientUnits<T, WORDS>>;
    static constexpr bool ONCE = true;
    static constexpr int SIZE = PER_UNIT;  // of a pack, which a unit is, and so are the ends

    bool log;
    bool in_pairs;  // what is added to each
    R added;        // to all
    R z[COUNT];

    static __device__ __forceinline__ Exponential<T> exponential(R max) { return Exponential<T>(max); }
    static __device__ __forceinline__ R logit(R z) { return z; }
    static __device__ __forceinline__ R absent() { return negative_infinity<R>(); }

    // While the scores come: what is added to them or, where that is the same for all, the mask, but of half precision.
    __device__ __forceinline__ void prepare(const Fused<R>& call, const Place& place) {
        log = call.log;
        const auto* bias = static_cast<const T*>(call.bias) + place.bias;
        const auto* mask = static_cast<const uint8_t*>(call.mask) + place.mask;
        added = call.adds == ONE ? Element<T>::read(*bias) : R(0);
        in_pairs = false;
        if (call.adds == EACH) in_pairs = each_read<(PER_UNIT > 1)>(bias, call.bias_step * sizeof(T), [&](int k, const auto& read) { hold(k, read.words); });
        if constexpr (MASKS_FIRST) {
            if (comes_first(call)) {
                each_read<false>(mask, call.mask_step, [&](int k, const auto& read) { hold(k, read.words); });
                return;
            }
        }
        if constexpr (PER_UNIT == 1) touch_mask(call, place);
    }
    static __device__ __forceinline__ bool comes_first(const Fused<R>& call) { return MASKS_FIRST && call.masks == EACH && call.adds != EACH; }
    // What was read for a unit, as bits that are not looked at while they are on their way: in pairs the first place in z has both.
    template <typename Word, int WORDS_READ>
    __device__ __forceinline__ void hold(int k, const Word (&words)[WORDS_READ]) {
#pragma unroll
        for (int i = 0; i < WORDS_READ; i++) {
            R& own = z[k * PER_UNIT + i];
            if constexpr (sizeof(Word) == 2) own = __uint_as_float(reinterpret_cast<const uint16_t&>(words[i]));
            else own = reinterpret_cast<const R&>(words[i]);
        }
    }
    // The same as numbers or, of a mask, which is f32's, as it is
    __device__ __forceinline__ Few<R, PER_UNIT> beside(int k) const {
        if constexpr (PER_UNIT == 1) {
            return {z[k]};
        } else {
            const uint32_t first = __float_as_uint(z[k * 2]), second = __float_as_uint(z[k * 2 + 1]);
            const uint32_t both = __byte_perm(first, second, k < COUNT / 2 - 1 && in_pairs ? 0x3210 : 0x5410);
            const auto unit = reinterpret_cast<const Unit<T>&>(both);
            return {Element<T>::of_unit(unit, 0), Element<T>::of_unit(unit, 1)};
        }
    }
    static __device__ __forceinline__ bool keeps(R keep) { return __float_as_uint(keep) != 0; }

    // Answers the greatest.
    __device__ __forceinline__ R load(const Fused<R>& call, const Place& place, const MaskRow& row) {
        const R scale = call.scale;
        R max;
        if constexpr (CAPPED) max = load_capped(call);
        else if (call.adds == EACH) max = load_with([&](int k) { return beside(k); }, [&](R score, R own) { return fma(score, scale, own); });
        else if (comes_first(call)) max = load_with([&](int k) { return beside(k); }, [&](R score, R keep) { return keeps(keep) ? fma(score, scale, added) : absent(); });
        else max = load_with([](int) { return Few<R, PER_UNIT>{}; }, [&](R score, R) { return fma(score, scale, added); });
        const auto* mask = static_cast<const uint8_t*>(call.mask) + place.mask;
        const bool late = call.masks == EACH && !comes_first(call);
        if (late) {
            if constexpr (PER_UNIT > 1) {
                each_kept(row, [&](int k, uint32_t low, uint32_t high) {
                    z[k * 2] = low ? z[k * 2] : absent();
                    z[k * 2 + 1] = high ? z[k * 2 + 1] : absent();
                });
            } else {
                each_read<false>(mask, call.mask_step, [&](int k, const auto& read) { z[k] = read.words[0] ? z[k] : absent(); });
            }
        }
        const bool nothing = call.masks == ONE && !*mask;
        if (nothing) each_held([&](int n) { z[n] = absent(); });
        if (nothing || late) {
            max = absent();
            each_held([&](int n) { max = greater(max, z[n]); });
        }
        return max;
    }
    // `logit` of each score and what was read for it, which `others` gives for a unit
    template <typename Others, typename Logit>
    __device__ __forceinline__ R load_with(Others others_of, Logit logit) {
        R max = absent();
        each_unit([&](int k, bool is, Unit<T> unit) {
            const auto others = others_of(k);
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) {
                const R found = logit(Element<T>::of_unit(unit, i), others.of[i]);
                max = greater(max, z[k * PER_UNIT + i] = is ? found : absent());
            }
        });
        if constexpr (PER_UNIT > 1) {
            const auto others = others_of(COUNT / 2 - 1);
            const R first = has_first ? logit(Element<T>::read(elements[0]), others.of[0]) : absent();
            const R last = has_last ? logit(Element<T>::read(elements[len - 1]), others.of[1]) : absent();
            max = greater(max, greater(z[COUNT - 2] = first, z[COUNT - 1] = last));
        }
        return max;
    }
    __device__ __forceinline__ R load_capped(const Fused<R>& call) {
        R max = absent();
        each_few_scores([&](int few, const auto& found) {
#pragma unroll
            for (int from = 0; from < FEW * PER_UNIT && few + from < COUNT; from += PER_UNIT) {
                const auto others = beside((few + from) / PER_UNIT);
#pragma unroll
                for (int i = from; i < from + PER_UNIT; i++) {
                    R& own = z[few + i];
                    const R logit = fma(tangent<HAS_STEEPNESS<T>>(call, found.of[i]), call.cap, call.adds == EACH ? others.of[i - from] : added);
                    const bool takes_part = is_of_line(few + i) && !(comes_first(call) && !keeps(others.of[i - from]));
                    max = greater(max, own = takes_part ? logit : absent());
                }
            }
        });
        return max;
    }

    // Answers the sum of the exponentials, which are kept in place of the logits unless logarithms are asked for.
    template <bool>
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential) {
        R sums[4] = {};
        if (log) each_held([&](int n) { sums[n % 4] += exponential(z[n]); });
        else each_held([&](int n) { sums[n % 4] += z[n] = exponential(z[n]); });
        return pairwise_sum(sums);
    }

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
template <typename T, int WORDS, int FEW>
struct TileScores : TilePlaces<T, WORDS, FEW> {
    using R = Real<T>;
    using Places = TilePlaces<T, WORDS, FEW>;
    using Places::Places, Places::each_pack, Places::each_unit, Places::each_unit_and_kept, Places::elements, Places::ends_kept,
        Places::has_first, Places::has_last, Places::len;
    using Gradients = TileGradientUnits<T, WORDS>;
    static constexpr bool ONCE = false;
    static constexpr int SIZE = 2;

    R scale;
    Unit<T> held[WORDS + 1];  // and the ends

    __device__ __forceinline__ Exponential<T> exponential(R max) const { return Exponential<T>(max, scale); }
    __device__ __forceinline__ R logit(R score) const { return product(score, scale); }

    // While the scores come
    __device__ __forceinline__ void prepare(const Fused<R>& call, const Place&) { scale = call.scale; }

    // Answers the greatest.
    __device__ __forceinline__ R load(const Fused<R>& call, const Place& place, const MaskRow& row) {
        const auto absent = no_elements<T>();
        auto max = absent, ends = absent;
        if (has_first) ends.x = elements[0];
        if (has_last) ends.y = elements[len - 1];
        if (call.masks == EACH) {
            each_unit_and_kept(row, [&](int k, bool is, Unit<T> unit, uint32_t low, uint32_t high) {
                max = greater(max, held[k] = is ? only(unit, MaskRow::kept(low, high)) : absent);
            });
            const uint2 bytes = ends_kept(row);
            ends = only(ends, MaskRow::kept(bytes.x, bytes.y));
        } else {
            each_unit([&](int k, bool is, Unit<T> unit) { max = greater(max, held[k] = is ? unit : absent); });
        }
        max = greater(max, held[WORDS] = ends);
        const bool nothing = call.masks == ONE && !*(static_cast<const uint8_t*>(call.mask) + place.mask);
        if (nothing) {
            max = absent;
            each_pack([&](int k) { held[k] = absent; });
        }
        return max_of_unit<T>(max);
    }

    __device__ __forceinline__ R score(int k, int i) const { return Element<T>::of_unit(held[k], i); }
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential, int k, int i) const { return exponential(score(k, i)); }

    // The elements of a unit with these bits, and -inf for the others.
    static __device__ __forceinline__ Unit<T> only(Unit<T> unit, uint32_t kept) {
        const auto absent = no_elements<T>();
        bits_of(unit) = (bits_of(unit) & kept) | (bits_of(absent) & ~kept);
        return unit;
    }

    // Answers the sum of the exponentials.
    template <bool KEEP>
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential) const {
        R sums[4] = {};
        each_pack([&](int k) {
#pragma unroll
            for (int i = 0; i < 2; i++) sums[(k * 2 + i) % 4] += exponential(Element<T>::of_unit(held[k], i));
        });
        return pairwise_sum(sums);
    }

    template <typename F>
    __device__ __forceinline__ void results(F f) {
        each_pack([&](int k) {
            forget(held[k]);  // what is to be computed again must not be kept from the first time
            const R numbers[2] = {f(Element<T>::of_unit(held[k], 0)), f(Element<T>::of_unit(held[k], 1))};
            held[k] = Element<T>::to_unit(numbers);
        });
    }
    __device__ __forceinline__ void store(int shifted) const {
        Places::store(shifted, [&](int k) { return held[k]; }, [&](int n) { return n % 2 ? held[n / 2].y : held[n / 2].x; });
    }
};

// What is dropped of the results of part of a line becomes 0. Eight neighbours share random bits.
template <typename O, typename R, typename Group>
__device__ __forceinline__ void drop(const Fused<R>& call, int64_t line, O* results, LinePart part, const Group& group) {
    const O zero = {};
    const int step = group.size() * 8;
#pragma unroll 1
    for (int j = group.rank() * 8; j < part.len; j += step) {
        each_dropped<8>(call, line, part.first + j, [&](int i) {
            if (j + i < part.len) results[j + i] = zero;
        });
    }
}

// Writes what is held of lines that lay in a tile from element `from` on to where they are to be. `change` is given this line, from its window on, in
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

// Fetches the mask of half precision of this thread's line, the first of `here` lines of a tile having this number, or the one that all of these share; `behind` is
// what follows the tiles. All threads call this, each with the place of its line, of which a block has this part.
template <typename T, typename Group>
__device__ __forceinline__ MaskRow fetch_mask(const Fused<Real<T>>& call, const Group& group, int64_t number, int here, LinePart part, const Place& line_at,
                                              unsigned char* behind) {
    if (sizeof(T) > 2 || call.masks != EACH) return {0};
    const auto first = static_cast<uint32_t>(number);
    const bool alike = call.alike.size > 0 && call.alike.quotient(first) == call.alike.quotient(first + here - 1);
    // Of a line by itself what is in its window
    const Place at = alike ? line_at : in_window(call, line_at);
    const auto* mask = static_cast<const uint8_t*>(call.mask) + at.mask;
    unsigned char* room = alike ? behind : behind + group.own() * MaskRow::room(part.len);
    MaskRow row{static_cast<uint32_t>(shared_address(room) + reinterpret_cast<uintptr_t>(mask) % MaskRow::PACK)};
    if (group.own() < here) {  // By those that have a line
        row.fetch(room, mask, call.mask_step, alike ? part.len : window_len(line_at), alike ? int(threadIdx.x) : group.rank(),
                  alike ? here * group.size() : group.size());
    }
    if (alike) row.bytes += static_cast<uint32_t>(line_at.first);
    return row;
}

// A piece of a tile that some threads of a block fetch, of which this one has that rank.
struct Piece {
    int first, end;  // elements of the tile
    int rank, threads;

    // Fetches it from a tensor like the scores, which begins `start` elements before the tile.
    template <typename T, typename R>
    __device__ __forceinline__ void fetch(const Fused<R>& call, const Tile<T>& tile, const void* tensor, int64_t start, ArrivalBarrier& arrived) const {
        const T* run = static_cast<const T*>(tensor) + start;
        const Tile<T> part{tile.elements + Tile<T>::before(run) + first - Tile<T>::before(run + first), end - first};
        part.fetch(run + first, start + first, call.lines * call.len - start - end, arrived, rank, threads);
    }
};

// Calls fetch(piece) with what there is to be of a block's tile of `here` lines: all or, of lines of LEAST_BYTES, what is in the WINDOW of each. Answers the
// place of this thread's line, the block's part of it.
template <bool WINDOW, int LEAST_BYTES, typename T, int TILES, typename Group, typename Fetch>
__device__ __forceinline__ Place locate_and_fetch(const Fused<Real<T>>& call, const Group& group, int64_t number, int here, LinePart part,
                                                  ArrivalBarrier (&arrived)[TILES], Fetch fetch) {
    const bool by_lines = WINDOW && group.size() >= Tile<T>::SIZE && part.len * int(sizeof(T)) >= LEAST_BYTES;
    prepare(arrived, by_lines ? group.lines() : 1);
    if (!by_lines) fetch(Piece{0, here * part.len, int(threadIdx.x), int(blockDim.x)});
    // What a block has no line for goes through the motions, with whatever is in shared memory.
    const bool there = group.own() < here;
    Place at = locate<true>(call, there ? number + group.own() : 0);
    if constexpr (Group::CLUSTER) at = part.of(call, at);
    if constexpr (!WINDOW) at.first = 0, at.end = part.len;
    if (by_lines) {
        if (!group.is_block()) __syncthreads();
        const int line = there ? group.own() * part.len : 0, first = line + static_cast<int>(at.first);
        fetch(Piece{first, there ? line + static_cast<int>(at.end) : first, group.rank(), group.size()});
    }
    return at;
}

// Fetches into the L2 cache what a block of the cluster `ahead` clusters on, with the same part of a line, will fetch.
template <typename T, bool WINDOW, typename Group>
__device__ __forceinline__ void fetch_tiles_ahead(const Fused<Real<T>>& call, const Group& group, LinePart part, int ahead) {
    const int64_t cluster = group.first_line() + ahead;
    if (!Group::CLUSTER || ahead == 0 || cluster >= call.lines || threadIdx.x > 0) return;
    const int64_t line = line_of(call, cluster);
    int64_t from = line * call.len + part.first;
    int count = part.len;
    if constexpr (WINDOW) {
        const Place next = part.of(call, locate<true>(call, line));
        from += next.first;
        count = window_len(next);
    }
    const auto fetch = [&](const void* tensor) { prefetch(static_cast<const T*>(tensor) + from, count); };
    fetch(call.scores);
    if (call.gradient && call.dtype == OWN<T>) fetch(call.gradient);
}

// Bytes of a line from which on its window alone is fetched: of less, as much is lost by waiting for where that is. H200, causal, copies, whole lines and windows:
// 128 x 12 x 197 x 197 f32 1.03 and 0.86; bf16 16 x 12 x 577 x 577 1.13 and 1.20, 4 x 16 x 1001 x 1001 1.05 and 0.96. Of gradients f32
// 64 x 12 x 333 x 333 1.60 and 1.77, 16 x 12 x 577 x 577 1.47 and 1.21.
constexpr int GRADIENT_WINDOW_BYTES = 2000;
template <typename T>
constexpr int WINDOW_BYTES = sizeof(T) == 2 ? GRADIENT_WINDOW_BYTES : 512;

// Shared memory: the tile and its margin and, of half precision, masks. WINDOW: there is one.
template <typename T, typename Held, bool WINDOW, typename Group>
__device__ __forceinline__ void fused_tile(const Fused<Real<T>>& call, const Group& group, int ahead = 0) {
    using R = Real<T>;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ ArrivalBarrier arrived[1];
    const int64_t number = line_of(call, group.first_line());
    const int here = call.lines - number < group.lines() ? int(call.lines - number) : group.lines();
    const LinePart part = group.part(static_cast<int>(call.len));
    const int64_t start = number * call.len + part.first;
    const Tile<T> tile{reinterpret_cast<T*>(memory), here * part.len};
    const bool there = group.own() < here;
    const Place line_at = locate_and_fetch<WINDOW, WINDOW_BYTES<T>, T>(call, group, number, here, part, arrived, [&](const Piece& piece) {
        piece.fetch(call, tile, call.scores, start, arrived[0]);
    });
    fetch_tiles_ahead<T, WINDOW>(call, group, part, ahead);
    const Place at = in_window(call, line_at);
    const int first = static_cast<int>(at.first);
    const int from = Tile<T>::before(static_cast<const T*>(call.scores) + start), begin = from + group.own() * part.len + first;
    const auto mask = fetch_mask<T>(call, group, number, here, part, line_at, memory + tile_room<T>(group.lines() * part.len));
    Held held(tile.elements + begin, begin, window_len(at), group);
    held.prepare(call, at);
    if (mask.bytes) copied_packs();
    wait_for_tiles(arrived);
    const R own_max = held.load(call, at, mask);
    const auto normalized = normalize<Held::ONCE, T>(call, at, held, own_max, group);
    R outside;  // the result there
    if (call.log) {
        const R max = part_reference(normalized.line.max);
        // NaN where the line is, -inf where nothing takes part
        const R log_sum = normalized.empty ? normalized.factor : logarithm(normalized.line.sum);
        held.results([&](R x) { return (held.logit(x) - max) - log_sum; });
        outside = negative_infinity<R>() - log_sum;
    } else {
        const R factor = normalized.factor * call.kept_scale;
        outside = R(0) * factor;
        if constexpr (Held::ONCE) {
            held.results([&](R e) { return e * factor; });
        } else {
            const auto exponential = held.exponential(normalized.warp_max);
            held.results([&](R x) { return exponential(x) * factor; });
        }
    }
    if constexpr (Held::ONCE) {
        if (call.dtype != OWN<T>) {
            if (!there) return;
            using Other = OtherDtype<T>;
            auto* to = static_cast<typename Other::Stored*>(call.result) + line_at.scores;
            held.each([&](int n, int j) { to[first + j] = Other::write(call.dtype, held.z[n]); });
            if (WINDOW) each_outside(at, part, group, [&](int j) { to[j] = Other::write(call.dtype, outside); });
            if (!call.threshold) return;
            __syncthreads();
            return drop(call, at.line, to, part, group);
        }
    }
    store_tile(held, tile, from, static_cast<T*>(call.result) + start, [&](T* results) {
        if (WINDOW) fill_outside(results, at, part, Element<T>::write(outside), group);
        if (!call.threshold) return;
        __syncthreads();
        drop(call, at.line, results - first, part, group);
    });
}

// The result's gradients that belong to what is held: as numbers, …
template <typename T, int WORDS>
struct TileGradients {
    using R = Real<T>;
    R of_element[WORDS];

    // Of the scores' dtype, in shared memory.
    template <typename Held>
    __device__ __forceinline__ void load(const Held& held, const T* line) {
        held.each_unit(shared_address(line + held.first), [&](int k, bool is, T g) { of_element[k] = is ? g : R(0); });
    }
    // Of another dtype, in global memory
    template <typename Held>
    __device__ __forceinline__ void load_other(const Held& held, Dtype dtype, const void* gradient, int64_t offset) {
        using Other = OtherDtype<T>;
        const auto* line = static_cast<const typename Other::Stored*>(gradient) + offset;
        held.each_held([&](int n) { of_element[n] = R(0); });
        held.each([&](int n, int j) { of_element[n] = Other::read(dtype, line[j]); });
    }
    __device__ __forceinline__ R of(int k, int) const { return of_element[k]; }
    __device__ __forceinline__ void clear(int k, int) { of_element[k] = R(0); }
    __device__ __forceinline__ void look_again(int) {}
};
// … and of half precision as they lie in memory, in units as the scores are: src/cuda/fused.rs gives these kernels none that lie otherwise.
template <typename T, int WORDS>
struct TileGradientUnits {
    Unit<T> units[WORDS + 1];

    template <typename Held>
    __device__ __forceinline__ void load(const Held& held, const T* line) {
        held.each_unit(shared_address(line + held.first), [&](int k, bool is, Unit<T> unit) { units[k] = is ? unit : Unit<T>{}; });
        units[WORDS] = Unit<T>{};
        if (held.has_first) units[WORDS].x = line[0];
        if (held.has_last) units[WORDS].y = line[held.len - 1];
    }
    __device__ __forceinline__ float of(int k, int i) const { return Element<T>::of_unit(units[k], i); }
    __device__ __forceinline__ void clear(int k, int i) { bits_of(units[k]) &= i ? 0xffffu : 0xffff0000u; }
    // Both numbers of a unit are not to be kept from the last time, for which there are not the registers.
    __device__ __forceinline__ void look_again(int k) { forget(units[k]); }
};

// The gradients of the scores and what is around them. `held` becomes the gradients of the scores. `of_logits` is called when it is those of
// the logits, if these are held.
template <typename T, int WORDS, int FEW, bool CAPPED, bool MASKS_FIRST, typename Group, typename OfLogits>
__device__ __forceinline__ void tile_gradients(const Fused<Real<T>>& call, const Place& at, bool there,
                                               TileLogits<T, WORDS, FEW, CAPPED, MASKS_FIRST>& held,
                                               typename TileLogits<T, WORDS, FEW, CAPPED, MASKS_FIRST>::Gradients& g, const Group& group,
                                               Real<T> own_max, OfLogits of_logits) {
    using R = Real<T>;
    // What takes no part does not count, even if it is not a number.
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
    held.each_held([&](int n) {
        if (held.z[n] == negative_infinity<R>()) g.clear(n / PER_UNIT, n % PER_UNIT);
    });
    const auto line = weigh<T>(call, at, held, g, own_max, group);
    if (there && call.sinks_gradient && group.is_first()) call.sinks_gradient[at.line] = -line.sink * line.dot;
    const LogitGradient<R> gradient(call, line);
    const auto each_gradient = [&](auto of) {
        held.each_held([&](int n) {
            if (n % PER_UNIT == 0) g.look_again(n / PER_UNIT);
            held.z[n] = of(held.z[n], g.of(n / PER_UNIT, n % PER_UNIT));
        });
    };
    if (gradient.is_finite()) {
        if (call.log) each_gradient([&](R e, R g) { return gradient.template of<true>(e, g); });
        else each_gradient([&](R e, R g) { return gradient.template of<false>(e, g); });
    } else if constexpr (PER_UNIT == 1) {
        each_gradient([&](R e, R g) { return gradient.of_any(e, g); });
    } else {
        // Seldom, and so in local memory, in a loop that is little text.
        Few<R, held.COUNT> z;
        const auto of_result = g;
#pragma unroll
        for (int n = 0; n < held.COUNT; n++) z.of[n] = held.z[n];
#pragma unroll 1
        for (int n = 0; n < held.COUNT; n++) z.of[n] = gradient.of_any(z.of[n], of_result.of(n / PER_UNIT, n % PER_UNIT));
#pragma unroll
        for (int n = 0; n < held.COUNT; n++) held.z[n] = z.of[n];
    }
    if (there) of_logits(held, at);
    if constexpr (CAPPED) {
        held.each_few_scores([&](int few, const auto& scores) {
#pragma unroll
            for (int i = 0; i < int(sizeof(scores.of) / sizeof(R)) && few + i < held.COUNT; i++) {
                R& own = held.z[few + i];
                own = behind_softcap(own, slope<HAS_STEEPNESS<T>>(call, scores.of[i]));
            }
        });
    } else {
        held.results([&](R z) { return z * call.scale; });
    }
}
template <typename T, int WORDS, int FEW, typename Group, typename OfLogits>
__device__ __forceinline__ void tile_gradients(const Fused<Real<T>>& call, const Place& at, bool there, TileScores<T, WORDS, FEW>& held,
                                               typename TileScores<T, WORDS, FEW>::Gradients& g, const Group& group,
                                               Real<T> own_max, OfLogits) {
    using R = Real<T>;
    WeighedLine<R> line;
    bool finite;
    // The g of what takes no part does not count, which matters only where it is no number: then once more.
#pragma unroll 1
    for (int time = 0; time < 2; time++) {
        line = weigh<T>(call, at, held, g, own_max, group);
        finite = group.all(!there || isfinite(line.dot));
        if (finite || time > 0) break;
        held.each_pack([&](int k) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (held.logit(held.score(k, i)) == negative_infinity<R>()) g.clear(k, i);
            }
        });
        if (group.is_block()) __syncthreads();  // All have read the parts.
    }
    if (there && call.sinks_gradient && group.is_first()) call.sinks_gradient[at.line] = -line.sink * line.dot;
    const auto exponential = held.exponential(line.warp_max);
    const LogitGradient<R> gradient(call, line, call.scale);
    finite = gradient.is_finite();
    held.each_pack([&](int k) {
        forget(held.held[k]);  // as above
        g.look_again(k);
        R results[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const R e = exponential(held.score(k, i));
            results[i] = finite || e != R(0) ? gradient.template of<false>(e, g.of(k, i)) : R(0);
        }
        held.held[k] = Element<T>::to_unit(results);
    });
}

// What the gradients of some lines are made of, in shared memory.
template <typename T>
struct TilesOfLines {
    Tile<T> scores, gradient;  // of the result; none where that has not the scores' dtype
    int64_t start;             // of the scores' elements

    // So many elements from one on, of as many as there may be.
    __device__ __forceinline__ TilesOfLines(const Fused<Real<T>>& call, unsigned char* memory, int most, int64_t start, int count)
        : scores{reinterpret_cast<T*>(memory), count},
          gradient{reinterpret_cast<T*>(memory + tile_room<T>(most)), call.dtype == OWN<T> ? count : 0},
          start(start) {}

    // All threads call this.
    __device__ __forceinline__ void fetch(const Fused<Real<T>>& call, const Piece& piece, ArrivalBarrier (&arrived)[2]) const {
        piece.fetch(call, scores, call.scores, start, arrived[0]);
        if (sizeof(T) == 2 || call.dtype == OWN<T>) piece.fetch(call, gradient, call.gradient, start, arrived[1]);
        else Piece{0, 0, piece.rank, piece.threads}.fetch(call, gradient, call.scores, start, arrived[1]);
    }
    __device__ __forceinline__ void fetch(const Fused<Real<T>>& call, ArrivalBarrier (&arrived)[2]) const {
        fetch(call, Piece{0, scores.count, int(threadIdx.x), int(blockDim.x)}, arrived);
    }
};

// The same of the lines in such tiles, of which this thread's is `line_at`, and which `wait` waits for; `behind` is where a mask may be in shared memory.
template <bool WINDOW, typename T, typename Held, typename Group, typename Wait, typename OfLogits>
__device__ __forceinline__ void gradients_of_tiles(const Fused<Real<T>>& call, const Group& group, int64_t number, int here, LinePart part, const Place& line_at,
                                                   const TilesOfLines<T>& tiles, unsigned char* behind, Wait wait, OfLogits of_logits) {
    const T* scores = static_cast<const T*>(call.scores) + tiles.start;
    const Place at = in_window(call, line_at);
    const int first = static_cast<int>(at.first);
    const int offset = group.own() * part.len, begin = Tile<T>::before(scores) + offset + first;
    const auto mask = fetch_mask<T>(call, group, number, here, part, line_at, behind);
    Held held(tiles.scores.elements + begin, begin, window_len(at), group);
    held.prepare(call, at);
    if (mask.bytes) copied_packs();
    wait();
    // Scores come before the gradients, for which bf16 has not the registers otherwise: 16 x 5001 x 5001 1.59, behind them 1.74; and logits behind them, as f32 has
    // not.
    Real<T> own_max;
    if (!Held::ONCE) own_max = held.load(call, at, mask);
    typename Held::Gradients g;
    if (Held::PER_UNIT == 1 && call.dtype != OWN<T>) {
        if constexpr (Held::PER_UNIT == 1) g.load_other(held, call.dtype, call.gradient, at.scores);
    } else {
        T* gradients = tiles.gradient.elements + Tile<T>::before(static_cast<const T*>(call.gradient) + tiles.start) + offset;
        if (call.threshold) {
            drop(call, at.line, gradients, part, group);
            __syncthreads();
        }
        g.load(held, gradients + first);
    }
    if (Held::ONCE) own_max = held.load(call, at, mask);
    tile_gradients(call, at, group.own() < here, held, g, group, own_max, of_logits);
    if (!call.result) return;
    store_tile(held, tiles.scores, Tile<T>::before(scores), static_cast<T*>(call.result) + tiles.start, [&](T* results) {
        if (WINDOW) fill_outside(results, at, part, T{}, group);
    });
}

// The gradients in tiles: moves what fused_backward_lines moves. Shared memory: two tiles with their margins, of scores and of the
// result's gradient, and masks as above.
template <typename T, typename Held, bool WINDOW, typename Group>
__device__ __forceinline__ void fused_backward_tile(const Fused<Real<T>>& call, const Group& group, int ahead = 0) {
    using R = Real<T>;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ ArrivalBarrier arrived[2];
    const int64_t number = line_of(call, group.first_line());
    const int here = call.lines - number < group.lines() ? int(call.lines - number) : group.lines();
    const LinePart part = group.part(static_cast<int>(call.len));
    const int most = group.lines() * group.most(static_cast<int>(call.len));
    const TilesOfLines<T> tiles(call, memory, most, number * call.len + part.first, here * part.len);
    const Place at = locate_and_fetch<WINDOW, GRADIENT_WINDOW_BYTES, T>(
        call, group, number, here, part, arrived, [&](const Piece& piece) { tiles.fetch(call, piece, arrived); });
    fetch_tiles_ahead<T, WINDOW>(call, group, part, ahead);
    unsigned char* behind = memory + 2 * tile_room<T>(most);
    const auto write = [&](const auto& held, const Place& at) {
        if (!call.logits_gradient) return;
        R* to = call.logits_gradient + at.scores;
        held.each([&](int n, int j) { to[j] = held.z[n]; });
        if (WINDOW) each_outside(at, part, group, [&](int j) { to[j - at.first] = R(0); });
    };
    gradients_of_tiles<WINDOW, T, Held>(call, group, number, here, part, at, tiles, behind, [&] { wait_for_tiles(arrived); }, write);
}

// Units of a thread, as src/cuda/plan has them, and how many of them come together. What is done once for a line takes as long as
// what is done for twelve to twenty units, so many are better, as long as 64 registers hold them (in 80, with fewer warps, it takes
// up to 1.25 times as long): of f32 25 (340613 x 197 with a mask shared by all 1.07 copies; with 24, for which two threads would
// take a line where one does, 1.28), of half precision as numbers twenty (115977 x 577 with a bias 1.33; with sixteen 1.80, but
// 340613 x 197 1.55 instead of 1.61). Masks of f32 come first: 340613 x 197 with one for each of many matrices 1.07, behind the
// scores 1.45. With a softcap 18, of which two registers spill: 128 x 12 x 197 x 197 1.20 (H100), with twenty, of which seven do, 1.42.
template <typename T, bool CAPPED = false>
using LogitsInTile = std::conditional_t<sizeof(T) == 4, TileLogits<T, 25, 5, CAPPED, true>,
                                        std::conditional_t<sizeof(T) == 8, TileLogits<T, 8, 4, CAPPED>, TileLogits<T, CAPPED ? 18 : 20, 2, CAPPED>>>;
template <typename T>
using CappedInTile = LogitsInTile<T, true>;
// Where half the threads are enough then, of half precision: 128 x 12 x 197 x 197 with a bias 1.07 (H100), with twenty 1.17; but where they are not 64 x 12 x
// 257 x 257 1.13 and 1.08. In 80 registers, for which blocks have up to 384 threads.
template <typename T>
using ManyInTile = TileLogits<T, 26, 2, false>;
template <typename T>
using CappedManyInTile = TileLogits<T, 26, 2, true>;
template <typename T>
using ScoresInTile = TileScores<T, 32, 4>;
// Of gradients: with a scale of f32 1.50 to 1.56 copies, with twelve units 1.7 to 2.4. Of half precision as numbers twenty in 96 registers, for which blocks
// have up to 320 threads: 128 x 12 x 197 x 197 with a bias 1.90 (H100), ten in 64 registers 2.45, twenty in 128 2.08. Masks of f32 come first, as above:
// 8 x 16 x 2047 x 2047 1.58, behind the scores 2.73; but code for them takes a softcap's gradients from 1.86 to 1.92.
template <typename T, bool CAPPED = false>
using LogitsInTiles =
    std::conditional_t<sizeof(T) == 4, TileLogits<T, 20, 4, CAPPED, !CAPPED>,
                       std::conditional_t<sizeof(T) == 8, TileLogits<T, 8, 4, CAPPED>, TileLogits<T, CAPPED ? 18 : 20, 2, CAPPED>>>;
template <typename T>
using CappedInTiles = LogitsInTiles<T, true>;
template <typename T>
using ScoresInTiles = TileScores<T, 20, 2>;
template <typename T>
constexpr int LOGITS_IN_TILES_THREADS = sizeof(T) == 2 ? 320 : 512;

// Threads of a block, at most, of which a multiprocessor is to have two (f64: one): as many of f32 as 56 registers are enough for, with which it has more of the
// small blocks that there are on Hopper. 16 x 5001 x 5001 causal 0.93, in 64 1.02; 12 x 577 x 577 0.88 and 0.92; 2 x 8 x 8192 x 8192 with a softcap 1.09 and 1.12.
#if __CUDA_ARCH__ >= 900
template <typename T>
constexpr int TILE_BLOCK = sizeof(T) == 4 ? 576 : 512;
#else
template <typename T>
constexpr int TILE_BLOCK = 512;
#endif

#define FUSED_TILE_KERNEL(name, dtype, T, Held, THREADS, WINDOW)                          \
    extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)         \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) {          \
        __shared__ Normalizer<Real<T>> parts[MAX_WARPS];                                  \
        const TileGroup<Real<T>> group{shift, parts, nullptr};                            \
        fused_tile<T, Held<T>, WINDOW>(call, group);                                      \
    }
#define FUSED_BACKWARD_TILE_KERNEL(name, dtype, T, Held, THREADS, WINDOW)                 \
    extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)         \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) {          \
        __shared__ Weighted<Real<T>> parts[MAX_WARPS];                                    \
        const TileGroup<Real<T>> group{shift, nullptr, parts};                            \
        fused_backward_tile<T, Held<T>, WINDOW>(call, group);                             \
    }
// A window's code takes registers from what is compiled with it: 16 x 5001 x 5001 bf16 with a bias 1.33, in one kernel 1.50.
#define FUSED_TILE(name, dtype, T, Held, THREADS)                   \
    FUSED_TILE_KERNEL(name, dtype, T, Held, THREADS, false)         \
    FUSED_TILE_KERNEL(name##_window, dtype, T, Held, THREADS, true)
#define FUSED_BACKWARD_TILE(name, dtype, T, Held, THREADS)                   \
    FUSED_BACKWARD_TILE_KERNEL(name, dtype, T, Held, THREADS, false)         \
    FUSED_BACKWARD_TILE_KERNEL(name##_window, dtype, T, Held, THREADS, true)
