// Softmax along another dimension than the last, of up to 8 elements: a thread takes SIZE neighbouring lines, whole, and needs nothing
// from others. Each element is read once and written once, so the ceiling is a copy.
#include "schedule.cuh"
#include "start.cuh"

constexpr int FEW_ROWS_THREADS = 128;

// `across` threads for each of the outer dimension's, `threads` in all, fewer than 2^31. LOADS: elements accessed at once, fewer than SIZE
// where rows are not whole packs of SIZE, or begin elsewhere.
template <typename T, template <typename> class Output, int SIZE, int LOADS, int ROWS>
__device__ __forceinline__ void few_rows_lines(const T* x, T* y, int len, int64_t inner, unsigned across, unsigned threads) {
    using R = Real<T>;
    constexpr int PER_UNIT = Element<T>::PER_UNIT, UNITS = SIZE / PER_UNIT;
    const unsigned thread = blockIdx.x * FEW_ROWS_THREADS + threadIdx.x, outer = thread / across;
    if (thread >= threads) return;
    const int64_t first = int64_t(thread - outer * across) * SIZE, start = int64_t(outer) * len * inner + first;
    // Of the last pack of a row
    const bool has_second = first + 1 < inner;
    x += start;
    y += start;
    wait_for_kernel_before();
    Pack<T, SIZE> rows[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++, x += inner) {
        rows[row] = no_pack<T, SIZE>();
        if constexpr (LOADS == SIZE) {
            load_if(row < len, rows[row], x);
        } else if (row < len) {
            rows[row].units[0].x = x[0];
            if (has_second) rows[row].units[0].y = x[1];
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        R results[ROWS][PER_UNIT];
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) {
            R max = negative_infinity<R>(), sum = 0;
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                results[row][i] = Element<T>::of_unit(rows[row].units[u], i);
                max = greater(max, results[row][i]);
            }
            const R reference = part_reference(max);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const R e = Element<T>::exponential(results[row][i] - reference);
                if (Output<R>::OF_EXPONENTIAL) results[row][i] = e;
                sum += e;
            }
            const auto output = output_of_line<T, Output>(max, sum);
#pragma unroll
            for (int row = 0; row < ROWS; row++) results[row][i] = output.of_kept(results[row][i]);
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) rows[row].units[u] = Element<T>::to_unit(results[row]);
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++, y += inner) {
        if (row >= len) continue;
        if constexpr (LOADS == SIZE) {
            store_streaming(reinterpret_cast<Pack<T, SIZE>*>(y), rows[row]);
        } else {
            y[0] = rows[row].units[0].x;
            if (has_second) y[1] = rows[row].units[0].y;
        }
    }
}

// Named kernels: NAME_SIZExROWS_dtype.
#define KERNEL(name, dtype, T, Output, SIZE, LOADS, ROWS)                                                    \
    extern "C" __global__ void __launch_bounds__(FEW_ROWS_THREADS) name##_##SIZE##x##ROWS##_##dtype(         \
        const T* x, T* y, int len, int64_t inner, unsigned across, unsigned threads) {                       \
        few_rows_lines<T, Output, SIZE, LOADS, ROWS>(x, y, len, inner, across, threads);                     \
    }
#define PACKS(dtype, T, SIZE)                            \
    BOTH(KERNEL, few_rows, dtype, T, SIZE, SIZE, 4)      \
    BOTH(KERNEL, few_rows, dtype, T, SIZE, SIZE, 8)
#define HALF(dtype, T)                                   \
    PACKS(dtype, T, 8)                                   \
    BOTH(KERNEL, few_rows_any, dtype, T, 2, 1, 4)        \
    BOTH(KERNEL, few_rows_any, dtype, T, 2, 1, 8)
#define SINGLE(dtype, T)                                 \
    PACKS(dtype, T, 4)                                   \
    BOTH(KERNEL, few_rows_any, dtype, T, 1, 1, 4)        \
    BOTH(KERNEL, few_rows_any, dtype, T, 1, 1, 8)
#define DOUBLE(dtype, T)                                 \
    PACKS(dtype, T, 2)                                   \
    BOTH(KERNEL, few_rows_any, dtype, T, 1, 1, 4)        \
    BOTH(KERNEL, few_rows_any, dtype, T, 1, 1, 8)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
