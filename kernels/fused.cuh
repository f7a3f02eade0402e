// Softmax with what models put around it, in the same pass over the scores; src/fused.rs says what each part means. The
// logits are bias + softcap(scale * score), and -inf where masked; keys outside a line's window are not read, but in tiles of short
// lines and by what walks a line for the second time. What a call does not ask for is a branch that all threads take alike.
#pragma once
#include "exchange.cuh"
#include "pack.cuh"
#include "reduce.cuh"
#include "schedule.cuh"

constexpr int MAX_AXES = 8;

// A number of 2 or more, and what divides by it; src/cuda/fused.rs lays this out alike, and what follows.
struct ExactDivisor {
    uint32_t size, factor, shift;

    // n / size by a multiplication (Granlund and Montgomery, 1994).
    __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
        const uint32_t high = __umulhi(n, factor);
        return (high + ((n - high) >> 1)) >> shift;
    }
};

// One dimension that lines are numbered along, and what a step along it adds.
struct Axis : ExactDivisor {
    uint32_t query;
    int64_t bias, mask, sink;
};

// How a tensor is added to the logits or masks them: not at all, one element for all of a line, or each its own.
enum Around : int32_t { NONE, ONE, EACH };

enum Dtype : int32_t { F32, F64, F16, BF16 };

// A call: the tensors (null where there is none) and the options. R: float, or double for f64.
template <typename R>
struct Fused {
    const void *scores, *bias, *mask, *sinks, *gradient;
    void* result;                        // of the forward pass, or the gradient of the scores
    R *logits_gradient, *sinks_gradient;
    int64_t lines, len, inner, bias_step, mask_step;
    int64_t before, after, position;     // the window, and the position of the first query
    R scale, cap, scale_over_cap, kept_scale;
    R steepness;                         // 2 log2(e) scale / cap, where tangents and slopes may be taken by it, and 0 where not
    uint32_t threshold;                  // in the high half
    uint32_t keys[7][2];                 // of the rounds
    Dtype dtype;                         // of the result
    Around adds, masks;
    int32_t log, window, nan_rows;
    int32_t axes;                        // that move anything but along the scores; the last varies fastest
    Axis axis[MAX_AXES];
    // So many lines, so many lines apart, read the same of what is added or masked, and blocks, or clusters, side by side take them; 0
    // where it is not so. And so many neighbours are masked alike, whose tiles are to share the mask.
    ExactDivisor sharers, apart, alike;

    // The L2 cache is left to what other lines read again much later: (8, 16, 2048, 2048) f32 with a bias for all heads, its lines
    // as they are numbered 1.19, with plain accesses 1.43; those that share it side by side 1.18, with plain accesses 1.11.
    __device__ __forceinline__ EitherAccess access() const {
        return EitherAccess((adds == EACH || masks == EACH) && sharers.size == 0);
    }
};
static_assert(sizeof(Fused<float>) == 600 && sizeof(Fused<double>) == 616, "as src/cuda/fused.rs lays it out");

// A line: where its elements are in each tensor, and which keys are in its window.
struct Place {
    int64_t line, scores, bias, mask, sink, first, end;
};

// NARROW: there are less than 2^32 lines, a step along any axis is less than that, and positions and the window's limits are
// up to 2^30.
template <bool NARROW, typename R>
__device__ __forceinline__ Place locate(const Fused<R>& call, int64_t line) {
    Place at{line, line_start(line, call.len, NARROW ? 1 : call.inner), 0, 0, 0, 0, call.len};
    int64_t query = 0, left = line;
#pragma unroll 1
    for (int a = call.axes - 1; a >= 0; a--) {
        const Axis& axis = call.axis[a];
        if constexpr (NARROW) {
            const uint32_t from = static_cast<uint32_t>(left), rest = axis.quotient(from), index = from - rest * axis.size;
            const auto times = [index](int64_t step) { return static_cast<int64_t>(uint64_t(index) * static_cast<uint32_t>(step)); };
            at.bias += times(axis.bias);
            at.mask += times(axis.mask);
            at.sink += times(axis.sink);
            query += index * axis.query;
            left = rest;
        } else {
            const int64_t rest = left / axis.size, index = left - rest * axis.size;
            at.bias += index * axis.bias;
            at.mask += index * axis.mask;
            at.sink += index * axis.sink;
            query += index * axis.query;
            left = rest;
        }
    }
    if (call.window) {
        using Index = std::conditional_t<NARROW, int, int64_t>;
        const auto len = static_cast<Index>(call.len), position = static_cast<Index>(query + call.position);
        const Index first = min(max(position - static_cast<Index>(call.before), Index(0)), len);
        at.first = first;
        at.end = min(max(position + static_cast<Index>(call.after) + 1, first), len);
    }
    return at;
}

// exp(-2 |x|), within a relative 3e-7 + 1e-7 |x|
__device__ __forceinline__ float squared_decline(float x) { return flushed_power_of_two(-2.88539008f * fabsf(x)); }
__device__ __noinline__ double squared_decline(double x) { return exponential(-2 * fabs(x)); }

__device__ __forceinline__ float small_tangent(float x) {
    const float s = x * x;
    return fmaf(x * s, fmaf(s, fmaf(s, fmaf(s, 62.0f / 2835, -17.0f / 315), 2.0f / 15), -1.0f / 3), x);
}
// Within a relative 5e-7, given e = exp(-2 |x|) and 1 / (1 + e): by these or, where they would leave little, by the first terms of the series. Both
// are fewer instructions than to ask which one it is to be.
__device__ __forceinline__ float hyperbolic_tangent(float x, float e, float part) {
    return fabsf(x) < 0.3f ? small_tangent(x) : copysignf((1.0f - e) * part, x);
}
__device__ __forceinline__ float hyperbolic_tangent(float x) {
    const float e = squared_decline(x);
    return hyperbolic_tangent(x, e, quick_reciprocal(1.0f + e));
}
__device__ __noinline__ double hyperbolic_tangent(double x) { return tanh(x); }

template <bool VALUE>
struct Constant {
    __host__ __device__ constexpr operator bool() const { return VALUE; }
};

// Whether there may be a steepness: src/cuda/fused.rs has none for other scores, and tiles of these have no other softcap.
template <typename T>
constexpr bool HAS_STEEPNESS = sizeof(T) == 2;

// Calls f with whether tangents and slopes may be taken by the steepness, a constant.
template <typename T, typename F>
__device__ __forceinline__ auto by_steepness(const Fused<Real<T>>& call, F f) {
    if constexpr (HAS_STEEPNESS<T>) {
        if (call.steepness != 0.0f) return f(Constant<true>{});
    }
    return f(Constant<false>{});
}

// What softcap's cap is multiplied with. STEEP: within 3e-7, which is in a logit that times the cap, in five instructions for seventeen: of a cap of a
// few tens that is little beside the spacing of half precision.
template <bool STEEP, typename R>
__device__ __forceinline__ R tangent(const Fused<R>& call, R score) {
    if constexpr (STEEP) return fmaf(-2.0f, quick_reciprocal(1.0f + flushed_power_of_two(score * call.steepness)), 1.0f);
    else return hyperbolic_tangent(score * call.scale_over_cap);
}

