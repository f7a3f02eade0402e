// Softmax with the line in registers: each element is read once and written once, so the ceiling is a copy. A group of
// threads takes a line, COUNT elements each: a part of a warp or a warp (several lines to a block), a block, or on Hopper
// the blocks of a cluster. Blocks are small and take one line each, so that a multiprocessor holds several in different
// phases: while one waits for memory, others compute or store.
#pragma once
#include <type_traits>

#include "exchange.cuh"
#include "pack.cuh"
#include "reduce.cuh"
#include "schedule.cuh"
#include "start.cuh"

// The elements of one line that one thread holds: packs of 16 bytes of the output at equal distances, which neighbouring
// threads have side by side. WHOLE: lines are whole packs, in the input too. Otherwise lines may have any length and start
// anywhere, and the input may lie differently to its packs than the output does: threads load packs of the input, and shift
// their elements to where the output has them with what the next thread loaded. STEP is the distance in packs, or 0 where it
// is not known beforehand; so many threads side by side (a part of a warp, or a warp) share what they load.
template <typename T, int COUNT, bool WHOLE, int STEP>
struct RegisterLine {
    using R = Real<T>;
    static constexpr int PER_UNIT = Element<T>::PER_UNIT;
    static constexpr int SIZE = 16 / sizeof(T), UNITS = SIZE / PER_UNIT;  // of a pack
    static constexpr int PACKS = COUNT / SIZE;
    static_assert(PACKS * SIZE == COUNT, "whole packs");
    // A warp's accesses begin where sectors of memory do, a part of a warp's where packs do.
    static constexpr int ALIGNMENT = STEP ? 32 / sizeof(T) : SIZE;
    // Exponentials take the place of the elements, but many of half precision stay two to a register and are computed twice.
    static constexpr bool KEEPS = PER_UNIT == 1 || COUNT <= 16;
    using Held = std::conditional_t<KEEPS, R, Unit<T>>;
    static constexpr int PER_HELD = KEEPS ? 1 : PER_UNIT;

    Held x[COUNT / PER_HELD];
    // Whether maxima are found as the line is read, two elements at a time: of half precision that is kept as numbers.
    static constexpr bool COMPARES_UNITS = KEEPS && PER_UNIT == 2 && COMPARES_PAIRS;
    Unit<T> greatest;
    int64_t start;  // of the first pack, which may lie before the line
    int before;     // elements from there on that lie before the line
    int left;       // elements from there on up to the line's end
    int step;
    uint32_t none;  // 0, as `forget` wants it

    // The line of `len` elements begins at `line`; packs first, first + step, ... of it are this thread's. `y` is the output.
    __device__ __forceinline__ RegisterLine(const T* y, int64_t line, int len, int first, int step) : step(STEP ? STEP : step), none(len >> 31) {
        int own = first * SIZE;
        if (!WHOLE) own -= static_cast<int>(reinterpret_cast<uintptr_t>(y) / sizeof(T) + line) & (ALIGNMENT - 1);
        start = line + own;
        before = WHOLE ? 0 : -own;
        left = len - own;
    }

    __device__ __forceinline__ int place(int k) const { return k * (STEP ? STEP : step) * SIZE; }
    // Whether this whole warp's elements all lie in the line.
    __device__ __forceinline__ bool is_full() const {
        return __all_sync(~0u, before <= 0 && place(PACKS - 1) + SIZE <= left);
    }

