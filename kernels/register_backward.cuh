// The gradient of the input from the result y and its gradient g: y * (g - sum of g * y), or for log-softmax
// g - exp(y) * sum of g. Both lines are in registers, so that they are read once: 3/2x the bytes of a copy, which is the
// floor. All three tensors begin at multiples of 16 bytes.
#pragma once
#include "exchange.cuh"
#include "pack.cuh"
#include "schedule.cuh"

// COUNT elements of each for a thread: packs first, first + step, ... STEP is the step where it is known beforehand, or 0.
// WHOLE: lines are whole packs. Otherwise what is before their first sector of memory, and behind their last pack, is an element each for threads of
// the first warp.
template <typename T, int COUNT, int STEP, bool WHOLE>
struct RegisterGradient {
    using R = Real<T>;
    static constexpr int PER_UNIT = Element<T>::PER_UNIT, SIZE = 16 / sizeof(T), PACKS = COUNT / SIZE, SECTOR = 32 / sizeof(T);
    using P = Pack<T, SIZE>;

    P y[PACKS], g[PACKS];
    int64_t start;
    int left, step;  // elements of the packs from `start` on; packs
    int64_t edge;    // the element that this thread has beside packs, or -1
    R edge_y = 0, edge_g = 0;

    __device__ __forceinline__ RegisterGradient(const T* y, int64_t line, int len, int thread, int first, int step)
        : start(line * len), left(len), step(step), edge(-1) {
        if constexpr (!WHOLE) {
            const int before = -static_cast<int>(reinterpret_cast<uintptr_t>(y + start) / sizeof(T)) & (SECTOR - 1);
            const int head = before < len ? before : len, tail = (len - head) % SIZE;
            edge = edge_of_line(thread, head, tail, len);
            if (edge >= 0) edge += start;
            start += head;
            left -= head + tail;
        }
        start += first * SIZE;
        left -= first * SIZE;
    }

    __device__ __forceinline__ int place(int k) const { return k * (STEP ? STEP : step) * SIZE; }

    __device__ __forceinline__ void load(const T* from_y, const T* from_g) {
        const auto load = [&](const T* from, P (&to)[PACKS]) {
#pragma unroll
            for (int k = 0; k < PACKS; k++) {
                const R zeros[PER_UNIT] = {};
#pragma unroll
                for (auto& unit : to[k].units) unit = Element<T>::to_unit(zeros);
                ::load_if(place(k) < left, to[k], from + place(k));
            }
        };
        load(from_y + start, y);
        load(from_g + start, g);
        if (!WHOLE && edge >= 0) {
            edge_y = Element<T>::read(from_y[edge]);
            edge_g = Element<T>::read(from_g[edge]);
        }
    }

    static __device__ __forceinline__ R element(const P& pack, int i) {
        return Element<T>::of_unit(pack.units[i / PER_UNIT], i % PER_UNIT);
    }

    // The sum of g * y, or of g.
    __device__ __forceinline__ R sum(bool log) const {
        constexpr int SUMS = 4;
        R sums[SUMS] = {};
        if constexpr (!WHOLE) sums[0] = log ? edge_g : edge_g * edge_y;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const R own = element(g[i / SIZE], i % SIZE);
            sums[i % SUMS] = log ? sums[i % SUMS] + own : fma(own, element(y[i / SIZE], i % SIZE), sums[i % SUMS]);
        }
        return pairwise_sum(sums);
    }

    __device__ __forceinline__ void store(T* to, R sum, bool log) const {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const auto pack = pack_of<T, SIZE>([&](int i) { return gradient_of<T>(element(y[k], i), element(g[k], i), sum, log); });
            if (place(k) < left) ::store(reinterpret_cast<P*>(to + start + place(k)), pack);
        }
        if (!WHOLE && edge >= 0) to[edge] = Element<T>::write(gradient_of<T>(edge_y, edge_g, sum, log));
    }
};

template <typename T, int COUNT>
__device__ __forceinline__ void backward_warp_lines(const T* y, const T* g, T* dx, int64_t lines, int64_t len, int shift, bool log) {
    using R = Real<T>;
    const WarpGroup<R> group{shift};
    const int64_t line = group.line();
    RegisterGradient<T, COUNT, 0, true> held(y, line, line < lines ? int(len) : 0, group.rank(), group.rank(), group.size());
    held.load(y, g);
    held.store(dx, group.reduce(held.sum(log), [](R a, R b) { return a + b; }), log);
}

template <typename T, int COUNT, bool WHOLE, typename Exchange>
__device__ __forceinline__ void backward_block_lines(const T* y, const T* g, T* dx, int64_t len, bool log, Exchange exchange) {
    using R = Real<T>;
    using Line = RegisterGradient<T, COUNT, 32, WHOLE>;
    const int warp = exchange.warp(), lane = threadIdx.x % 32;
    Line held(y, exchange.line(), int(len), warp * 32 + lane, warp * Line::PACKS * 32 + lane, 32);
    held.load(y, g);
    const R part = warp_group_reduce(held.sum(log), 32, [](R a, R b) { return a + b; });
    // Sums relative to the same maximum
    held.store(dx, exchange.merge({R(0), part}).sum, log);
}

// Named kernels: NAME_COUNT_dtype. BLOCKS: that a multiprocessor shall hold of 512 threads each, which bounds the registers.
#define BACKWARD_WARP_KERNEL(dtype, T, COUNT)                                            \
    extern "C" __global__ void __launch_bounds__(128) backward_warp_##COUNT##_##dtype(   \
        const T* y, const T* g, T* dx, int64_t lines, int64_t len, int shift, int log) { \
        backward_warp_lines<T, COUNT>(y, g, dx, lines, len, shift, log);                 \
    }
#define BACKWARD_BLOCK_KERNEL(name, dtype, T, COUNT, WHOLE, BLOCKS)                               \
    extern "C" __global__ void __launch_bounds__(512, BLOCKS)                                     \
        name##_##COUNT##_##dtype(const T* y, const T* g, T* dx, int64_t len, int log) {           \
        __shared__ Normalizer<Real<T>> parts[MAX_WARPS];                                          \
        backward_block_lines<T, COUNT, WHOLE>(y, g, dx, len, log, BlockExchange<Real<T>>{parts}); \
    }
#define BACKWARD_CLUSTER_KERNEL(name, dtype, T, COUNT, WHOLE, BLOCKS)                                        \
    extern "C" __global__ void __launch_bounds__(512, BLOCKS)                                                \
        name##_##COUNT##_##dtype(const T* y, const T* g, T* dx, int64_t len, int log) {                      \
        __shared__ Normalizer<Real<T>> parts[MAX_CLUSTER * 512 / 32];                                        \
        __shared__ ArrivalBarrier arrived;                                                                   \
        ClusterExchange<Real<T>>::begin(arrived);                                                            \
        backward_block_lines<T, COUNT, WHOLE>(y, g, dx, len, log, ClusterExchange<Real<T>>{parts, arrived}); \
    }
// Lines of whole packs, and any others
#define BACKWARD_KERNELS(KERNEL, family, dtype, T, COUNT, BLOCKS) \
    KERNEL(family, dtype, T, COUNT, true, BLOCKS)                 \
    KERNEL(family##_any, dtype, T, COUNT, false, BLOCKS)