// What a logit's gradient is multiplied with where there is a softcap: scale (1 - tanh^2), of which the difference would leave little.
template <bool STEEP, typename R>
__device__ __forceinline__ R slope(const Fused<R>& call, R score) {
    R e;  // exp(-2 |scale score / cap|)
    if constexpr (STEEP) e = flushed_power_of_two(-fabsf(score * call.steepness));
    else e = squared_decline(score * call.scale_over_cap);
    const R root = quick_reciprocal(fma(e, R(0.5), R(0.5)));
    return e * root * root * call.scale;
}
// A score's gradient, given its logit's and the slope. What takes no part has none, whatever its score is: chosen afterwards, which is no branch.
template <typename R>
__device__ __forceinline__ R behind_softcap(R of_logit, R slope) {
    const R of_score = of_logit * slope;
    return of_logit != R(0) ? of_score : of_logit;
}

// The tangent and the slope, which have an exponential and a quotient in common.
template <bool STEEP, typename R>
__device__ __forceinline__ R tangent_and_slope(const Fused<R>& call, R score, R& slope) {
    if constexpr (sizeof(R) == 8) {
        slope = ::slope<STEEP>(call, score);
        return tangent<STEEP>(call, score);
    } else {
        const R x = score * (STEEP ? call.steepness : call.scale_over_cap);
        const R e = STEEP ? flushed_power_of_two(-fabsf(x)) : squared_decline(x), part = quick_reciprocal(R(1) + e);
        slope = R(4) * (e * part) * part * call.scale;
        // As `tangent` has it.
        if constexpr (STEEP) return copysignf(fmaf(R(-2), e * part, R(1)), x);
        else return hyperbolic_tangent(x, e, part);
    }
}

template <typename T, typename R>
__device__ __forceinline__ R sink_of(const Fused<R>& call, int64_t place) {
    return call.sinks ? Element<T>::read(static_cast<const T*>(call.sinks)[place]) : negative_infinity<R>();
}

// The line of a maximum and a sum, with its sink.
template <typename R>
__device__ __forceinline__ Normalizer<R> with_sink(Normalizer<R> line, R sink) {
    const R max = greater(line.max, sink), reference = part_reference(max);
    // A sink that is NaN is no maximum, but reaches the sum.
    return {max, line.sum * quick_exponential(line.max - reference) + quick_exponential(sink - reference)};
}

// Philox4x32-7
__device__ __forceinline__ uint4 philox(uint32_t c0, uint32_t c1, uint32_t c2, const uint32_t (&keys)[7][2]) {
    uint32_t c3 = 0;
#pragma unroll
    for (const auto& key : keys) {
        const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key[0];
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key[1];
        c3 = static_cast<uint32_t>(a);
    }
    return {c0, c1, c2, c3};
}

// 128 random bits for eight elements of a line.
struct RandomBits {
    uint4 word;

    RandomBits() = default;
    template <typename R>
    __device__ __forceinline__ RandomBits(const Fused<R>& call, int64_t line, int64_t j)
        : word(philox(static_cast<uint32_t>(j >> 3), static_cast<uint32_t>(line), static_cast<uint32_t>(line >> 32), call.keys)) {}

    // Of element i of the eight, in the high half
    __device__ __forceinline__ uint32_t of(int i) const {
        const uint32_t low = i & 2 ? word.y : word.x, high = i & 2 ? word.w : word.z;
        const uint32_t both = i & 4 ? high : low;
        return i & 1 ? both : both << 16;
    }
};

// Calls clear(i) for those of SIZE neighbours from element j on that are dropped. SIZE divides 8, and j is a multiple of it.
template <int SIZE, typename R, typename Clear>
__device__ __forceinline__ void each_dropped(const Fused<R>& call, int64_t line, int64_t j, Clear clear) {
    const RandomBits bits(call, line, j);
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        if (bits.of((j & 7 & ~(SIZE - 1)) + i) < call.threshold) clear(i);
    }
}
// Sets them to 0.
template <int SIZE, typename R>
__device__ __forceinline__ void drop(const Fused<R>& call, int64_t line, int64_t j, R (&values)[SIZE]) {
    each_dropped<SIZE>(call, line, j, [&](int i) { values[i] = R(0); });
}

// SIZE neighbours in memory.
template <typename T, int SIZE>
struct alignas(sizeof(T) * SIZE) Neighbours {
    T of[SIZE];
};
template <>
struct Bits<2> { using Type = uint16_t; };

template <typename T, int SIZE>
__device__ __forceinline__ Neighbours<T, SIZE> load_neighbours(const T* from) {
    using B = typename Bits<sizeof(T) * SIZE>::Type;
    const B bits = *reinterpret_cast<const B*>(from);
    return *reinterpret_cast<const Neighbours<T, SIZE>*>(&bits);
}

// SIZE neighbours of a mask.
template <int SIZE>
struct Flags {
    uint32_t words[SIZE > 4 ? SIZE / 4 : 1];

    __device__ __forceinline__ void load(const uint8_t* from) {
        using B = typename Bits<SIZE>::Type;
        const B bits = *reinterpret_cast<const B*>(from);
        if constexpr (SIZE == 8) words[0] = bits.x, words[1] = bits.y;
        else words[0] = bits;
    }
    __device__ __forceinline__ bool takes(int i) const { return words[i / 4] & 0xffu << i % 4 * 8; }
};

// Calls f with a null pointer to the dtype's type.
template <typename F>
__device__ __forceinline__ void by_dtype(Dtype dtype, F f) {
    switch (dtype) {
        case F32: return f(static_cast<float*>(nullptr));
        case F64: return f(static_cast<double*>(nullptr));
        case F16: return f(static_cast<__half*>(nullptr));
        case BF16: return f(static_cast<__nv_bfloat16*>(nullptr));
    }
}

// One rounding, of doubles to half precision too.
template <typename O, typename R>
__device__ __forceinline__ O rounded_to(R x) {
    if constexpr (sizeof(R) == 8 && std::is_same<O, __half>::value) return __double2half(x);
    else if constexpr (sizeof(R) == 8 && std::is_same<O, __nv_bfloat16>::value) return __double2bfloat16(x);
    else return Element<O>::write(static_cast<Real<O>>(x));
}

// Writes SIZE neighbours, rounded once.
template <typename Access, typename O, int SIZE, typename R>
__device__ __forceinline__ void store_as(const Access& access, O* to, const R (&values)[SIZE]) {
    constexpr int PIECE = SIZE * sizeof(O) > 16 ? 16 / sizeof(O) : SIZE;
#pragma unroll
    for (int from = 0; from < SIZE; from += PIECE) {
        if constexpr (PIECE == 1 || (sizeof(R) == 8 && sizeof(O) == 2)) {
#pragma unroll
            for (int i = 0; i < PIECE; i++) to[from + i] = rounded_to<O>(values[from + i]);
        } else {
            const auto pack = pack_of<O, PIECE>([&](int i) { return static_cast<Real<O>>(values[from + i]); });
            access.store(reinterpret_cast<Pack<O, PIECE>*>(to + from), pack);
        }
    }
}

