// The kernels of a schedule that gives each thread a line: `columns` for lines that lie side by side (inner > 1), where
// neighbouring threads read neighbouring addresses, and `rows` for contiguous lines, staged through shared memory; of
// `short_rows` it holds all at once, so that they are read once.
#pragma once
#include "schedule.cuh"

constexpr int THREADS = 128;

template <typename T, template <typename> class Schedule>
__device__ __forceinline__ void columns(const T* x, T* y, int64_t lines, int64_t len, int64_t inner, bool log, Scaling<Real<T>> scaling) {
    for (int64_t line = blockIdx.x * int64_t(THREADS) + threadIdx.x; line < lines; line += gridDim.x * int64_t(THREADS)) {
        DirectLogits<T> logits{StridedLine::of_thread(line, len, inner), x, y, scaling};
        map_output(logits, Schedule<DirectLogits<T>>::state(logits), log);
    }
}

template <typename T, template <typename> class Schedule>
__device__ __forceinline__ void rows(const T* x, T* y, int64_t lines, int64_t len, bool log, Scaling<Real<T>> scaling) {
    using Logits = StagedLogits<T>;
    static_assert(Logits::LINES == THREADS, "a thread per line");
    __shared__ Real<T> shared[Logits::LINES * Logits::PITCH];
    for (int64_t line = blockIdx.x * int64_t(THREADS); line < lines; line += gridDim.x * int64_t(THREADS)) {
        const int here = static_cast<int>(lines - line < THREADS ? lines - line : THREADS);
        Logits logits{x + line * len, y + line * len, len, here, scaling, shared, -1};
        map_output(logits, Schedule<Logits>::state(logits), log);
    }
}

// Shared memory: as many elements as the block has, at the lines' pitch.
template <typename T, template <typename> class Schedule>
__device__ __forceinline__ void short_rows(const T* x, T* y, int64_t lines, int64_t len, bool log, Scaling<Real<T>> scaling) {
    using Logits = WarpLogits<T>;
    using R = Real<T>;
    extern __shared__ uint4 shared[];
    const int64_t line = blockIdx.x * int64_t(THREADS) + threadIdx.x / 32 * 32;
    if (line >= lines) return;
    const int here = static_cast<int>(lines - line < 32 ? lines - line : 32), pitch = Logits::pitch_of(int(len));
    Logits logits{x + line * len, y + line * len, int(len), here, scaling, pitch, reinterpret_cast<R*>(shared) + threadIdx.x / 32 * 32 * pitch};
    logits.stage();
    map_output(logits, Schedule<Logits>::state(logits), log);
}

// `log`: the logarithms of the probabilities.
#define THREAD_PER_LINE(name, dtype, T, Schedule)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                         \
        name##_columns_##dtype(const T* x, T* y, int64_t lines, int64_t len, int64_t inner, int log, Scaling<Real<T>> scaling) { \
        columns<T, Schedule>(x, y, lines, len, inner, log, scaling);                                                              \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                         \
        name##_rows_##dtype(const T* x, T* y, int64_t lines, int64_t len, int log, Scaling<Real<T>> scaling) {                    \
        rows<T, Schedule>(x, y, lines, len, log, scaling);                                                                        \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                         \
        name##_short_rows_##dtype(const T* x, T* y, int64_t lines, int64_t len, int log, Scaling<Real<T>> scaling) {              \
        short_rows<T, Schedule>(x, y, lines, len, log, scaling);                                                                  \
    }
