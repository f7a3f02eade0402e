// Softmax along another dimension than the last, with the lines in registers: each element is read once and written once,
// so the ceiling is a copy. A block takes a strip of neighbouring lines: threads side by side read neighbouring packs of
// SIZE elements, rows of threads take rows of the strip, ROWS of them each. On Hopper a cluster of blocks shares a strip
// whose lines are too long for one.
#pragma once
#include "columns.cuh"
#include "exchange.cuh"
#include "pack.cuh"
#include "reduce.cuh"
#include "schedule.cuh"
#include "start.cuh"

// 2^shift packs lie side by side, up to a warp. Shared memory: (warps + blocks + 1) x columns states.
template <typename T, template <typename> class Output, int SIZE, Rows OF, int ROWS>
__device__ __forceinline__ void column_lines(const T* x, T* y, int64_t len, int64_t inner, int shift, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    extern __shared__ uint4 shared[];
    int blocks = 1, rank = 0;
#if __CUDA_ARCH__ >= 900
    blocks = ClusterExchange<R>::blocks();
    rank = ClusterExchange<R>::rank();
    __shared__ ArrivalBarrier arrived;
    if (blocks > 1) ClusterExchange<R>::begin(arrived, (blocks * SIZE << shift) * sizeof(Normalizer<R>));
#endif
    using Columns = StripColumns<T, SIZE, OF>;
    const int across = 1 << shift, columns = Columns::count(across);
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int down = blockDim.x >> shift;
    auto* of_warp = reinterpret_cast<Normalizer<R>*>(shared);
    auto* of_block = of_warp + warps * columns;
    auto* of_line = of_block + blocks * columns;
    const Columns own(blockIdx.x / blocks, shift, inner);
    const int row = rank * down + (threadIdx.x >> shift);
    const int mine = own.has(0) ? int(len) - row : 0;  // rows from here on
    const int64_t start = (own.outer * len + row) * inner + own.first;
    int step = blocks * down;
    int64_t jump = step * inner;

    constexpr int PER_UNIT = Element<T>::PER_UNIT, UNITS = SIZE / PER_UNIT;
    // Exponentials take the place of the elements, but many of half precision stay two to a register and are computed twice.
    constexpr bool KEEPS = PER_UNIT == 1 || ROWS * SIZE <= 32;
    Unit<T> held[ROWS * UNITS];
    R kept[KEEPS ? ROWS * SIZE : 1];
    x += start;
    int left = mine;
    // (16, 64, 56, 56) dim 1 f16 3.31 us, not early 3.77; (64, 1000, 128) 9.05 and 9.54
    wait_for_kernel_before(PER_UNIT == 2 && gridDim.x >= 256);
#pragma unroll
    for (int k = 0; k < ROWS; k++, x += jump, left -= step) {
        auto pack = no_pack<T, SIZE>();
        own.load_if(left > 0, pack, x);
#pragma unroll
        for (int i = 0; i < UNITS; i++) held[k * UNITS + i] = pack.units[i];
    }
    // The maximum of a column in this warp, and the sum relative to it.
    R max[SIZE], sum[SIZE];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        Unit<T> greatest = held[u];
#pragma unroll
        for (int k = 1; k < ROWS; k++) greatest = greater(greatest, held[k * UNITS + u]);
        greatest = reduce_column(greatest, across, [](Unit<T> a, Unit<T> b) { return greater(a, b); });
#pragma unroll
        for (int i = 0; i < PER_UNIT; i++) {
            const int c = u * PER_UNIT + i;
            max[c] = Element<T>::of_unit(greatest, i);
            const ExponentialFor<T, Output<R>> exponential(part_reference(max[c]), scaling);
            sum[c] = 0;
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const R x = Element<T>::of_unit(held[k * UNITS + u], i), e = exponential(x);
                if constexpr (KEEPS) kept[k * SIZE + c] = Output<R>::OF_EXPONENTIAL ? e : x;
                sum[c] += e;
            }
            sum[c] = reduce_column(sum[c], across, [](R a, R b) { return a + b; });
        }
    }
    // The first `across` lanes of each warp hold its columns; then a thread merges a column.
    if (lane < across) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) of_warp[warp * columns + own.place(i)] = {max[i], sum[i] * unscale<T>()};
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
        ClusterExchange<R>::wait();
        for (int c = threadIdx.x; c < columns; c += blockDim.x) {
            const auto part = merge_column(of_warp + c, warps, columns, scaling.scale);
            for (int block = 0; block < blocks; block++) send(block, of_block + rank * columns + c, part, arrived);
        }
        arrived.wait(0);
    } else
#endif
    {
        of_block = of_warp;
        blocks = warps;
    }
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const auto line = merge_column(of_block + c, blocks, columns, scaling.scale);
        of_line[c] = {line.max, Output<R>::term(line, scaling)};
    }
    __syncthreads();
    // What is to be computed again must not be kept from the first time: elements, and the places of their rows.
    if constexpr (!KEEPS) {
#pragma unroll
        for (auto& unit : held) forget(unit);
    }
    asm volatile("" : "+l"(jump), "+r"(step));
    Output<R> output[SIZE];
#pragma unroll
    for (int c = 0; c < SIZE; c++) {
        output[c] = Output<R>::of_term(max[c], of_line[own.place(c)], unscale<T>(), scaling);
        max[c] = part_reference(max[c]);
    }
    y += start;
    left = mine;
#pragma unroll
    for (int k = 0; k < ROWS; k++, y += jump, left -= step) {
        Pack<T, SIZE> pack;
        if constexpr (KEEPS) pack = column_results<T, SIZE>(kept + k * SIZE, max, output, scaling);
        else pack = column_results<T, SIZE>(held + k * UNITS, max, output, scaling);
        if (left > 0) own.store(StreamingAccess{}, y, pack);
    }
}

// Named kernels: NAME_SIZExROWS_dtype. BLOCKS: that a multiprocessor shall hold of THREADS threads each, which bounds the registers.
#define COLUMN_KERNEL(name, dtype, T, Output, SIZE, OF, ROWS, THREADS, BLOCKS)                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                             \
        name##_##SIZE##x##ROWS##_##dtype(const T* x, T* y, int64_t len, int64_t inner, int shift, Scaling<Real<T>> scaling) { \
        column_lines<T, Output, SIZE, Rows::OF, ROWS>(x, y, len, inner, shift, scaling);                                      \
    }