template <typename T> constexpr Dtype OWN = F32;
template <> constexpr Dtype OWN<double> = F64;
template <> constexpr Dtype OWN<__half> = F16;
template <> constexpr Dtype OWN<__nv_bfloat16> = BF16;

// T: the scores' type, which the result's most often is.
template <typename T, typename Access, int SIZE, typename R>
__device__ __forceinline__ void store_result(const Access& access, const Fused<R>& call, int64_t offset, const R (&values)[SIZE]) {
    if (call.dtype == OWN<T>) return store_as(access, static_cast<T*>(call.result) + offset, values);
    by_dtype(call.dtype, [&](auto* type) { store_as(access, reinterpret_cast<decltype(type)>(call.result) + offset, values); });
}

// ---- The line in registers ---------------------------------------------------------------------------------------------

// exp(x - max) of the elements x of a part of a line with this maximum, times 1 / unscale. Of floats one multiplication and
// addition gives the exponent for base 2: the maximum times log2(e) is rounded for all elements alike, which `unscale`, from
// the maximum's own exponential, makes up for; log2(e) is rounded too, which is another base by 1.3e-8; and the exponent
// is rounded as the small number that it is. Of f32 the half of it is taken and the result squared, which keeps subnormal ones: two
// instructions less than to look out for them.
template <typename T>
struct Exponential {
    using R = Real<T>;
    static constexpr bool SQUARED = std::is_same<T, float>::value;
    R factor, reference, unscale;

    __device__ __forceinline__ explicit Exponential(R max) {
        const bool none = max == negative_infinity<R>();
        if constexpr (sizeof(R) == 8) {
            reference = none ? R(0) : max;
            factor = unscale = R(1);
        } else {
            factor = is_great(max) ? power_over(max) : 1.44269504f;
            reference = (none ? R(0) : product(max, factor)) - Element<T>::LOG2_EXP_SCALE;
            unscale = none ? R(1) : flushed_power_of_two(fmaf(max, -factor, reference));
            halve();
        }
    }
    // Of scale * x, with a scale above 0. Where even the greatest is beyond the numbers, there is no result.
    __device__ __forceinline__ Exponential(float max, float scale) {
        const float logit = product(max, scale);
        const bool none = logit == negative_infinity<float>();
        factor = is_great(logit) ? power_over(max) : scale * 1.44269504f;
        reference = (none ? 0.0f : product(max, factor)) - Element<T>::LOG2_EXP_SCALE;
        unscale = none ? 1.0f : flushed_power_of_two(fmaf(max, -factor, reference));
        halve();
    }
    // Whether the product would round away more than 2^unscale can make up for. Floats differ by so much there that only those equal to the
    // maximum count, by any factor with which its product is exact, …
    static __device__ __forceinline__ bool is_great(float max) { return !(fabsf(max) < 0x1.4p30f); }
    // … such as a power of two by which it becomes 2^32 to 2^33, and what is less than it is so by 2^8 or more.
    static __device__ __forceinline__ float power_over(float max) {
        return __uint_as_float(((2 * 127 + 32u) << 23) - (__float_as_uint(max) & 0x7f800000u));
    }
    __device__ __forceinline__ void halve() {
        if (SQUARED) factor *= R(0.5), reference *= R(0.5);
    }
    __device__ __forceinline__ R operator()(R x) const {
        if constexpr (sizeof(R) == 8) {
            return exponential(x - reference);
        } else {
            const float power = flushed_power_of_two(fmaf(x, factor, -reference));
            return SQUARED ? power * power : power;
        }
    }
};

// SIZE neighbouring elements as they lie in memory, two of half precision to a register.
template <typename T, int SIZE>
struct Raw {
    Pack<T, SIZE> pack;
    template <typename Access>
    __device__ __forceinline__ void load(const Access& access, const T* from, bool wanted = true) { access.load_if(wanted, pack, from); }
    __device__ __forceinline__ Real<T> operator[](int i) const {
        return Element<T>::of_unit(pack.units[i / Element<T>::PER_UNIT], i % Element<T>::PER_UNIT);
    }
};

// Where the packs of SIZE neighbours that one thread holds of a line lie: `step` elements apart, which is STEP where it is known
// beforehand. WINDOW: whole rows of packs may lie outside the window, and are passed over.
template <int PACKS_, int SIZE_, int STEP, bool WINDOW>
struct HeldPlaces {
    static constexpr int PACKS = PACKS_, SIZE = SIZE_;
    int start, step;
    int first, end;  // the window
    uint32_t taking, inside;

    __device__ __forceinline__ int distance() const { return STEP ? STEP : step; }
    __device__ __forceinline__ int place(int k) const { return start + k * distance(); }
    // Whether any of the elements in pack k's row is in the window, and whether all are. A row is what the threads of a warp
    // access at once, or those of part of one.
    __device__ __forceinline__ bool takes(int k) const { return !WINDOW || (taking >> k & 1); }
    __device__ __forceinline__ bool is_inside(int k) const { return WINDOW ? inside >> k & 1 : place(k) + SIZE <= end; }
    // Calls f with each pack whose row takes part.
    template <typename F>
    __device__ __forceinline__ void each_pack(F f) const {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (takes(k)) f(k);
        }
    }

    // The rows that begin less than `distance` elements behind the first one, where they are one after the other
    static __device__ __forceinline__ uint32_t rows_before(int distance) {
        return (1u << (max(distance + STEP - 1, 0) / (STEP ? STEP : 1))) - 1;
    }

    __device__ __forceinline__ void set_window(int row, int row_size) {
        if constexpr (WINDOW && STEP != 0) {
            taking = rows_before(end) & ~rows_before(first - STEP + 1);
            inside = rows_before(end - STEP + 1) & ~rows_before(first);
        } else {
            taking = inside = 0;
#pragma unroll
            for (int k = 0; k < PACKS; k++, row += distance()) {
                if (row < end && row + row_size > first) taking |= 1u << k;
                if (row + row_size <= end && row >= first) inside |= 1u << k;
            }
        }
        // One comparison for each of the many times that it is asked.
        asm("" : "+r"(taking), "+r"(inside));
    }
};

// Whether a call has a softcap: it says so itself; there is none; or there is one, and its slopes are kept for the gradients.
enum class Softcap { ASKED, NONE, KEPT };

// COUNT logits of a line in one thread, in packs of SIZE, which is that of 16 bytes; `len` fits an int.
template <typename T, int COUNT, int SIZE, int STEP, bool WINDOW, Softcap SOFTCAP>
struct HeldLogits : HeldPlaces<COUNT / SIZE, SIZE, STEP, WINDOW> {
    using R = Real<T>;
    using Places = HeldPlaces<COUNT / SIZE, SIZE, STEP, WINDOW>;
    using Places::distance, Places::end, Places::first, Places::inside, Places::is_inside, Places::place, Places::start, Places::takes;
    static constexpr int PACKS = COUNT / SIZE;

