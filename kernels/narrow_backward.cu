// The backward of (log-)softmax of lines side by side in narrow rows, as narrow_softmax.cu has them: y * (g - sum of g * y), or of log-softmax
// g - exp(y) * sum of g. y and g are read once and the gradient is written once: 3/2x the bytes of a copy, which is the floor.
#include "narrow.cuh"

// Shared memory of a block that is alone: (warps + 1) x columns sums.
template <typename T, bool WHOLE>
__device__ __forceinline__ void narrow_gradients(const T* y, const T* g, T* grad, int64_t outers, int len, int inner, int across, int shift,
                                                 bool alone, bool log) {
    using R = Real<T>;
    using Share = NarrowShare<T, WHOLE>;
    using Unit = typename Share::Unit;
    constexpr int SIZE = Share::SIZE, COUNT = Share::COUNT;
    extern __shared__ uint4 shared[];
    const Share own(outers, len, inner, across, shift, alone);
    const auto& group = own.group;
    y += own.start;
    g += own.start;
    grad += own.start;
    Unit own_y[COUNT], own_g[COUNT];
    own.each([&](int k) {
        if (!own.has(k)) return;
        own_y[k] = Unit::load(y, k * own.step);
        own_g[k] = Unit::load(g, k * own.step);
    });
    R sum[SIZE] = {};
    own.each([&](int k) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            if (own.has(k)) sum[i] += log ? own_g[k].number(i) : own_y[k].number(i) * own_g[k].number(i);
        }
    });
    group.reduce(sum, [](R a, R b) { return a + b; });
    if (alone) {
        const int columns = across * SIZE;
        auto* of_warp = reinterpret_cast<R*>(shared);
        auto* of_line = of_warp + own.warps * columns;
        if (group.row == 0) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) of_warp[own.warp * columns + group.column * SIZE + i] = sum[i];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < columns; c += blockDim.x) of_line[c] = sum_column(of_warp + c, own.warps, columns);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SIZE; i++) sum[i] = of_line[group.column * SIZE + i];
    }
    own.each([&](int k) {
        if (!own.has(k)) return;
        R results[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            results[i] = gradient_of<T>(own_y[k].number(i), own_g[k].number(i), sum[i], log);
        }
        Unit::of(results).store(grad, k * own.step);
    });
}

#define KERNELS(any, dtype, T, WHOLE)                                                                          \
    extern "C" __global__ void __launch_bounds__(sizeof(T) == 8 ? 512 : 1024)                                  \
        narrow##any##_backward_##dtype(const T* y, const T* g, T* grad, int64_t outers, int len, int inner,    \
                                       int across, int shift, int alone, int log) {                            \
        narrow_gradients<T, WHOLE>(y, g, grad, outers, len, inner, across, shift, alone, log);                 \
    }
FOR_EACH_NARROW_UNIT
