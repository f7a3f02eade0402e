// The gradient of the logits from those of a line's statistics (statistics.cuh): every element is read once and written once,
// as a copy does, with one exponential each. A line whose target is ignored is written only.
#include "line_group.cuh"
#include "pack.cuh"
#include "start.cuh"
#include "targets.cuh"

// With p = exp(x - maximum - ln sum): of_p * p + of_weight * weight, and of_target more for the target. All 0 where the target is
// ignored.
template <typename T>
struct LineGradient {
    using R = Real<T>;
    const R* weights;  // of each class, or null: 1
    int64_t target;
    bool ignored;
    R max = 0, log_sum = 0, of_p = 0, of_weight = 0, of_target = 0;
    __device__ __forceinline__ LineGradient(int64_t line, int64_t lines, int64_t len, const int64_t* targets, int64_t ignore,
                                            const R* weights, const R* statistics, const void* gradients, bool alone)
        : weights(weights), target(targets[line]), ignored(ignores(ignore, target)) {
        if (ignored) return;
        const R sum_of_weights = statistics[SUM_OF_WEIGHTS * lines + line];
        R of_log_sum_exp;
        if (alone) {
            // The gradient of the log-sum-exp is the only one, as it is of the logits' dtype.
            of_log_sum_exp = Element<T>::read(static_cast<const T*>(gradients)[line]);
        } else {
            const R* of_statistics = static_cast<const R*>(gradients);
            of_log_sum_exp = of_statistics[LOG_SUM_EXP * lines + line];
            of_target = of_statistics[LOG_P * lines + line];
            of_weight = of_statistics[SMOOTH * lines + line];
        }
        max = statistics[MAX * lines + line];
        log_sum = statistics[LOG_SUM * lines + line];
        of_p = of_log_sum_exp - of_target - sum_of_weights * of_weight;
        if (target < 0 || target >= len) of_p = negative_infinity<R>() - negative_infinity<R>();
        of_p *= unscale<T>();
    }

    // Whether the target is one of `count` elements from element j on.
    __device__ __forceinline__ bool hits(int64_t j, int count) const { return !ignored && target >= j && target - j < count; }

    // Of element j but for what the target has more.
    __device__ __forceinline__ R of_other(R x, int64_t j) const {
        const R gradient = of_p * Element<T>::exponential((x - max) - log_sum);
        if (of_weight == R(0)) return gradient;
        return gradient + (weights ? of_weight * weights[j] : of_weight);
    }

    // Of element j, given what was read where it lies
    __device__ __forceinline__ R of_read(R x, int64_t j) const {
        const R gradient = of_other(ignored ? R(0) : x, j);
        return hits(j, 1) ? gradient + of_target : gradient;
    }
    __device__ __forceinline__ T of(const T& x, int64_t j) const {
        return Element<T>::write(of_read(ignored ? R(0) : Element<T>::read(x), j));
    }
};

#define PARAMETERS(T)                                                                                                      \
    const T *x, T *dx, int64_t lines, int64_t len, int64_t inner, int64_t groups, int64_t parameter,                       \
        const int64_t *targets, int64_t ignore, const Real<T> *weights, const Real<T> *statistics, const void *gradients, int alone