    R z[COUNT];
    R slopes[SOFTCAP == Softcap::KEPT ? COUNT : 1];

    static __device__ __forceinline__ bool is_capped(const Fused<R>& call) {
        return SOFTCAP == Softcap::KEPT || (SOFTCAP == Softcap::ASKED && call.cap > R(0));
    }

    __device__ __forceinline__ R (&pack(int k))[SIZE] { return reinterpret_cast<R(&)[SIZE]>(z[k * SIZE]); }
    static __device__ __forceinline__ Exponential<T> exponential(R max) { return Exponential<T>(max); }
    static __device__ __forceinline__ R logit(R z) { return z; }

    // Computed once: it is cheap to compute again, but not for every access.
    template <typename P>
    static __device__ __forceinline__ P here(P address) {
        asm("" : "+l"(address));
        return address;
    }

    // Answers the greatest. What lies in rows outside the window is left as it was.
    template <typename Access>
    __device__ __forceinline__ R load(const Access& access, const Fused<R>& call, const Place& at) {
        const auto scores = here(static_cast<const T*>(call.scores) + at.scores + start);
        const auto bias = static_cast<const T*>(call.bias) + at.bias;
        const auto mask = static_cast<const uint8_t*>(call.mask) + at.mask;
        const R absent = negative_infinity<R>();
        // All that is to be read is asked for before any of it is waited for.
        Raw<T, SIZE> raw[PACKS] = {}, added[PACKS];
        Flags<SIZE> kept[PACKS];
        const auto each_read = [&](auto f) {
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                if (place(k) < end && (!WINDOW || place(k) + SIZE > first)) f(k, k * distance());
            }
        };
        each_read([&](int k, int offset) { raw[k].load(access, scores + offset); });
        R added_to_all = 0;
        if (call.adds == EACH) {
            const auto own = here(bias + start);
#pragma unroll
            for (auto& x : added) x = {};
            each_read([&](int k, int offset) { added[k].load(PlainAccess{}, own + offset); });
        } else if (call.adds == ONE) {
            added_to_all = Element<T>::read(*bias);
        }
        if (call.masks == EACH) {
            const auto own = here(mask + start);
#pragma unroll
            for (auto& x : kept) x = {};
            each_read([&](int k, int offset) { kept[k].load(own + offset); });
        } else if (call.masks == ONE && !*mask) {
            end = first;
            inside = 0;
        }
        const R scale = is_capped(call) ? call.cap : call.scale;
        R max = absent;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            auto& x = pack(k);
            if (!takes(k)) continue;
#pragma unroll
            for (int i = 0; i < SIZE; i++) x[i] = raw[k][i];
            if (is_capped(call)) {
                by_steepness<T>(call, [&](auto steep) {
#pragma unroll
                    for (int i = 0; i < SIZE; i++) {
                        if constexpr (SOFTCAP == Softcap::KEPT) x[i] = tangent_and_slope<steep>(call, x[i], slopes[k * SIZE + i]);
                        else x[i] = tangent<steep>(call, x[i]);
                    }
                });
            }
            if (call.adds == EACH) {
#pragma unroll
                for (int i = 0; i < SIZE; i++) x[i] = x[i] * scale + added[k][i];
            } else {
#pragma unroll
                for (int i = 0; i < SIZE; i++) x[i] = x[i] * scale + added_to_all;
            }
            if (call.masks == EACH) {
#pragma unroll
                for (int i = 0; i < SIZE; i++) x[i] = kept[k].takes(i) ? x[i] : absent;
            }
            if (!is_inside(k)) {
#pragma unroll
                // Without a window, whole packs lie behind the line.
                for (int i = 0; i < SIZE; i++) {
                    x[i] = WINDOW ? place(k) + i >= first && place(k) + i < end ? x[i] : absent : place(k) < end ? x[i] : absent;
                }
            }
            max = greater(max, max_of(x));
        }
        return max;
    }

    // Of element i of pack k, which is kept in place of the logit
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential, int k, int i) {
        return pack(k)[i] = exponential(pack(k)[i]);
    }

    // Answers the sum of the exponentials, which are kept in place of the logits where it is said so.
    template <bool KEEP>
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential) {
        constexpr int SUMS = SIZE > 4 ? SIZE : 4;
        R sums[SUMS] = {};
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (!takes(k)) continue;
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                R& x = pack(k)[i];
                const R e = exponential(x);
                if (KEEP) x = e;
                sums[(k * SIZE + i) % SUMS] += e;
            }
        }
        return pairwise_sum(sums);
    }
};

// COUNT scores of a line in one thread, as they lie in memory, of half precision two to a register: of the logits as many would
// need twice the registers. In return the exponentials are computed twice. But for a scale above 0 and a mask, of whole packs, the
// scores are the logits.
template <typename T, int COUNT, int SIZE, int STEP, bool WINDOW>
struct HeldScores : HeldPlaces<COUNT / SIZE, SIZE, STEP, WINDOW> {
    using R = Real<T>;
    using Places = HeldPlaces<COUNT / SIZE, SIZE, STEP, WINDOW>;
    using Places::distance, Places::each_pack, Places::end, Places::first, Places::is_inside, Places::place, Places::start;
    static constexpr int PACKS = COUNT / SIZE;

    Pack<T, SIZE> packs[PACKS];
    R scale;

    __device__ __forceinline__ Exponential<T> exponential(R max) const { return Exponential<T>(max, scale); }
    __device__ __forceinline__ R logit(R score) const { return product(score, scale); }
    __device__ __forceinline__ R score(int k, int i) const {
        return Element<T>::of_unit(packs[k].units[i / Element<T>::PER_UNIT], i % Element<T>::PER_UNIT);
    }
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential, int k, int i) const {
        return exponential(score(k, i));
    }

    // Answers the greatest. MASKED: there may be a mask.
    template <bool MASKED = false, typename Access>
    __device__ __forceinline__ R load(const Access& access, const Fused<R>& call, const Place& at) {
        scale = call.scale;
        const auto scores = static_cast<const T*>(call.scores) + at.scores + start;
        const auto reads = [&](int k) { return place(k) < end && (!WINDOW || place(k) + SIZE > first); };
        uint32_t reading = 0;
        if constexpr (STEP && WINDOW) reading = Places::rows_before(end - start) & ~Places::rows_before(first - start - SIZE + 1);
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            packs[k] = no_pack<T, SIZE>();
            access.load_if(STEP && WINDOW ? reading >> k & 1 : reads(k), packs[k], scores + k * distance());
        }
        if (MASKED && call.masks) mask(call, at);
        auto greatest = no_elements<T>();
        each_pack([&](int k) {
            if (WINDOW && !is_inside(k)) packs[k] = part_of(packs[k], first - place(k), end - place(k));
#pragma unroll
            for (const auto unit : packs[k].units) greatest = greater(greatest, unit);
        });
        return max_of_unit<T>(greatest);
    }

    // What takes no part becomes -inf.
    __device__ __forceinline__ void mask(const Fused<R>& call, const Place& at) {
        const auto mask = static_cast<const uint8_t*>(call.mask) + at.mask;
        const bool all = call.masks == ONE && *mask;
        Flags<SIZE> kept[PACKS];
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            kept[k] = {};
            if (call.masks == EACH && place(k) < end && place(k) + SIZE > first) kept[k].load(mask + place(k));
        }
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                if (!all && !kept[k].takes(i)) set(packs[k], i, no_elements<T>());
            }
        }
    }

    // Answers the sum of the exponentials.
    template <bool KEEP>
    __device__ __forceinline__ R exponentiate(const Exponential<T>& exponential) {
        R sums[SIZE] = {};
        each_pack([&](int k) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) sums[i] += exponential(score(k, i));
        });
        return pairwise_sum(sums);
    }
};

