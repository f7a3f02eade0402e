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

    LineGradient() = default;
    __device__ __forceinline__ LineGradient(int64_t line, int64_t lines, int64_t len, const int64_t* targets, int64_t ignore,
                                            const R* weights, const R* statistics, const void* gradients, int given)
        : weights(weights), target(targets[line]), ignored(ignores(ignore, target)) {
        if (ignored) return;
        if (given == 0) {
            // The gradient of the log-sum-exp is the only one, as it is of the logits' dtype.
            of_p = Element<T>::read(static_cast<const T*>(gradients)[line]);
        } else {
            const R* of_statistics = static_cast<const R*>(gradients);
            of_target = of_statistics[OF_LOG_P * lines + line];
            of_p = -of_target;
            if (given == MOST_GRADIENTS) {
                of_weight = of_statistics[OF_SMOOTH * lines + line];
                of_p += of_statistics[OF_LOG_SUM_EXP * lines + line];
                if (of_weight != R(0)) of_p -= statistics[SUM_OF_WEIGHTS * lines + line] * of_weight;
            }
        }
        max = statistics[MAX * lines + line];
        log_sum = statistics[LOG_SUM * lines + line];
        if (target < 0 || target >= len) of_p = negative_infinity<R>() - negative_infinity<R>();
        of_p *= unscale<T>();
    }

    // Whether the target is one of `count` elements from element j on.
    __device__ __forceinline__ bool hits(int64_t j, int64_t count) const { return !ignored && target >= j && target - j < count; }

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
        const int64_t *targets, int64_t ignore, const Real<T> *weights, const Real<T> *statistics, const void *gradients, int given

// A block takes a chunk of a line, `parameter` to a line, or groups of 2^parameter threads take a short line each: PACKS packs of 16 bytes to a
// thread. Packs are the gradient's; where the logits' do not lie as they do, those are read by the element. (What all of a block has in common takes
// fewer registers.)
template <typename T, bool BLOCKS>
__device__ __forceinline__ void rows(PARAMETERS(T)) {
    using R = Real<T>;
    using Place = std::conditional_t<BLOCKS, int64_t, int>;  // in a line
    constexpr int SIZE = 16 / sizeof(T), PER_UNIT = Element<T>::PER_UNIT, UNITS = SIZE / PER_UNIT, PACKS = 4;
    const unsigned chunks = BLOCKS ? static_cast<unsigned>(parameter) : 1, chunk = BLOCKS ? blockIdx.x % chunks : 0;
    const int shift = static_cast<int>(parameter), step = BLOCKS ? blockDim.x : 1 << shift;
    const int thread = BLOCKS ? threadIdx.x : threadIdx.x & (step - 1);
    const int64_t line = BLOCKS ? blockIdx.x / chunks : blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift);
    if (!BLOCKS && line >= lines) return;
    const LineGradient<T> gradient(line, lines, len, targets, ignore, weights, statistics, gradients, given);
    x += line * len;
    dx += line * len;
    const int before = -static_cast<int>(reinterpret_cast<uintptr_t>(dx) / sizeof(T)) & (SIZE - 1);
    const int head = before < len ? before : static_cast<int>(len);
    const Place packs = static_cast<Place>((len - head) / SIZE);
    const int tail = static_cast<int>(len - head - packs * SIZE);
    const bool aligned = reinterpret_cast<uintptr_t>(x + head) % 16 == 0;
    const Place from = chunk * Place(PACKS * step) + thread;
    Pack<T, SIZE> held[PACKS] = {};
    if (!gradient.ignored) {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const Place pack = from + k * step;
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
        const Place pack = from + k * step, j = head + pack * SIZE;
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
#pragma unroll 1
    for (Place pack = from; pack < from + PACKS * step && pack < packs; pack += step) {
        if (gradient.hits(head + pack * SIZE, SIZE)) dx[gradient.target] = gradient.of(x[gradient.target], gradient.target);
    }
    // The first chunk sees to what lies before and after the packs.
    if (chunk > 0) return;
#pragma unroll 1
    for (int i = thread; i < head + tail; i += step) {
        const int64_t j = i < head ? i : len - tail + i - head;
        dx[j] = gradient.of(x[j], j);
    }
}