// A block takes a chunk of a line, `chunks` to a line: PACKS packs of 16 bytes to a thread. Packs are the gradient's; where
// the logits' do not lie as they do, those are read by the element.
template <typename T>
__device__ __forceinline__ void rows(PARAMETERS(T)) {
    using R = Real<T>;
    constexpr int SIZE = 16 / sizeof(T), PER_UNIT = Element<T>::PER_UNIT, UNITS = SIZE / PER_UNIT, PACKS = 4;
    const unsigned chunks = static_cast<unsigned>(parameter), chunk = blockIdx.x % chunks;
    const int64_t line = blockIdx.x / chunks;
    const LineGradient<T> gradient(line, lines, len, targets, ignore, weights, statistics, gradients, alone);
    x += line * len;
    dx += line * len;
    const int before = -static_cast<int>(reinterpret_cast<uintptr_t>(dx) / sizeof(T)) & (SIZE - 1);
    const int head = before < len ? before : static_cast<int>(len);
    const int64_t packs = (len - head) / SIZE;
    const int tail = static_cast<int>(len - head - packs * SIZE);
    const bool aligned = reinterpret_cast<uintptr_t>(x + head) % 16 == 0;
    const int64_t from = chunk * int64_t(PACKS * blockDim.x) + threadIdx.x;
    Pack<T, SIZE> held[PACKS] = {};
    if (!gradient.ignored) {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const int64_t pack = from + k * int(blockDim.x);
            if (pack >= packs) continue;
            const T* at = x + head + pack * SIZE;
            if (aligned) {
                held[k] = load(reinterpret_cast<const Pack<T, SIZE>*>(at));
            } else {
                alignas(16) T elements[SIZE];
#pragma unroll
                for (int i = 0; i < SIZE; i++) elements[i] = at[i];
                held[k] = reinterpret_cast<const Pack<T, SIZE>&>(elements);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        const int64_t pack = from + k * int(blockDim.x), j = head + pack * SIZE;
        if (pack >= packs) continue;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            R result[PER_UNIT];
#pragma unroll
            for (int i = 0; i < PER_UNIT; i++) {
                result[i] = gradient.of_other(Element<T>::of_unit(held[k].units[u], i), j + u * PER_UNIT + i);
            }
            held[k].units[u] = Element<T>::to_unit(result);
        }
        store(reinterpret_cast<Pack<T, SIZE>*>(dx + head) + pack, held[k]);
    }
    // The thread that wrote the target's pack writes the target again.
    const int thread = threadIdx.x;
#pragma unroll 1
    for (int64_t pack = from; pack < from + PACKS * int(blockDim.x) && pack < packs; pack += blockDim.x) {
        if (gradient.hits(head + pack * SIZE, SIZE)) dx[gradient.target] = gradient.of(x[gradient.target], gradient.target);
    }
    // The first chunk sees to what lies before and after the packs, an element to a thread.
    if (chunk == 0 && (thread < head || (thread >= 16 && thread < 16 + tail))) {
        const int64_t j = thread < head ? thread : len - tail + thread - 16;
        dx[j] = gradient.of(x[j], j);
    }
}

// Groups of 2^parameter threads up to a warp take a line each.
template <typename T>
__device__ __forceinline__ void short_rows(PARAMETERS(T)) {
    const int shift = static_cast<int>(parameter), group = 1 << shift;
    const int64_t line = blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift);
    if (line >= lines) return;
    const LineGradient<T> gradient(line, lines, len, targets, ignore, weights, statistics, gradients, alone);
    x += line * len;
    dx += line * len;
#pragma unroll 4
    for (int j = threadIdx.x & (group - 1); j < len; j += group) {
        dx[j] = gradient.of(x[j], j);
    }
}

// Groups of threads, of the shape that the parameter says, take lines that lie side by side. The grid's second dimension shares out the rows.
template <typename T, int COUNT>
__device__ __forceinline__ void columns(PARAMETERS(T)) {
    using R = Real<T>;
    using Lines = SideBySide<T, COUNT>;
    using Word = typename Lines::Word;
    constexpr int TILE = 4;
    const int64_t words = inner / COUNT;
    const LineGroup group(groups, len, words, static_cast<int>(parameter));
    group.each([&](int64_t number, const StridedLine& whole) {
        if (whole.len == 0) return;
        const auto of_line = [&](int i) {
            return LineGradient<T>(number * COUNT + i, lines, len, targets, ignore, weights, statistics, gradients, alone);
        };
        const LineGradient<T> first = of_line(0), last = of_line(COUNT - 1);
        const StridedLine line = whole.of_grid();
        line.each_first<TILE>(len, [&](int64_t from) {
            Word tile[TILE];
            const int left = line.left(from, len);
            line.load(tile, reinterpret_cast<const Word*>(x) + line.start, words, from, left);
            line.store<TILE>(reinterpret_cast<Word*>(dx) + line.start, words, from, left, [&](int k) {
                const int64_t j = from + k * line.step;
                // A loop over both would take 45 registers for 40 of one line, and so a block from each multiprocessor.
                if constexpr (COUNT == 1) {
                    return first.of(tile[k], j);
                } else {
                    const R results[COUNT] = {first.of_read(Lines::read(tile[k], 0), j), last.of_read(Lines::read(tile[k], 1), j)};
                    return Lines::write(results);
                }
            });
        });
    });
}

#define KERNEL(name, body, dtype, T, THREADS)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_##dtype(PARAMETERS(T)) {              \
        wait_for_kernel_before();                                                                      \
        body(x, dx, lines, len, inner, groups, parameter, targets, ignore, weights, statistics, gradients, alone); \
    }
#define KERNELS(dtype, T)                                                  \
    KERNEL(loss_backward_rows, rows<T>, dtype, T, 256)                     \
    KERNEL(loss_backward_short_rows, short_rows<T>, dtype, T, 128)         \
    KERNEL(loss_backward_columns, (columns<T, 1>), dtype, T, GROUP_THREADS)
#define KERNELS_OF_PAIRS(dtype, T) KERNEL(loss_backward_columns_pairs, (columns<T, 2>), dtype, T, GROUP_THREADS)
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS_OF_PAIRS)