// Threads that share a line hold it in turn, those of a block each warp a run of it.
template <int COUNT, int SIZE, bool WINDOW, typename Held, typename Group>
__device__ __forceinline__ void set_places(Held& held, const Group& group, const Place& at) {
    int row = 0, row_size = 32 * SIZE;
    if constexpr (Group::BLOCK) {
        // Each warp a run, or in turns, so that a window leaves none without work.
        row = group.exchange.warp() * (WINDOW ? SIZE : COUNT) * 32;
        held.start = row + threadIdx.x % 32 * SIZE;
        held.step = (WINDOW ? group.exchange.threads() : 32) * SIZE;
    } else {
        row_size = group.size() * SIZE;
        held.start = group.rank() * SIZE;
        held.step = row_size;
    }
    held.first = static_cast<int>(at.first);
    held.end = static_cast<int>(at.end);
    if constexpr (WINDOW) held.set_window(row, row_size);
}
template <typename T, int COUNT, int SIZE, bool WINDOW, Softcap SOFTCAP = Softcap::ASKED, typename Group>
__device__ __forceinline__ auto held_logits(const Group& group, const Place& at) {
    HeldLogits<T, COUNT, SIZE, Group::BLOCK && !WINDOW ? 32 * SIZE : 0, WINDOW, SOFTCAP> held;
    set_places<COUNT, SIZE, WINDOW>(held, group, at);
    return held;
}

// Given the greatest of the logits that this thread holds: the maximum and the sum of a line, and what the exponentials that
// this warp kept are to be multiplied with.
template <typename R>
struct FusedLine {
    Normalizer<R> line;
    R factor;
    bool empty;
    R warp_max;
};

template <bool KEEP, typename T, typename Held, typename Group>
__device__ __forceinline__ FusedLine<Real<T>> normalize(const Fused<Real<T>>& call, const Place& at, Held& held, Real<T> own_max, const Group& group) {
    using R = Real<T>;
    const R absent = negative_infinity<R>();
    const R max = group.reduce(own_max, [](R a, R b) { return greater(a, b); });
    const auto exponential = held.exponential(max);
    const R sum = group.reduce(held.template exponentiate<KEEP>(exponential), [](R a, R b) { return a + b; });
    auto line = group.merge({held.logit(max), sum * exponential.unscale});
    if (call.sinks) line = with_sink(line, sink_of<T>(call, at.sink));
    const bool empty = line.max == absent && line.sum == R(0);
    // The maximum itself adds exp(0) = 1: what lies below is rounding.
    const R least = line.max > absent ? R(1) : R(0);
    if (line.sum < least) line.sum = least;
    R factor = quick_exponential(held.logit(max) - part_reference(line.max)) * exponential.unscale * reciprocal(line.sum);
    if (empty) factor = call.nan_rows && !call.sinks ? R(NAN) : R(0);
    return {line, factor, empty, max};
}

// The number of the line that a block, or a cluster, with this number takes: those that share what is around them one after the other. There are less than
// 2^32.
template <typename R>
__device__ __forceinline__ uint32_t line_of(const Fused<R>& call, uint32_t block) {
    if (call.sharers.size == 0) return block;
    const uint32_t rest = call.sharers.quotient(block), outer = call.apart.quotient(rest);
    const uint32_t sharer = block - rest * call.sharers.size, inner = rest - outer * call.apart.size;
    return (outer * call.sharers.size + sharer) * call.apart.size + inner;
}

// Fetches what is in the window of the line `ahead` lines on, which has the same window, into the L2 cache.
template <typename T, typename Group>
__device__ __forceinline__ void fetch_ahead(const Fused<Real<T>>& call, const Place& at, const Group& group, int ahead) {
    if (ahead == 0 || at.line + ahead >= call.lines) return;
    constexpr int LINE = 128 / sizeof(T);  // of the cache
    const int j = static_cast<int>(at.first) / LINE * LINE + group.rank() * LINE;
    if (j < at.end) prefetch(static_cast<const T*>(call.scores) + at.scores + ahead * call.len + j);
}

// The same of a warp's run of COUNT elements for each of its threads, of the line of the cluster `ahead` clusters on, and of any window, as
// kernels/register_softmax.cuh has it.
template <typename T, int COUNT, typename Group>
__device__ __forceinline__ void fetch_run_ahead(const Fused<Real<T>>& call, const Group& group, int ahead) {
    const int64_t cluster = group.line() + ahead;
    if (ahead == 0 || cluster >= call.lines || threadIdx.x % 32 > 0) return;
    const int64_t line = line_of(call, cluster);
    int first = group.exchange.warp() * COUNT * 32, end = min(first + COUNT * 32, static_cast<int>(call.len));
    if (call.window) {
        const Place next = locate<true>(call, line);
        first = max(first, static_cast<int>(next.first));
        end = min(end, static_cast<int>(next.end));
    }
    if (first < end) prefetch(static_cast<const T*>(call.scores) + line * call.len + first, end - first);
}

