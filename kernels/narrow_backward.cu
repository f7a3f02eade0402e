// The backward of (log-)softmax of lines side by side in narrow rows, as narrow_softmax.cu has them: y * (g - sum of g * y), or of log-softmax
// g - exp(y) * sum of g. y and g are read once and the gradient is written once: 3/2x the bytes of a copy, which is the floor.
#include "narrow.cuh"

// As in narrow_softmax.cu; shared memory of a block that is alone: (warps + 1) x columns sums.
template <typename T, bool WHOLE>
__device__ __forceinline__ void narrow_gradients(const T* y, const T* g, T* grad, int64_t outers, int len, int inner, int across, int shift,
                                                 bool alone, bool log) {
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
    y += start;
    g += start;
    grad += start;
    // f(k) for each unit that a thread may have
    const auto each = [&](const auto& f) {
#pragma unroll
        for (int from = 0; from < COUNT; from += NARROW_STEP) {
            if (from * step >= units) break;
#pragma unroll
            for (int k = from; k < from + NARROW_STEP; k++) f(k);
        }
    };
    Unit own_y[COUNT], own_g[COUNT];
    each([&](int k) {
        if (k * step >= left) return;
        own_y[k] = Unit::load(y, k * step);
        own_g[k] = Unit::load(g, k * step);
    });
    R sum[SIZE] = {};
    each([&](int k) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            if (k * step < left) sum[i] += log ? own_g[k].number(i) : own_y[k].number(i) * own_g[k].number(i);
        }
    });
    const auto add = [](R a, R b) { return a + b; };
    group.reduce(sum, add);
    if (alone) {
        const int columns = across * SIZE;
        auto* of_warp = reinterpret_cast<R*>(shared);
        auto* of_line = of_warp + warps * columns;
        if (group.row == 0) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) of_warp[warp * columns + group.column * SIZE + i] = sum[i];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < columns; c += blockDim.x) {
            R total = 0;
            for (int of = 0; of < warps; of++) total += of_warp[of * columns + c];
            of_line[c] = total;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SIZE; i++) sum[i] = of_line[group.column * SIZE + i];
    }
    each([&](int k) {
        if (k * step >= left) return;
        R results[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const R of_y = own_y[k].number(i), of_g = own_g[k].number(i);
            results[i] = log ? of_g - exponential(of_y) * sum[i] : of_y * (of_g - sum[i]);
        }
        Unit::of(results).store(grad, k * step);
    });
}

#define KERNEL(name, dtype, T, WHOLE)                                                                                  \
    extern "C" __global__ void __launch_bounds__(sizeof(T) == 8 ? 512 : 1024)                                          \
        name##_##dtype(const T* y, const T* g, T* grad, int64_t outers, int len, int inner, int across, int shift, int alone, int log) { \
        narrow_gradients<T, WHOLE>(y, g, grad, outers, len, inner, across, shift, alone, log);                         \
    }
#define HALF(dtype, T)                        \
    KERNEL(narrow_backward, dtype, T, true)   \
    KERNEL(narrow_any_backward, dtype, T, false)
#define WIDE(dtype, T) KERNEL(narrow_backward, dtype, T, true)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(WIDE)
FOR_EACH_DOUBLE_DTYPE(WIDE)
