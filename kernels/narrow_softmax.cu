// Softmax along another dimension than the last where rows are narrower than what memory is accessed by: (32768, 128, 2) dim 1. The lines side
// by side are neighbours in memory, so a thread takes units of it that are evenly apart, by a multiple of a row: they are all of the same
// columns. Each element is read once and written once, so the ceiling is a copy.
#include "narrow.cuh"
#include "start.cuh"

// Shared memory of a block that is alone: (warps + 1) x columns states.
template <typename T, template <typename> class Output, bool WHOLE>
__device__ __forceinline__ void narrow_lines(const T* x, T* y, int64_t outers, int len, int inner, int across, int shift, bool alone,
                                             Scaling<Real<T>> scaling) {
    using R = Real<T>;
    using Share = NarrowShare<T, WHOLE>;
    using Unit = typename Share::Unit;
    constexpr int SIZE = Share::SIZE, COUNT = Share::COUNT;
    extern __shared__ uint4 shared[];
    const Share own(outers, len, inner, across, shift, alone);
    const auto& group = own.group;
    x += own.start;
    y += own.start;
    wait_for_kernel_before();
    Unit loaded[COUNT];
    own.each([&](int k) {
        if (own.has(k)) loaded[k] = Unit::load(x, k * own.step);
    });
    R held[COUNT * SIZE], max[SIZE], sum[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) max[i] = negative_infinity<R>(), sum[i] = 0;
    own.each([&](int k) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            R& element = held[k * SIZE + i];
            element = negative_infinity<R>();
            if (own.has(k)) element = loaded[k].number(i);
            max[i] = greater(max[i], element);
        }
    });
    group.reduce(max, [](R a, R b) { return greater(a, b); });
    R reference[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) reference[i] = part_reference(max[i]);
    own.each([&](int k) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            R& element = held[k * SIZE + i];
            const R e = exponential_of<T>(element - reference[i], scaling);
            if (Output<R>::OF_EXPONENTIAL) element = e;
            sum[i] += e;
        }
    });
    group.reduce(sum, [](R a, R b) { return a + b; });

    Output<R> output[SIZE];
    if (alone) {
        const int columns = across * SIZE;
        auto* of_warp = reinterpret_cast<Normalizer<R>*>(shared);
        auto* of_line = of_warp + own.warps * columns;
        if (group.row == 0) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) of_warp[own.warp * columns + group.column * SIZE + i] = {max[i], sum[i] * unscale<T>()};
        }
        __syncthreads();
        for (int c = threadIdx.x; c < columns; c += blockDim.x) {
            const auto line = merge_column(of_warp + c, own.warps, columns, scaling.scale);
            of_line[c] = {line.max, Output<R>::term(line, scaling)};
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SIZE; i++) output[i] = Output<R>::of_term(max[i], of_line[group.column * SIZE + i], unscale<T>(), scaling);
    } else {
#pragma unroll
        for (int i = 0; i < SIZE; i++) output[i] = output_of_line<T, Output>(max[i], sum[i], scaling);
    }
    own.each([&](int k) {
        R results[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; i++) results[i] = output[i].of_kept(held[k * SIZE + i]);
        if (own.has(k)) Unit::of(results).store(y, k * own.step);
    });
}

#define KERNEL(name, dtype, T, Output, WHOLE)                                                                  \
    extern "C" __global__ void __launch_bounds__(sizeof(T) == 8 ? 512 : 1024)                                  \
        name##_##dtype(const T* x, T* y, int64_t outers, int len, int inner, int across, int shift, int alone, \
                       Scaling<Real<T>> scaling) {                                                             \
        narrow_lines<T, Output, WHOLE>(x, y, outers, len, inner, across, shift, alone, scaling);               \
    }
#define KERNELS(any, dtype, T, WHOLE) BOTH(KERNEL, narrow##any, dtype, T, WHOLE)
FOR_EACH_NARROW_UNIT