// Groups of 2^parameter threads up to a warp take a line each.
template <typename T>
__device__ __forceinline__ void short_rows(PARAMETERS(T)) {
    const int shift = static_cast<int>(parameter), group = 1 << shift;
    const int64_t line = blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift);
    if (line >= lines) return;
    const LineGradient<T> gradient(line, lines, len, targets, ignore, weights, statistics, gradients, given);
    x += line * len;
    dx += line * len;
#pragma unroll 4
    for (int j = threadIdx.x & (group - 1); j < len; j += group) {
        dx[j] = gradient.of(x[j], j);
    }
}

// Groups of threads, of the shape that the parameter says, take lines that lie side by side in narrow rows. The grid's second dimension shares out
// the rows.
template <typename T>
__device__ __forceinline__ void narrow_columns(PARAMETERS(T)) {
    constexpr int TILE = 4;
    const LineGroup group(groups, len, inner, static_cast<int>(parameter));
    group.each([&](int64_t number, const StridedLine& whole) {
        if (whole.len == 0) return;
        const LineGradient<T> gradient(number, lines, len, targets, ignore, weights, statistics, gradients, given);
        const StridedLine line = whole.of_grid();
        line.each_first<TILE>(len, [&](int64_t from) {
            T tile[TILE];
            const int left = line.left(from, len);
            line.load(tile, x + line.start, inner, from, left);
            line.store<TILE>(dx + line.start, inner, from, left, [&](int k) { return gradient.of(tile[k], from + k * line.step); });
        });
    });
}

// The same where rows are wide: a thread takes COUNT neighbouring lines, or what rows of them the grid's second dimension leaves it.
template <typename T, int COUNT>
__device__ __forceinline__ void columns(PARAMETERS(T)) {
    using R = Real<T>;
    using Lines = SideBySide<T, COUNT>;
    using Word = typename Lines::Word;
    constexpr int TILE = StridedLine::TILE;
    const int64_t words = inner / COUNT, number = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * COUNT;
    if (number >= lines) return;
    const int64_t start = quotient(number, inner) * (len - 1) * words + number / COUNT;
    LineGradient<T> of[COUNT];
    int target[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        of[i] = LineGradient<T>(number + i, lines, len, targets, ignore, weights, statistics, gradients, given);
        target[i] = of[i].hits(0, len) ? static_cast<int>(of[i].target) : -1;
    }
    const StridedLine line{start, inner, 0, 1, len};
#pragma unroll 1
    for (int64_t from = blockIdx.y * TILE; from < len; from += gridDim.y * TILE) {
        const int left = line.left(from, len);
        Word tile[TILE];
        line.load(tile, reinterpret_cast<const Word*>(x) + start, words, from, left);
        line.store<TILE>(reinterpret_cast<Word*>(dx) + start, words, from, left, [&](int k) {
            const int j = static_cast<int>(from) + k;
            R results[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const R others = of[i].of_other(of[i].ignored ? R(0) : Lines::read(tile[k], i), j);
                results[i] = j == target[i] ? others + of[i].of_target : others;
            }
            return Lines::write(results);
        });
    }
}

#define KERNEL(name, body, dtype, T, THREADS)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_##dtype(PARAMETERS(T)) {                          \
        wait_for_kernel_before();                                                                                  \
        body(x, dx, lines, len, inner, groups, parameter, targets, ignore, weights, statistics, gradients, given); \
    }
#define KERNELS(dtype, T)                                                              \
    KERNEL(loss_backward_rows, (rows<T, true>), dtype, T, 256)                         \
    KERNEL(loss_backward_groups, (rows<T, false>), dtype, T, 128)                      \
    KERNEL(loss_backward_short_rows, short_rows<T>, dtype, T, 128)                     \
    KERNEL(loss_backward_narrow_columns, narrow_columns<T>, dtype, T, GROUP_THREADS)   \
    KERNEL(loss_backward_columns, (columns<T, 1>), dtype, T, 128)
#define KERNELS_OF_PAIRS(dtype, T) KERNEL(loss_backward_columns_pairs, (columns<T, 2>), dtype, T, 128)
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS_OF_PAIRS)