    // From the input, of `total` elements, given the output. Of lines `inside` it is known that there is a pack of
    // elements before and behind them.
    template <typename Access>
    __device__ __forceinline__ void load(const Access& access, const T* from, const T* y, int64_t total, bool inside = false) {
        if constexpr (WHOLE) {
            from += start;
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                auto pack = no_pack<T, SIZE>();
                access.load_if(place(k) < left, pack, from + place(k));
                hold(k, pack);
            }
        } else {
            // How many elements before an output's pack the input's begins
            const auto number = [](const T* at) { return reinterpret_cast<uintptr_t>(at) / sizeof(T); };
            const int shift = static_cast<int>(number(from) - number(y)) & (SIZE - 1);
            from += start - shift;
            // A pack of the input is read if any of its elements are of the line and all are of the tensor.
            int earlier = SIZE - 1, later = SIZE - 1;
            if (!inside) {
                const int64_t line = start + before, behind = total - (start + left);
                if (line < SIZE - 1) earlier = static_cast<int>(line);
                if (behind < SIZE - 1) later = static_cast<int>(behind);
            }
            const int lowest = before - earlier + shift, highest = left + later - SIZE + shift;
            const bool first = rank() == 0;
            Pack<T, SIZE> packs[PACKS + 1];
#pragma unroll
            for (int k = 0; k <= PACKS; k++) {
                packs[k] = no_pack<T, SIZE>();
                // Of the pack behind the last, the first thread's is the last thread's.
                const bool wanted = k < PACKS || (first && shift > 0);
                access.load_if(wanted && place(k) >= lowest && place(k) <= highest, packs[k], from + place(k));
            }
            shift_packs(packs, shift);
            if (!is_full()) {
#pragma unroll
                for (int k = 0; k < PACKS; k++) {
                    // What lies further behind the line was not read.
                    const bool at_end = place(k) + SIZE > left && place(k) - shift < left;
                    if (at_end || (k == 0 && before > 0)) packs[k] = part_of(packs[k], k > 0 ? 0 : before, left - place(k));
                }
            }
            // What shares a pack of the input with what is not of the tensor
            if (!inside && (earlier < SIZE - 1 || later < SIZE - 1)) {
#pragma unroll
                for (int k = 0; k < PACKS; k++) {
                    const bool read = place(k) >= lowest && place(k) + (shift > 0 ? SIZE : 0) <= highest;
                    if (read || place(k) >= left) continue;
                    packs[k] = load_part(from + shift + place(k), k > 0 ? 0 : before, left - place(k));
                }
            }
#pragma unroll
            for (int k = 0; k < PACKS; k++) hold(k, packs[k]);
        }
    }

    // Of a line of whole packs of the output from an input that lies otherwise in its 16 bytes, where there is more than a pack
    // of the tensor before and behind it. FULL: each thread has COUNT elements of it.
    template <bool FULL, typename Access>
    __device__ __forceinline__ void load_shifted(const Access& access, const T* from, const T* y) {
        static_assert(WHOLE, "others begin and end within packs");
        const auto number = [](const T* at) { return reinterpret_cast<uintptr_t>(at) / sizeof(T); };
        const int shift = static_cast<int>(number(from) - number(y)) & (SIZE - 1);
        from += start - shift;
        // What lies behind a line's last pack is the next line's first, which threads of the same warp hold, but behind the warp's last line.
        const int group = STEP ? STEP : step;
        const bool last_line = threadIdx.x % 32 >= 32 - group;
        Pack<T, SIZE> packs[PACKS + 1];
#pragma unroll
        for (int k = 0; k <= PACKS; k++) {
            packs[k] = no_pack<T, SIZE>();
            access.load_if((k < PACKS || (last_line && rank() == 0)) && (FULL || place(k) < left + shift), packs[k], from + place(k));
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            // Units behind those that are shifted are not needed.
            if (u * PER_UNIT >= shift) break;
            const Unit<T> next_line = __shfl_down_sync(~0u, packs[0].units[u], group);
            if (!last_line) packs[PACKS].units[u] = next_line;
        }
        shift_packs(packs, shift);
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (!FULL && place(k) >= left) packs[k] = no_pack<T, SIZE>();
            hold(k, packs[k]);
        }
    }

    // The thread's place among those that share what they load
    __device__ __forceinline__ int rank() const { return threadIdx.x & ((STEP ? STEP : step) - 1); }

    // Units at a time, and then one element
    __device__ __forceinline__ void shift_packs(Pack<T, SIZE> (&packs)[PACKS + 1], int shift) const {
#pragma unroll 1
        for (int i = shift / PER_UNIT; i > 0; i--) shift_by_unit(packs, [](Unit<T>, Unit<T> next) { return next; });
        if constexpr (PER_UNIT == 2) {
            if (shift % 2) shift_by_unit(packs, [](Unit<T> own, Unit<T> next) { return halves(own, next); });
        }
    }
    // Puts f(unit, the next one) in the place of each unit; the last one of a pack is followed by the next thread's first.
    template <typename F>
    __device__ __forceinline__ void shift_by_unit(Pack<T, SIZE> (&packs)[PACKS + 1], F f) const {
        const bool first = rank() == 0;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            // Values, not places, to choose from: the packs are to stay in registers.
            Unit<T> given = packs[k].units[0];
            const Unit<T> behind = packs[k + 1].units[0];
            if (first) given = behind;
            const Unit<T> next = __shfl_sync(~0u, given, rank() + 1, STEP ? STEP : step);
#pragma unroll
            for (int u = 0; u < UNITS - 1; u++) packs[k].units[u] = f(packs[k].units[u], packs[k].units[u + 1]);
            packs[k].units[UNITS - 1] = f(packs[k].units[UNITS - 1], next);
        }
        // Of the pack behind, only the first thread's counts, which needs no more than its own.