// Moves the scores (as far as they are in the window), the result, and once what is added or masked: the ceiling is a copy of
// the scores, and of half of it a write alone where a causal mask leaves half. What is in the window of the line `ahead` lines
// on, which has the same window, is fetched into the L2 cache: lines of which less is read wait as long for it.
template <typename T, int COUNT, int SIZE, bool WINDOW, typename Group>
__device__ __forceinline__ void fused_lines(const Fused<Real<T>>& call, const Group& group, int ahead = 0) {
    using R = Real<T>;
    int64_t number = group.line();
    if constexpr (Group::CLUSTER || (Group::BLOCK && !WINDOW)) number = line_of(call, number);
    const bool there = Group::BLOCK || number < call.lines;
    Place at = locate<true>(call, there ? number : 0);
    if (!there) at.first = at.end = 0;
    const auto access = call.access();
    auto held = held_logits<T, COUNT, SIZE, WINDOW>(group, at);
    const R own_max = held.load(access, call, at);
    if constexpr (Group::CLUSTER) fetch_run_ahead<T, COUNT>(call, group, ahead);
    else if (WINDOW && Group::BLOCK) fetch_ahead<T>(call, at, group, ahead);
    R absent;  // the result outside the window
    if (call.log) {
        const auto [line, factor, empty, warp_max] = normalize<false, T>(call, at, held, own_max, group);
        const R max = part_reference(line.max);
        // NaN where the line is, -inf where nothing takes part
        const R log_sum = empty ? factor : logarithm(line.sum);
        absent = negative_infinity<R>() - log_sum;
#pragma unroll
        for (auto& z : held.z) z = (z - max) - log_sum;
    } else {
        const R factor = normalize<true, T>(call, at, held, own_max, group).factor * call.kept_scale;
        absent = R(0) * factor;
#pragma unroll
        for (int k = 0; k < held.PACKS; k++) {
            if (!held.takes(k)) continue;
#pragma unroll
            for (auto& e : held.pack(k)) e *= factor;
            if (call.threshold) drop<SIZE>(call, at.line, held.place(k), held.pack(k));
        }
    }
    if (!there) return;
    const int len = static_cast<int>(call.len);
    R outside[SIZE];
#pragma unroll
    for (auto& x : outside) x = absent;
#pragma unroll
    for (int k = 0; k < held.PACKS; k++) {
        if (held.place(k) >= len) continue;
        if (held.takes(k)) {
            store_result<T>(access, call, at.scores + held.place(k), held.pack(k));
        } else {
            store_result<T>(access, call, at.scores + held.place(k), outside);
        }
    }
}

// The same where but for a scale above 0 and a window nothing is asked that changes the logits. Half the threads of the above
// share a line, so that what each of them does once is done half as often: (8, 16, 2048, 2048) causal bf16 0.78, as above 0.93.
template <typename T, int COUNT, bool WINDOW, typename Group>
__device__ __forceinline__ void fused_scores(const Fused<Real<T>>& call, const Group& group, int ahead) {
    using R = Real<T>;
    constexpr int SIZE = 16 / sizeof(T);
    const int64_t number = group.line();
    if (!Group::BLOCK && number >= call.lines) return;
    const Place at = locate<true>(call, number);
    HeldScores<T, COUNT, SIZE, Group::BLOCK && WINDOW ? 0 : 32 * SIZE, WINDOW> held;
    set_places<COUNT, SIZE, WINDOW>(held, group, at);
    const R own_max = held.load(PlainAccess{}, call, at);
    if constexpr (Group::CLUSTER) fetch_run_ahead<T, COUNT>(call, group, ahead);
    else if (WINDOW) fetch_ahead<T>(call, at, group, ahead);
    const auto [line, factor, empty, warp_max] = normalize<false, T>(call, at, held, own_max, group);
    const R of_all = factor * call.kept_scale, reference = part_reference(line.max), log_sum = empty ? factor : logarithm(line.sum);
    const auto exponential = held.exponential(warp_max);
    const R absent = call.log ? negative_infinity<R>() - log_sum : R(0) * of_all;
    const int len = static_cast<int>(call.len);
    // What is to be computed again must not be kept from the first time.
#pragma unroll
    for (auto& pack : held.packs) {
#pragma unroll
        for (auto& unit : pack.units) forget(unit);
    }
#pragma unroll
    for (int k = 0; k < held.PACKS; k++) {
        if (held.place(k) >= len) continue;
        R result[SIZE];
#pragma unroll
        for (auto& x : result) x = absent;
        if (held.takes(k)) {
            if (call.log) {
#pragma unroll
                for (int i = 0; i < SIZE; i++) result[i] = (held.logit(held.score(k, i)) - reference) - log_sum;
            } else {
#pragma unroll
                for (int i = 0; i < SIZE; i++) result[i] = exponential(held.score(k, i)) * of_all;
                if (call.threshold) drop<SIZE>(call, at.line, held.place(k), result);
            }
        }
        store_result<T>(PlainAccess{}, call, at.scores + held.place(k), result);
    }
}

// The gradient g of the result as it lies in memory, of the scores' dtype.
template <typename T, int PACKS, int SIZE>
struct HeldGradient {
    Raw<T, SIZE> packs[PACKS];

    template <typename Access, typename Held>
    __device__ __forceinline__ void load(const Access& access, const T* line, const Held& held) {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const int j = held.place(k);
            packs[k] = {};
            packs[k].load(access, line + j, j < held.end && j + SIZE > held.first);
        }
    }
    __device__ __forceinline__ Real<T> of(int k, int i) const { return packs[k][i]; }
    __device__ __forceinline__ void clear(int k, int i) { set(packs[k].pack, i, Unit<T>{}); }
};

// The same as numbers, of any dtype
template <typename R, int PACKS, int SIZE>
struct GradientNumbers {
    R packs[PACKS][SIZE];

    template <typename O, typename Held>
    __device__ __forceinline__ void load(const O* line, const Held& held) {
        constexpr int PIECE = SIZE * sizeof(O) > 16 ? 16 / sizeof(O) : SIZE;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const int j = held.place(k);
            const bool read = j < held.end && j + SIZE > held.first;
#pragma unroll
            for (int i = 0; i < SIZE; i += PIECE) {
                Neighbours<O, PIECE> piece;
                if (read) piece = load_neighbours<O, PIECE>(line + j + i);
#pragma unroll
                for (int n = 0; n < PIECE; n++) packs[k][i + n] = read ? static_cast<R>(Element<O>::read(piece.of[n])) : R(0);
            }
        }
    }
    __device__ __forceinline__ R of(int k, int i) const { return packs[k][i]; }
};

// What a line's gradient is made with.
template <typename R>
struct WeighedLine {
    R dot;       // the sum of g weighted with the probabilities or, of log-softmax, not
    R factor;    // what the exponentials of this warp are multiplied with to be probabilities, times dropout's scale; 0 if nothing takes part
    R warp_max;  // what they are relative to
    R sink;      // the sink's probability, times dropout's scale
};

