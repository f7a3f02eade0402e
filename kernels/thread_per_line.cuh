// The two kernels of a schedule that gives each thread a line: `columns` for lines that lie side by side (inner > 1),
// where neighbouring threads read neighbouring addresses, and `rows` for contiguous lines, staged through shared memory.
#pragma once
#include "schedule.cuh"

constexpr int THREADS = 128;

template <typename T, template <typename> class Schedule, template <typename> class Output>
__device__ __forceinline__ void columns(const T* x, T* y, int64_t lines, int64_t len, int64_t inner) {
    for (int64_t line = blockIdx.x * int64_t(THREADS) + threadIdx.x; line < lines; line += gridDim.x * int64_t(THREADS)) {
        DirectLogits<T> logits{StridedLine::of_thread(line, len, inner), x, y};
        logits.map(Output<Real<T>>(Schedule<DirectLogits<T>>::state(logits).finish()));
    }
}

template <typename T, template <typename> class Schedule, template <typename> class Output>
__device__ __forceinline__ void rows(const T* x, T* y, int64_t lines, int64_t len) {
    using Logits = StagedLogits<T>;
    static_assert(Logits::LINES == THREADS, "a thread per line");
    __shared__ Real<T> shared[Logits::LINES * Logits::PITCH];
    for (int64_t line = blockIdx.x * int64_t(THREADS); line < lines; line += gridDim.x * int64_t(THREADS)) {
        const int here = static_cast<int>(lines - line < THREADS ? lines - line : THREADS);
        Logits logits{x + line * len, y + line * len, len, here, shared, -1};
        logits.map(Output<Real<T>>(Schedule<Logits>::state(logits).finish()));
    }
}

#define THREAD_PER_LINE(name, dtype, T, Schedule, Output)                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                     \
        name##_columns_##dtype(const T* x, T* y, int64_t lines, int64_t len, int64_t inner) { \
        columns<T, Schedule, Output>(x, y, lines, len, inner);                                \
    }                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                     \
        name##_rows_##dtype(const T* x, T* y, int64_t lines, int64_t len, int64_t inner) {    \
        rows<T, Schedule, Output>(x, y, lines, len);                                          \
    }