#pragma unroll
        for (int u = 0; u < UNITS - 1; u++) packs[PACKS].units[u] = f(packs[PACKS].units[u], packs[PACKS].units[u + 1]);
    }
    // The upper half of one unit and the lower of the next
    static __device__ __forceinline__ Unit<T> halves(Unit<T> own, Unit<T> next) {
        const uint32_t both = __byte_perm(bits_of(own), bits_of(next), 0x5432);
        return reinterpret_cast<const Unit<T>&>(both);
    }

    __device__ __forceinline__ void hold(int k, const Pack<T, SIZE>& pack) {
        if constexpr (COMPARES_UNITS) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) greatest = k + u == 0 ? pack.units[0] : greater(greatest, pack.units[u]);
        }
#pragma unroll
        for (int i = 0; i < SIZE / PER_HELD; i++) {
            if constexpr (KEEPS) x[k * SIZE + i] = Element<T>::of_unit(pack.units[i / PER_UNIT], i % PER_UNIT);
            else x[k * (SIZE / PER_HELD) + i] = pack.units[i];
        }
    }
    __device__ __forceinline__ R element(int i) const {
        if constexpr (KEEPS) return x[i];
        else return Element<T>::of_unit(x[i / PER_UNIT], i % PER_UNIT);
    }

    __device__ __forceinline__ R max() const {
        if constexpr (COMPARES_UNITS) return max_of_unit<T>(greatest);
        else if constexpr (KEEPS) return max_of(x);
        else if constexpr (COMPARES_PAIRS) return max_of_unit<T>(max_of(x));
        else return max_of_elements();
    }
    __device__ __forceinline__ R max_of_elements() const {
        R max = element(0);
#pragma unroll
        for (int i = 1; i < COUNT; i++) max = greater(max, element(i));
        return max;
    }

    // Answers the sum of these exponentials, and keeps what Output needs for the result.
    template <typename Output, typename Exponential>
    __device__ __forceinline__ R exponentiate(const Exponential& exponential) {
        constexpr int SUMS = 8;
        // There are no registers for the numbers that the maximum was found of.
        if constexpr (!KEEPS && !COMPARES_PAIRS) {
#pragma unroll
            for (auto& unit : x) forget(unit, none);
        }
        R sums[SUMS];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const R e = exponential(element(i));
            if constexpr (KEEPS && Output::OF_EXPONENTIAL) x[i] = e;
            sums[i % SUMS] = i < SUMS ? e : sums[i % SUMS] + e;
        }
        return pairwise_sum(sums);
    }

    // Stores the result, given the exponentials that were summed.
    template <typename Access, typename Exponential, typename Output>
    __device__ __forceinline__ void store(const Access& access, T* to, const Exponential& exponential, const Output& output) {
        // What is cheap to compute again must not take registers from the loads on.
        if constexpr (!WHOLE) asm volatile("" : "+r"(left), "+r"(before));
        to += start;
        const bool full = !WHOLE && is_full();
        Pack<T, SIZE> last = no_pack<T, SIZE>();  // which the line's end may lie in
        int place_of_last = left;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if constexpr (!KEEPS) {
#pragma unroll
                for (int i = 0; i < UNITS; i++) forget(x[k * UNITS + i], none);
            }
            const auto pack = pack_of<T, SIZE>([&](int i) {
                R kept = element(k * SIZE + i);
                if constexpr (!KEEPS && Output::OF_EXPONENTIAL) kept = exponential(kept);
                return output.of_kept(kept);
            });
            if ((WHOLE || k > 0 || before <= 0) && place(k) + (WHOLE ? 1 : SIZE) <= left) {
                access.store(reinterpret_cast<Pack<T, SIZE>*>(to + place(k)), pack);
            } else if constexpr (!WHOLE) {
                if (k == 0) {
                    if (!full) store_part(to, pack, before, left);
                } else if (!full && place(k) < left) {
                    last = pack;
                    place_of_last = place(k);
                }
            }
        }
        if constexpr (!WHOLE) {
            if (!full && place_of_last < left) store_part(to + place_of_last, last, 0, left - place_of_last);
        }
    }

    // Elements begin..end of a pack that shares its 16 bytes with what is not of the line, or not of the tensor
    static __device__ __forceinline__ void store_part(T* to, const Pack<T, SIZE>& pack, int begin, int end) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int i = u * PER_UNIT;
            if constexpr (PER_UNIT == 1) {
                if (i >= begin && i < end) to[i] = pack.units[u];
            } else {
                const bool low = i >= begin && i < end, high = i + 1 >= begin && i + 1 < end;
                if (low && high) {
                    *reinterpret_cast<Unit<T>*>(to + i) = pack.units[u];
                } else {
                    if (low) to[i] = pack.units[u].x;
                    if (high) to[i + 1] = pack.units[u].y;
                }
            }
        }
    }
    static __device__ __forceinline__ Pack<T, SIZE> load_part(const T* from, int begin, int end) {
        auto pack = no_pack<T, SIZE>();
        if constexpr (PER_UNIT == 1) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                if (i >= begin && i < end) pack.units[i] = from[i];
            }
        } else {
            // One by one, since it is seldom needed, and stands in the code once for each pack.
            auto& words = reinterpret_cast<ulonglong2&>(pack);
#pragma unroll 1
            for (int i = begin > 0 ? begin : 0; i < end && i < SIZE; i++) {
                const int bit = i * 16 % 64;
                const uint64_t element = reinterpret_cast<const uint16_t*>(from)[i], others = ~(uint64_t(0xffff) << bit);
                if (i < SIZE / 2) words.x = (words.x & others) | element << bit;
                else words.y = (words.y & others) | element << bit;
            }
        }
        return pack;
    }
};

