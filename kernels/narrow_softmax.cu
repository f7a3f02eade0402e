// Softmax along another dimension than the last where rows are narrower than what memory is accessed by: (32768, 128, 2) dim 1. The lines side
// by side are neighbours in memory, so a thread takes units of it that are evenly apart, by a multiple of a row: they are all of the same
// columns. Each element is read once and written once, so the ceiling is a copy.
#include "narrow.cuh"
#include "start.cuh"

// 2^shift lanes of a warp take the lines side by side, or, if `alone`, a block. WHOLE: units are words of 4 bytes, of half precision two
// elements; otherwise elements. `across`: after so many units, up to a warp, it is the same columns again. Shared memory of a block that is
// alone: (warps + 1) x columns states.
template <typename T, template <typename> class Output, bool WHOLE>
__device__ __forceinline__ void narrow_lines(const T* x, T* y, int64_t outers, int len, int inner, int across, int shift, bool alone) {
    using R = Real<T>;
    using Unit = NarrowUnit<T, WHOLE>;
    constexpr int SIZE = Unit::SIZE, COUNT = NARROW_UNITS;
    extern __shared__ uint4 shared[];
    const NarrowLanes group(1 << shift, across, SIZE == 2 && inner % 2 == 1 ? inner : 0);
    const int warps = alone ? blockDim.x / 32 : 1, warp = alone ? threadIdx.x / 32 : 0;
    const int64_t outer = alone ? blockIdx.x : blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift);
    const int units = len * inner / SIZE, step = warps * group.count(), first = warp * group.count() + group.lane;
    const int left = group.has_row() && outer < outers ? units - first : 0;
    const int64_t start = outer * len * inner + first * SIZE;
    x += start;
    y += start;
    // f(k) for each unit that a thread may have
    const auto each = [&](const auto& f) {
#pragma unroll
        for (int from = 0; from < COUNT; from += NARROW_STEP) {
            if (from * step >= units) break;
#pragma unroll
            for (int k = from; k < from + NARROW_STEP; k++) f(k);
        }
    };
    wait_for_kernel_before();
    Unit loaded[COUNT];
    each([&](int k) {
        if (k * step < left) loaded[k] = Unit::load(x, k * step);
    });
    R held[COUNT * SIZE], max[SIZE], sum[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) max[i] = negative_infinity<R>(), sum[i] = 0;
    each([&](int k) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            R& own = held[k * SIZE + i];
            own = negative_infinity<R>();
            if (k * step < left) own = loaded[k].number(i);
            max[i] = greater(max[i], own);
        }
    });
    group.reduce(max, [](R a, R b) { return greater(a, b); });
    R reference[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) reference[i] = part_reference(max[i]);
    each([&](int k) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            R& own = held[k * SIZE + i];
            const R e = Element<T>::exponential(own - reference[i]);
            if (Output<R>::OF_EXPONENTIAL) own = e;
            sum[i] += e;
        }
    });
    group.reduce(sum, [](R a, R b) { return a + b; });

    Output<R> output[SIZE];
    if (alone) {
        const int columns = across * SIZE;
        auto* of_warp = reinterpret_cast<Normalizer<R>*>(shared);
        auto* of_line = of_warp + warps * columns;
        if (group.row == 0) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) of_warp[warp * columns + group.column * SIZE + i] = {max[i], sum[i] * unscale<T>()};
        }
        __syncthreads();
        for (int c = threadIdx.x; c < columns; c += blockDim.x) {
            const auto line = merge_column(of_warp + c, warps, columns);
            of_line[c] = {line.max, Output<R>::term(line)};
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SIZE; i++) output[i] = Output<R>::of_term(max[i], of_line[group.column * SIZE + i], unscale<T>());
    } else {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            if constexpr (Output<R>::OF_EXPONENTIAL) output[i] = Output<R>::of_inverse(reciprocal(sum[i]));
            else output[i] = Output<R>(Normalizer<R>{max[i], sum[i] * unscale<T>()});
        }
    }
    each([&](int k) {
        R results[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; i++) results[i] = output[i].of_kept(held[k * SIZE + i]);
        if (k * step < left) Unit::of(results).store(y, k * step);
    });
}

#define KERNEL(name, dtype, T, Output, WHOLE)                                                                                          \
    extern "C" __global__ void __launch_bounds__(sizeof(T) == 8 ? 512 : 1024)                                                              \
        name##_##dtype(const T* x, T* y, int64_t outers, int len, int inner, int across, int shift, int alone) {                       \
        narrow_lines<T, Output, WHOLE>(x, y, outers, len, inner, across, shift, alone);                                                \
    }
#define HALF(dtype, T)                       \
    BOTH(KERNEL, narrow, dtype, T, true)     \
    BOTH(KERNEL, narrow_any, dtype, T, false)
#define WIDE(dtype, T) BOTH(KERNEL, narrow, dtype, T, true)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(WIDE)
FOR_EACH_DOUBLE_DTYPE(WIDE)