// Given the greatest of the logits that this thread holds.
template <typename T, typename Held, typename Gradient, typename Group>
__device__ __forceinline__ WeighedLine<Real<T>> weigh(const Fused<Real<T>>& call, const Place& at, Held& held, const Gradient& g, Real<T> own_max, const Group& group) {
    using R = Real<T>;
    constexpr int SUMS = 4;
    const auto add = [](R a, R b) { return a + b; };
    const R max = group.reduce(own_max, [](R a, R b) { return greater(a, b); });
    const auto exponential = held.exponential(max);
    R sums[SUMS] = {}, dots[SUMS] = {};
    held.each_pack([&](int k) {
#pragma unroll
        for (int i = 0; i < Held::SIZE; i++) {
            const R e = held.exponentiate(exponential, k, i);
            sums[i % SUMS] += e;
            dots[i % SUMS] = fma(g.of(k, i), e, dots[i % SUMS]);
        }
    });
    if (call.log) {
#pragma unroll
        for (auto& x : dots) x = R(0);
        held.each_pack([&](int k) {
#pragma unroll
            for (int i = 0; i < Held::SIZE; i++) dots[i % SUMS] += g.of(k, i);
        });
    }
    const R sum = group.reduce(pairwise_sum(sums), add), dot = group.reduce(pairwise_sum(dots), add);
    auto line = group.merge(Weighted<R>{held.logit(max), sum * exponential.unscale, call.log ? dot : dot * exponential.unscale}, call.log);
    R sink = negative_infinity<R>();
    if (call.sinks) {
        sink = sink_of<T>(call, at.sink);
        const Normalizer<R> with = with_sink<R>({line.max, line.sum}, sink);
        // Where nothing takes part, the dot is 0: so is the factor, which a low sink would make infinite.
        if (!call.log) line.dot *= quick_exponential(line.max - part_reference(with.max));
        line.max = with.max, line.sum = with.sum;
    }
    if (line.max == negative_infinity<R>() && line.sum == R(0)) return {line.dot, R(0), max, R(0)};
    const R reference = part_reference(line.max), inverse = reciprocal(line.sum), scale = inverse * call.kept_scale;
    const R factor = quick_exponential(held.logit(max) - reference) * exponential.unscale * scale;
    return {call.log ? line.dot : line.dot * inverse, factor, max, quick_exponential(sink - reference) * scale};
}

// The gradient of a logit of which the exponential was e, given the result's gradient g, times a scale.
template <typename R>
struct LogitGradient {
    R factor, dot;
    bool log;

    __device__ __forceinline__ LogitGradient(const Fused<R>& call, const WeighedLine<R>& line, R scale = R(1))
        : factor(call.log ? scale : line.factor * scale), dot(line.factor * scale * line.dot), log(call.log) {}
    __device__ __forceinline__ bool is_finite() const { return isfinite(dot); }
    // In a line that is finite
    template <bool LOG>
    __device__ __forceinline__ R of(R e, R g) const { return LOG ? fma(e, -dot, factor * g) : e * fma(factor, g, -dot); }
    // In any: what takes no part has 0, or of log-softmax, which drops nothing, g, whatever the others are.
    __device__ __forceinline__ R of_any(R e, R g) const {
        if (e == R(0)) return log ? factor * g : R(0);
        return log ? of<true>(e, g) : of<false>(e, g);
    }
};

// From the scores again, and the gradient g of the result: reads both once and writes the scores' gradient if it is wanted. 3/2 of a
// copy's bytes, which is the floor. What takes no part has the gradient 0 in a line of NaN, too, and its g does not count. Calls
// take(k, place, z) with the gradients z of the logits of pack k, the first of which are at that place of all of the scores.
// A warp takes a line that is not `there` as an empty one, and without a result.
template <typename T, int COUNT, int SIZE, Softcap SOFTCAP, typename Group, typename Take>
__device__ __forceinline__ void fused_backward_line(const Fused<Real<T>>& call, const Group& group, int64_t number, bool there, Take take) {
    using R = Real<T>;
    const R absent = negative_infinity<R>();
    const int len = static_cast<int>(call.len);
    Place at = locate<true>(call, number);
    if (!there) at.first = at.end = 0;
    const auto access = call.access();
    auto held = held_logits<T, COUNT, SIZE, true, SOFTCAP>(group, at);
    // Of a loop over lines, addresses of all packs would be kept in registers.
    asm volatile("" : "+r"(held.start), "+r"(held.step));
    constexpr int PACKS = COUNT / SIZE;
    GradientNumbers<R, PACKS, SIZE> g;
    R own_max;
    if (call.dtype == OWN<T>) {
        // Both are asked for before either is waited for.
        HeldGradient<T, PACKS, SIZE> raw;
        raw.load(access, static_cast<const T*>(call.gradient) + at.scores, held);
        own_max = held.load(access, call, at);
#pragma unroll
        for (int i = 0; i < COUNT; i++) g.packs[i / SIZE][i % SIZE] = raw.of(i / SIZE, i % SIZE);
    } else {
        by_dtype(call.dtype, [&](auto* type) {
            using O = std::remove_pointer_t<decltype(type)>;
            if constexpr (!std::is_same<O, T>::value) g.load(static_cast<const O*>(call.gradient) + at.scores, held);
        });
        own_max = held.load(access, call, at);
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (!held.takes(k)) continue;
#pragma unroll
        for (int i = 0; i < SIZE; i++) g.packs[k][i] = held.pack(k)[i] == absent ? R(0) : g.packs[k][i];
        if (call.threshold) drop<SIZE>(call, at.line, held.place(k), g.packs[k]);
    }
    const auto line = weigh<T>(call, at, held, g, own_max, group);
    if (!there) return;
    if (call.sinks_gradient && (Group::BLOCK ? threadIdx.x == 0 : held.start == 0)) call.sinks_gradient[at.line] = -line.sink * line.dot;
    const LogitGradient<R> gradient(call, line);
    const bool finite = !call.log && gradient.is_finite();
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const int j = held.place(k);
        if (j >= len) continue;
        R result[SIZE];
#pragma unroll
        for (auto& x : result) x = R(0);
        if (held.takes(k)) {
            if (finite) {
#pragma unroll
                for (int i = 0; i < SIZE; i++) result[i] = gradient.template of<false>(held.pack(k)[i], g.of(k, i));
            } else {
#pragma unroll
                for (int i = 0; i < SIZE; i++) result[i] = gradient.of_any(held.pack(k)[i], g.of(k, i));
            }
        }
        take(k, at.scores + j, result);
        if (!call.result) continue;
        if (held.is_capped(call)) {
            if constexpr (SOFTCAP == Softcap::KEPT) {
                if (held.takes(k)) {
#pragma unroll
                    for (int i = 0; i < SIZE; i++) result[i] = behind_softcap(result[i], held.slopes[k * SIZE + i]);
                }
            } else if (j < at.end && j + SIZE > at.first) {
                Raw<T, SIZE> raw;
                raw.load(PlainAccess{}, static_cast<const T*>(call.scores) + at.scores + j);
                by_steepness<T>(call, [&](auto steep) {
#pragma unroll
                    for (int i = 0; i < SIZE; i++) result[i] = behind_softcap(result[i], slope<steep>(call, raw[i]));
                });
            }
        } else {
#pragma unroll
            for (int i = 0; i < SIZE; i++) result[i] *= call.scale;
        }
        store_as(access, static_cast<T*>(call.result) + at.scores + j, result);
    }
}

// Each line by itself: writes the logits' gradient, too, if it is wanted.
template <typename T, int COUNT, int SIZE, Softcap SOFTCAP, typename Group>
__device__ __forceinline__ void fused_backward_lines(const Fused<Real<T>>& call, const Group& group) {
    const int64_t number = group.line();
    const bool there = Group::BLOCK || number < call.lines;
    fused_backward_line<T, COUNT, SIZE, SOFTCAP>(call, group, there ? number : 0, there, [&](int, int64_t place, const auto& z) {
        if (call.logits_gradient) store_as(call.access(), call.logits_gradient + place, z);
    });
}