// Groups of 2^shift threads up to a warp take a line each.
template <typename T, template <typename> class Output, int COUNT, bool WHOLE>
__device__ __forceinline__ void warp_lines(const T* x, T* y, int64_t lines, int64_t len, int shift, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    const int group = 1 << shift;
    const int64_t line = blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift);
    const auto softmax = [&](auto& held) {
        const R max = warp_group_reduce(held.max(), group, [](R a, R b) { return greater(a, b); });
        // A factor that exponentials have in common their sum has, too. With this, COMPARES_UNITS and FULL 131072 x 32 f16 takes 3.38 us
        // for 3.70, at an offset of one element 4.11 for 4.67.
        constexpr bool RELATIVE = Element<T>::PER_UNIT == 2 && Output<R>::OF_EXPONENTIAL;
        const auto add = [](R a, R b) { return a + b; };
        if constexpr (RELATIVE) {
            const RelativeExponential exponential(part_reference(max), scaling);
            const R sum = warp_group_reduce(held.template exponentiate<Output<R>>(exponential), group, add);
            held.store(StreamingAccess{}, y, exponential, output_of_line<T, Output>(max, sum, scaling));
        } else {
            const ExponentialFor<T, Output<R>> exponential(part_reference(max), scaling);
            const R sum = warp_group_reduce(held.template exponentiate<Output<R>>(exponential), group, add);
            held.store(StreamingAccess{}, y, exponential, Output<R>::of_part(max, {max, sum * unscale<T>()}, unscale<T>(), scaling));
        }
    };
    const bool inside = blockIdx.x > 0 && blockIdx.x + 1 < gridDim.x && len >= 16 / int(sizeof(T));  // The last block may have one line.
#if __CUDA_ARCH__ >= 900
    if constexpr (!WHOLE) {
        // Where only the input lies otherwise, there are no ends to care for: 131072 x 32 f16 4.1 us, as any others 4.5.
        using Packs = RegisterLine<T, COUNT, true, 0>;
        if (inside && int(len) % Packs::SIZE == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0) {
            Packs held(y, line * len, int(len), threadIdx.x & (group - 1), group);
            if (int(len) == COUNT << shift) held.template load_shifted<true>(PlainAccess{}, x, y);
            else held.template load_shifted<false>(PlainAccess{}, x, y);
            softmax(held);
            return;
        }
    }
#endif
    RegisterLine<T, COUNT, WHOLE, 0> held(y, line * len, line < lines ? int(len) : 0, threadIdx.x & (group - 1), group);
    held.load(PlainAccess{}, x, y, lines * len, inside);
    softmax(held);
}

