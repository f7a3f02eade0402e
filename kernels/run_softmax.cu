// Softmax of the shortest contiguous lines, of 2 to 7 elements. As many of them as a pack of 16 bytes has elements are whole packs: such a
// run is a thread's. The runs of a warp go through shared memory, so that lanes side by side access packs side by side. Each element is
// read once and written once, so the ceiling is a copy.
#include "schedule.cuh"
#include "start.cuh"

constexpr int RUN_THREADS = 128;

// `whole`: both tensors begin at multiples of 16 bytes; otherwise elements are accessed one by one.
template <typename T, template <typename> class Output, int LEN>
__device__ __forceinline__ void lines_of_runs(const T* x, T* y, int64_t lines, bool whole, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    constexpr int SIZE = 16 / sizeof(T), PER_UNIT = Element<T>::PER_UNIT, PACKS = 32 * LEN;
    __shared__ Pack<T, SIZE> shared[RUN_THREADS / 32][PACKS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = (blockIdx.x * int64_t(RUN_THREADS / 32) + warp) * (32 * SIZE);
    if (first >= lines) return;
    const int count = static_cast<int>(lines - first < 32 * SIZE ? lines - first : 32 * SIZE) * LEN, packs = whole ? count / SIZE : 0;
    auto* pack = shared[warp];
    auto* element = reinterpret_cast<T*>(pack);
    x += first * LEN;
    y += first * LEN;
    wait_for_kernel_before();
#pragma unroll
    for (int at = lane; at < PACKS; at += 32) {
        if (at < packs) pack[at] = load(reinterpret_cast<const Pack<T, SIZE>*>(x) + at);
    }
#pragma unroll 8
    for (int i = packs * SIZE + lane; i < count; i += 32) element[i] = x[i];
    __syncwarp();

    // Packs that hold whole lines need not be neighbours, which would be in the same banks.
    constexpr int FIRST = SIZE % LEN == 0 ? 1 : LEN, STEP = SIZE % LEN == 0 ? 32 : 1;
    Pack<T, SIZE> mine[LEN];
#pragma unroll
    for (int k = 0; k < LEN; k++) mine[k] = pack[lane * FIRST + k * STEP];
    R results[LEN * SIZE];
#pragma unroll
    for (int line = 0; line < SIZE; line++) {
        R* of_line = results + line * LEN;
        R max = negative_infinity<R>(), sum = 0;
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            const int e = line * LEN + j;
            of_line[j] = Element<T>::of_unit(mine[e / SIZE].units[e % SIZE / PER_UNIT], e % PER_UNIT);
            max = greater(max, of_line[j]);
        }
        const R reference = part_reference(max);
#pragma unroll
        for (int j = 0; j < LEN; j++) {
            const R e = exponential_of<T>(of_line[j] - reference, scaling);
            if (Output<R>::OF_EXPONENTIAL) of_line[j] = e;
            sum += e;
        }
        const auto output = output_of_line<T, Output>(max, sum, scaling);
#pragma unroll
        for (int j = 0; j < LEN; j++) of_line[j] = output.of_kept(of_line[j]);
    }
#pragma unroll
    for (int k = 0; k < LEN; k++) pack[lane * FIRST + k * STEP] = pack_of<T, SIZE>([&](int i) { return results[k * SIZE + i]; });
    __syncwarp();
#pragma unroll
    for (int at = lane; at < PACKS; at += 32) {
        if (at < packs) store_streaming(reinterpret_cast<Pack<T, SIZE>*>(y) + at, pack[at]);
    }
#pragma unroll 8
    for (int i = packs * SIZE + lane; i < count; i += 32) y[i] = element[i];
}

// Named kernels: NAME_LEN_dtype.
#define KERNEL(name, dtype, T, Output, LEN)                                                    \
    extern "C" __global__ void __launch_bounds__(RUN_THREADS)                                  \
        name##_##LEN##_##dtype(const T* x, T* y, int64_t lines, int whole, Scaling<Real<T>> scaling) { \
        lines_of_runs<T, Output, LEN>(x, y, lines, whole, scaling);                            \
    }
#define KERNELS(dtype, T)                  \
    BOTH(KERNEL, run, dtype, T, 2)         \
    BOTH(KERNEL, run, dtype, T, 3)         \
    BOTH(KERNEL, run, dtype, T, 4)         \
    BOTH(KERNEL, run, dtype, T, 5)         \
    BOTH(KERNEL, run, dtype, T, 6)         \
    BOTH(KERNEL, run, dtype, T, 7)
FOR_EACH_DTYPE(KERNELS)
