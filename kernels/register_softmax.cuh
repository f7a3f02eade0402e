// Softmax with the line in registers: each element is read once and written once, so the ceiling is a copy. A group of
// threads takes a line, up to PACKS packs of 16 bytes each: a part of a warp or a warp (several lines to a block), or
// the whole block. Any length and any start offset: packs are those of the output, and what of them lies outside the line
// is masked.
#pragma once
#include "pack.cuh"
#include "reduce.cuh"
#include "schedule.cuh"

// The elements of one line that one thread holds: packs thread, thread + threads, ... of those that the line touches.
// WHOLE: lines are whole packs, and the input is aligned as the output is.
template <typename T, int PACKS, bool WHOLE>
struct RegisterLine {
    using R = Real<T>;
    static constexpr int SIZE = Pack<T>::SIZE;
    static constexpr int COUNT = PACKS * SIZE;

    R x[COUNT];
    int64_t start;   // the line's first element
    int len;         // 0 for a thread without a line
    int own, step;   // where this thread's first pack lies in the line (before it, if negative), and how far the next

    __device__ __forceinline__ RegisterLine(int64_t start, int len, int thread, int threads)
        : start(start), len(len), own(thread * SIZE - (WHOLE ? 0 : int(start % SIZE))), step(threads * SIZE) {}

    __device__ __forceinline__ int place(int k) const { return own + k * step; }
    // Whether the whole of a pack lies in the line.
    __device__ __forceinline__ bool inside(int place) const {
        return WHOLE ? place < len : place >= 0 && place <= len - SIZE;
    }

    // Calls whole(k, place, its x) for packs wholly in the line, and takes edge(place) for the single elements of those that
    // are so in part. The x of what is not in the line are -inf.
    template <typename Whole, typename Edge>
    __device__ __forceinline__ void fill(Whole whole, Edge edge) {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            R* at = x + k * SIZE;
            if (inside(place(k))) {
                whole(k, place(k), at);
            } else {
#pragma unroll
                for (int i = 0; i < SIZE; i++) {
                    at[i] = negative_infinity<R>();
                    if (!WHOLE && unsigned(place(k) + i) < unsigned(len)) at[i] = edge(place(k) + i);
                }
            }
        }
    }

    __device__ __forceinline__ void load(const Input<T>& input) {
        const T* line = input.start + start;
        const int by = WHOLE ? 0 : input.shift();
        fill([&](int, int place, R* at) { widen(input.load(line + place, by), at); },
             [&](int place) { return Element<T>::read(line[place]); });
    }

    __device__ __forceinline__ void store(T* y) const {
        T* line = y + start;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const R* at = x + k * SIZE;
            if (inside(place(k))) {
                store_streaming(reinterpret_cast<Pack<T>*>(line + place(k)), narrow<T>(at));
            } else if (!WHOLE) {
#pragma unroll
                for (int i = 0; i < SIZE; i++) {
                    if (unsigned(place(k) + i) < unsigned(len)) line[place(k) + i] = Element<T>::write(at[i]);
                }
            }
        }
    }

    __device__ __forceinline__ R max() const { return max_of(x); }

    // Turns x into what Output keeps of it; answers the sum of exp(x - reference) times EXP_SCALE.
    template <typename Output>
    __device__ __forceinline__ R exponentiate(R reference) {
        R sums[SIZE];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const R shifted = x[i] - reference;
            const R e = Element<T>::exponential(shifted);
            x[i] = Output::keep(shifted, e);
            sums[i % SIZE] = i < SIZE ? e : sums[i % SIZE] + e;
        }
        return pairwise_sum(sums);
    }

    template <typename Output>
    __device__ __forceinline__ void apply(const Output& output) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = output.of_kept(x[i]);
    }
};

template <typename T, template <typename> class Output, int PACKS, bool WHOLE>
__device__ __forceinline__ void register_lines(const T* x, T* y, int64_t lines, int64_t len, int group) {
    using R = Real<T>;
    const Input<T> input{x, lines * len};
    const int per_block = blockDim.x / group, thread = threadIdx.x % group;
    for (int64_t first = blockIdx.x * int64_t(per_block); first < lines; first += gridDim.x * int64_t(per_block)) {
        const int64_t line = first + threadIdx.x / group;
        RegisterLine<T, PACKS, WHOLE> held(line * len, line < lines ? int(len) : 0, thread, group);
        held.load(input);
        const R max = group_max(held.max(), group);
        const R sum = group_sum(held.template exponentiate<Output<R>>(max), group);
        held.apply(Output<R>::of_part(max, {max, sum * unscale<T>()}, unscale<T>()));
        held.store(y);
    }
}

#define REGISTER_KERNEL(name, dtype, T, Output, PACKS, WHOLE)                                               \
    extern "C" __global__ void __launch_bounds__(PACKS * Pack<T>::SIZE * sizeof(Real<T>) > 64 ? 512 : 1024) \
        name##_##PACKS##_##dtype(const T* x, T* y, int64_t lines, int64_t len, int group) {                 \
        register_lines<T, Output, PACKS, WHOLE>(x, y, lines, len, group);                                   \
    }
#define REGISTER_KERNELS(name, log_name, dtype, T, WHOLE)                             \
    IF_PROBABILITY(REGISTER_KERNEL(name, dtype, T, Probability, 1, WHOLE))            \
    IF_PROBABILITY(REGISTER_KERNEL(name, dtype, T, Probability, 2, WHOLE))            \
    IF_PROBABILITY(REGISTER_KERNEL(name, dtype, T, Probability, 4, WHOLE))            \
    IF_LOG_PROBABILITY(REGISTER_KERNEL(log_name, dtype, T, LogProbability, 1, WHOLE)) \
    IF_LOG_PROBABILITY(REGISTER_KERNEL(log_name, dtype, T, LogProbability, 2, WHOLE)) \
    IF_LOG_PROBABILITY(REGISTER_KERNEL(log_name, dtype, T, LogProbability, 4, WHOLE))
// Eight packs of half precision would not fit the registers.
#define WIDE_REGISTER_KERNELS(name, log_name, dtype, T, WHOLE)             \
    IF_PROBABILITY(REGISTER_KERNEL(name, dtype, T, Probability, 8, WHOLE)) \
    IF_LOG_PROBABILITY(REGISTER_KERNEL(log_name, dtype, T, LogProbability, 8, WHOLE))