// Long lines of a tensor of up to this many bytes leave the L2 cache to it: 64 x 151936 f32 24.5 us, with plain accesses 26.7.
constexpr int64_t KEPT_BYTES = 48 << 20;

// A block, or a cluster of them, takes a line; each warp a run of it. What the line `ahead` lines on will need is fetched
// into the L2 cache: the registers do not hold enough to keep the memory busy while a line waits for its last warp.
template <typename T, template <typename> class Output, int COUNT, bool WHOLE, typename Exchange>
__device__ __forceinline__ void block_lines(bool streaming, const T* x, T* y, int64_t lines, int64_t len, int ahead, Scaling<Real<T>> scaling,
                                            Exchange exchange) {
    using R = Real<T>;
    using Line = RegisterLine<T, COUNT, WHOLE, 32>;
    const int64_t line = exchange.line();
    Line held(y, line * len, int(len), exchange.warp() * Line::PACKS * 32 + threadIdx.x % 32, 32);
    const EitherAccess access(streaming);
    held.load(access, x, y, lines * len);
    if (ahead > 0 && line + ahead < lines && threadIdx.x % 32 == 0) {
        prefetch(x + held.start + ahead * len, held.left < 32 * COUNT ? held.left : 32 * COUNT);
    }
    // Each warp's sum is relative to its own maximum, so that one exchange is enough.
    const R max = warp_group_reduce(held.max(), 32, [](R a, R b) { return greater(a, b); });
    const ExponentialFor<T, Output<R>> exponential(part_reference(max), scaling);
    const R sum = warp_group_reduce(held.template exponentiate<Output<R>>(exponential), 32, [](R a, R b) { return a + b; });
    const auto whole = exchange.merge({max, sum * unscale<T>()}, scaling.scale);
    const auto output = Output<R>::of_part(max, whole, unscale<T>(), scaling);
    if constexpr (WHOLE || Exchange::CLUSTER) held.store(access, y, exponential, output);
    else held.store(StreamingAccess{}, y, exponential, output);
}

// Named kernels: NAME_COUNT_dtype. BLOCKS: that a multiprocessor shall hold of THREADS threads each, which bounds the registers.
// Warps in blocks of more than 128 threads fill the GPU once, so that the next kernel is set up early.
#define WARP_KERNEL(name, dtype, T, Output, COUNT, WHOLE, THREADS, BLOCKS)                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                       \
        name##_##COUNT##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int shift, Scaling<Real<T>> scaling) {   \
        wait_for_kernel_before(THREADS > 128 && blockDim.x == THREADS);                                                 \
        warp_lines<T, Output, COUNT, WHOLE>(x, y, lines, len, shift, scaling);                                          \
    }
#define BLOCK_KERNEL(name, dtype, T, Output, COUNT, WHOLE, THREADS, BLOCKS)                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                       \
        name##_##COUNT##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int ahead, Scaling<Real<T>> scaling) {   \
        __shared__ Normalizer<Real<T>> parts[MAX_WARPS];                                                                \
        wait_for_kernel_before();                                                                                       \
        const BlockExchange<Real<T>> exchange{parts};                                                                   \
        block_lines<T, Output, COUNT, WHOLE>(ahead > 0, x, y, lines, len, ahead, scaling, exchange);                    \
    }
// 64 x 151936 f32, of 512 blocks, takes 23.3 us, where they let the next kernel be set up 23.9.
#define CLUSTER_KERNEL(name, dtype, T, Output, COUNT, WHOLE, THREADS, BLOCKS)                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                       \
        name##_##COUNT##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int ahead, Scaling<Real<T>> scaling) {   \
        __shared__ Normalizer<Real<T>> parts[MAX_CLUSTER * THREADS / 32];                                               \
        __shared__ ArrivalBarrier arrived;                                                                              \
        ClusterExchange<Real<T>>::begin(arrived);                                                                       \
        wait_for_kernel_before(lines == 1, 512);                                                                        \
        const bool streaming = lines * len <= KEPT_BYTES / int64_t(sizeof(T));                                          \
        const ClusterExchange<Real<T>> exchange{parts, arrived};                                                        \
        block_lines<T, Output, COUNT, WHOLE>(streaming, x, y, lines, len, ahead, scaling, exchange);                    \
    }
