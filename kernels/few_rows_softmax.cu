// Softmax along another dimension than the last, of up to 32 elements: a thread takes SIZE lines, whole, and needs nothing from others.
// Each element is read once and written once, so the ceiling is a copy.
#include "schedule.cuh"
#include "start.cuh"

constexpr int FEW_ROWS_THREADS = 128;

// `across` threads for each of the outer dimension's, `threads` in all, fewer than 2^31. LOADS: elements accessed at once, SIZE neighbours; or one,
// where rows are not whole packs of SIZE, or begin elsewhere, and then a thread's two lines lie a warp apart, so that a warp's accesses are side by side.
template <typename T, template <typename> class Output, int SIZE, int LOADS, int ROWS>
__device__ __forceinline__ void few_rows_lines(const T* x, T* y, int len, int64_t inner, unsigned across, unsigned threads,
                                               Scaling<Real<T>> scaling) {
    using R = Real<T>;
    constexpr int PER_UNIT = Element<T>::PER_UNIT, UNITS = SIZE / PER_UNIT, APART = LOADS == SIZE ? 1 : 32;
    // Exponentials of many rows of half precision are computed twice, in 56 registers for 120: (8, 21, 512, 512) bf16 46.8 us, kept 50.1; but of
    // sixteen (8, 16, 33600) 5.1 and 3.8.
    constexpr bool KEEPS = PER_UNIT == 1 || ROWS <= 16;
    constexpr int SUMS = ROWS <= 8 ? 1 : 4;
    const unsigned thread = blockIdx.x * FEW_ROWS_THREADS + threadIdx.x, outer = thread / across, here = thread - outer * across;
    if (thread >= threads) return;
    const int64_t first = LOADS == SIZE ? int64_t(here) * SIZE : int64_t(here / APART) * (SIZE * APART) + here % APART;
    const bool has_first = LOADS == SIZE || first < inner, has_second = first + APART < inner;
    x += int64_t(outer) * len * inner + first;
    y += int64_t(outer) * len * inner + first;
    wait_for_kernel_before();
    // f(row) for all that there are, and up to seven more
    const auto each_row = [&](const auto& f) { each_place<ROWS, ROWS < 8 ? ROWS : 8>(1, len, f); };
    Pack<T, SIZE> rows[ROWS];
    each_row([&](int row) {
        rows[row] = no_pack<T, SIZE>();
        if constexpr (LOADS == SIZE) load_if(row < len, rows[row], x);
        else load_each_if(row < len && has_first, row < len && has_second, rows[row].units[0], x, x + APART);
        x += inner;
    });
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        R kept[KEEPS ? ROWS : 1][PER_UNIT], references[PER_UNIT];
        Output<R> output[PER_UNIT];
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) {
            R max = negative_infinity<R>(), sums[SUMS] = {};
            each_row([&](int row) { max = greater(max, Element<T>::of_unit(rows[row].units[u], i)); });
            references[i] = part_reference(max);
            each_row([&](int row) {
                const R x = Element<T>::of_unit(rows[row].units[u], i), e = exponential_of<T>(x - references[i], scaling);
                if constexpr (KEEPS) kept[row][i] = Output<R>::OF_EXPONENTIAL ? e : x;
                sums[row % SUMS] += e;
            });
            output[i] = output_of_line<T, Output>(max, pairwise_sum(sums), scaling);
        }
        each_row([&](int row) {
            auto& unit = rows[row].units[u];
            if constexpr (KEEPS) {
                unit = column_results<T, PER_UNIT>(kept[row], references, output, scaling).units[0];
            } else {
                forget(unit);
                unit = column_results<T, PER_UNIT>(&unit, references, output, scaling).units[0];
            }
        });
    }
    each_row([&](int row) {
        if (row < len) {
            if constexpr (LOADS == SIZE) {
                store_streaming(reinterpret_cast<Pack<T, SIZE>*>(y), rows[row]);
            } else {
                if (has_first) y[0] = rows[row].units[0].x;
                if (has_second) y[APART] = rows[row].units[0].y;
            }
        }
        y += inner;
    });
}

// Named kernels: NAME_SIZExROWS_dtype.
#define KERNEL(name, dtype, T, Output, SIZE, LOADS, ROWS)                                                          \
    extern "C" __global__ void __launch_bounds__(FEW_ROWS_THREADS) name##_##SIZE##x##ROWS##_##dtype(               \
        const T* x, T* y, int len, int64_t inner, unsigned across, unsigned threads, Scaling<Real<T>> scaling) {   \
        few_rows_lines<T, Output, SIZE, LOADS, ROWS>(x, y, len, inner, across, threads, scaling);                  \
    }
#define FEW(name, dtype, T, SIZE, LOADS)         \
    BOTH(KERNEL, name, dtype, T, SIZE, LOADS, 4) \
    BOTH(KERNEL, name, dtype, T, SIZE, LOADS, 8)
#define MORE(name, dtype, T, SIZE, LOADS)         \
    BOTH(KERNEL, name, dtype, T, SIZE, LOADS, 16) \
    BOTH(KERNEL, name, dtype, T, SIZE, LOADS, 32)
#define HALF(dtype, T)                \
    FEW(few_rows, dtype, T, 8, 8)     \
    MORE(few_rows, dtype, T, 2, 2)    \
    FEW(few_rows_any, dtype, T, 2, 1) \
    MORE(few_rows_any, dtype, T, 2, 1)
#define SINGLE(dtype, T)              \
    FEW(few_rows, dtype, T, 4, 4)     \
    FEW(few_rows_any, dtype, T, 1, 1) \
    MORE(few_rows_any, dtype, T, 1, 1)
#define DOUBLE(dtype, T)          \
    FEW(few_rows, dtype, T, 2, 2) \
    FEW(few_rows_any, dtype, T, 1, 1)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