// The same where neither a bias nor a softcap nor log-softmax is asked, the scale is above 0, and g has the scores' dtype. Both
// stay as they lie in memory, and the exponentials are computed twice: so a thread has room for more elements, and what it does
// once is done less often. Half of (8, 16, 2048, 2048) over a copy: bf16 1.37, as logits 1.66; f32 1.27 and 1.37.
template <typename T, int COUNT, typename Group>
__device__ __forceinline__ void fused_backward_scores(const Fused<Real<T>>& call, const Group& group) {
    using R = Real<T>;
    constexpr int SIZE = 16 / sizeof(T), PACKS = COUNT / SIZE;
    const int64_t number = group.line();
    const bool there = Group::BLOCK || number < call.lines;
    const int len = static_cast<int>(call.len);
    Place at = locate<true>(call, there ? number : 0);
    if (!there) at.first = at.end = 0;
    HeldScores<T, COUNT, SIZE, 0, true> held;
    set_places<COUNT, SIZE, true>(held, group, at);
    HeldGradient<T, PACKS, SIZE> g;
    g.load(PlainAccess{}, static_cast<const T*>(call.gradient) + at.scores, held);
    const R own_max = held.template load<true>(PlainAccess{}, call, at);
    if (call.threshold) {
        held.each_pack([&](int k) {
            each_dropped<SIZE>(call, at.line, held.place(k), [&](int i) { g.clear(k, i); });
        });
    }
    auto line = weigh<T>(call, at, held, g, own_max, group);
    // The g of what takes no part does not count, which matters only where it is no number.
    if (!group.all(isfinite(line.dot))) {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                if (held.logit(held.score(k, i)) == negative_infinity<R>()) g.clear(k, i);
            }
        }
        if (Group::BLOCK) __syncthreads();  // All have read the parts.
        line = weigh<T>(call, at, held, g, own_max, group);
    }
    if (!there) return;
    if (call.sinks_gradient && group.rank() == 0) call.sinks_gradient[at.line] = -line.sink * line.dot;
    const auto exponential = held.exponential(line.warp_max);
    // What is to be computed again must not be kept from the first time.
#pragma unroll
    for (auto& pack : held.packs) {
#pragma unroll
        for (auto& unit : pack.units) forget(unit);
    }
    const LogitGradient<R> gradient(call, line, call.scale);
    const bool finite = gradient.is_finite();
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (held.place(k) >= len) continue;
        R result[SIZE];
#pragma unroll
        for (auto& x : result) x = R(0);
        if (held.takes(k)) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                const R e = exponential(held.score(k, i));
                result[i] = finite || e != R(0) ? gradient.template of<false>(e, g.of(k, i)) : R(0);
            }
        }
        store_as(PlainAccess{}, static_cast<T*>(call.result) + at.scores + held.place(k), result);
    }
}

// ---- Named kernels: the build compiles a module for each dtype -----------------------------------------------------------

#define FUSED_WARP(name, dtype, T, COUNT, SIZE, WINDOW)                                           \
    extern "C" __global__ void __launch_bounds__(128)                                             \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) {                  \
        fused_lines<T, COUNT, SIZE, WINDOW>(call, WarpGroup<Real<T>>{shift});                     \
    }
#define FUSED_BLOCK(name, dtype, T, COUNT, SIZE, WINDOW)                                          \
    extern "C" __global__ void __launch_bounds__(256, sizeof(T) == 4 ? 5 : 4)                     \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int ahead) {                  \
        using R = Real<T>;                                                                        \
        __shared__ Normalizer<R> parts[MAX_WARPS];                                                \
        fused_lines<T, COUNT, SIZE, WINDOW>(call, WholeBlocks<R, BlockExchange<R>>{{parts}, nullptr}, ahead); \
    }
// Scores of half precision, a warp or a block to a line
#define FUSED_WARP_SCORES(name, dtype, T, COUNT, WINDOW)                                          \
    extern "C" __global__ void __launch_bounds__(128, 7)                                          \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int ahead) {                  \
        fused_scores<T, COUNT, WINDOW>(call, WarpGroup<Real<T>>{5}, ahead);                       \
    }
#define FUSED_BLOCK_SCORES(name, dtype, T, COUNT, WINDOW)                                         \
    extern "C" __global__ void __launch_bounds__(256, 3)                                          \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int ahead) {                  \
        using R = Real<T>;                                                                        \
        __shared__ Normalizer<R> parts[MAX_WARPS];                                                \
        fused_scores<T, COUNT, WINDOW>(call, WholeBlocks<R, BlockExchange<R>>{{parts}, nullptr}, ahead); \
    }
#define FUSED_BACKWARD_WARP(name, dtype, T, COUNT, SIZE, SOFTCAP)                                 \
    extern "C" __global__ void __launch_bounds__(128)                                             \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) {                  \
        fused_backward_lines<T, COUNT, SIZE, SOFTCAP>(call, WarpGroup<Real<T>>{shift});           \
    }
#define FUSED_BACKWARD_WARP_SCORES(name, dtype, T, COUNT)                                         \
    extern "C" __global__ void __launch_bounds__(128, 8)                                          \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shift) {                  \
        fused_backward_scores<T, COUNT>(call, WarpGroup<Real<T>>{shift});                         \
    }
#define FUSED_BACKWARD_BLOCK_SCORES(name, dtype, T, COUNT)                                        \
    extern "C" __global__ void __launch_bounds__(sizeof(T) == 4 ? 512 : 256, sizeof(T) == 4 ? 2 : 4) \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call) {                             \
        using R = Real<T>;                                                                        \
        __shared__ Weighted<R> parts[MAX_WARPS];                                                  \
        fused_backward_scores<T, COUNT>(call, WholeBlocks<R, BlockExchange<R>>{{}, parts});       \
    }
#define FUSED_BACKWARD_BLOCK(name, dtype, T, COUNT, SIZE, SOFTCAP, THREADS)                       \
    extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 2)                 \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call) {                             \
        using R = Real<T>;                                                                        \
        __shared__ Weighted<R> parts[MAX_WARPS];                                                  \
        fused_backward_lines<T, COUNT, SIZE, SOFTCAP>(call, WholeBlocks<R, BlockExchange<R>>{{}, parts}); \
    }

// Elements of a thread, and of a pack: src/cuda/plan has these counts too.
template <typename T>
constexpr int HELD = 64 / sizeof(T) < 8 ? 8 : 64 / sizeof(T);
template <typename T>
constexpr int HELD_BACKWARD = sizeof(T) == 8 ? 8 : 16;
template <typename T>
constexpr int HELD_BACKWARD_SCORES = 64 / sizeof(T);
template <typename T>
constexpr int PACK = 16 / sizeof(T);
