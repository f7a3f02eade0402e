// Softmax of long lines along another dimension than the last, on Hopper. A cluster of blocks takes a strip of neighbouring
// lines, 128 or 256 bytes wide, a run of rows to each block, and then another strip. Each element is read once and written
// once, so the ceiling is a copy; what keeps the memory busy is that the next strip comes into shared memory while this one
// is in registers.
#pragma once
#include "start.cuh"
#include "strip.cuh"

constexpr int STRIP_THREADS = 256;

// ACROSS threads share a row, UNITS words of 4 bytes each, and each takes up to ROWS rows. WHOLE: the input's rows begin at
// multiples of 16 bytes, as the map's tensor does; otherwise `before` elements behind that, and 16 bytes more are copied of
// each row. `rows`: of a block, a multiple of 8 for each box of up to 256 that is copied at once. Shared memory: the rows a
// block may have, (warps + 2 x blocks + 1) x columns states, three barriers.
template <typename T, template <typename> class Output, int ACROSS, int UNITS, int ROWS, bool WHOLE>
__device__ __forceinline__ void strip_lines(const TensorMap& x, T* y, int len, int inner, int strips, int rows, int before,
                                            Scaling<Real<T>> scaling) {
    using R = Real<T>;
    using Exchange = ClusterExchange<R>;
    constexpr int PER_UNIT = Element<T>::PER_UNIT, SIZE = UNITS * PER_UNIT, COLUMNS = ACROSS * SIZE;
    constexpr int DOWN = STRIP_THREADS / ACROSS, WARPS = STRIP_THREADS / 32, PITCH = ACROSS * UNITS * 4 + (WHOLE ? 0 : 16);
    constexpr bool KEEPS = PER_UNIT == 1;
    extern __shared__ __align__(128) unsigned char strip_memory[];
    const int blocks = Exchange::blocks(), rank = Exchange::rank();
    const int warp = threadIdx.x / 32, column = threadIdx.x % ACROSS, row = threadIdx.x / ACROSS;
    auto* of_warp = reinterpret_cast<Normalizer<R>*>(strip_memory + DOWN * ROWS * PITCH);
    auto* of_blocks = of_warp + WARPS * COLUMNS;
    auto* of_line = of_blocks + 2 * blocks * COLUMNS;
    auto* copied = reinterpret_cast<ArrivalBarrier*>(of_line + COLUMNS);
    auto* exchanged = copied + 1;  // two in turn: a block may be one strip ahead of another
    if (threadIdx.x == 0) {
        copied->init();
        exchanged[0].init();
        exchanged[1].init();
        ArrivalBarrier::announce();
    }
    // No block may be sent anything before its barriers are there.
    if (blocks > 1) Exchange::begin();
    const int per_row = (inner + COLUMNS - 1) / COLUMNS, clusters = gridDim.x / blocks;
    // Where clusters of up to eight take several strips each, the next kernel is better not set up meanwhile: (4096, 4096) dim 0
    // 38.5 us and 21.6 (f32 / f16), otherwise 42.4 and 23.1. In clusters of sixteen (8, 4096, 4096) f32 takes 284 us then, and 282.
    wait_for_kernel_before(false, blocks == 16 || strips <= clusters ? 2048 : 0);

    int strip = blockIdx.x / blocks;
    const auto fetch = [&](int strip) {
        if (threadIdx.x > 0 || strip >= strips) return;
        const int outer = strip / per_row, first = (strip - outer * per_row) * COLUMNS;
        const int boxes = (rows + 255) / 256, box = rows / boxes;
        copied->expect(rows * PITCH);
        for (int from = 0; from < rows; from += box) {
            copy_box(strip_memory + from * PITCH, x, first, rank * rows + from, outer, *copied);
        }
    };
    fetch(strip);
    __syncthreads();
    if (blocks > 1) Exchange::wait();

    const int here = len - rank * rows;
    const int mine = (here < rows ? here : rows) - row;  // rows from the thread's first on
    const int64_t jump = int64_t(DOWN) * inner;
    const uint64_t results_first = evict_first();
    for (int turn = 0; strip < strips; strip += clusters, turn++) {
        const int outer = strip / per_row, first = (strip - outer * per_row) * COLUMNS + column * SIZE;
        copied->wait(turn & 1);
        Unit<T> held[ROWS * UNITS];
        const unsigned char* from = strip_memory + row * PITCH + column * UNITS * 4 + (WHOLE ? 0 : before / PER_UNIT * 4);
        const uint32_t halves = before % 2 ? 0x5432 : 0x3210;
        // What lies behind the block's rows may be anything.
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            Pack<T, SIZE> pack;
            if constexpr (WHOLE) {
                pack = *reinterpret_cast<const Pack<T, SIZE>*>(from + k * DOWN * PITCH);
            } else {
                const auto* words = reinterpret_cast<const uint32_t*>(from + k * DOWN * PITCH);
                uint32_t word[UNITS + 1];
#pragma unroll
                for (int u = 0; u < UNITS + PER_UNIT - 1; u++) word[u] = words[u];
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    if constexpr (PER_UNIT == 2) word[u] = __byte_perm(word[u], word[u + 1], halves);
                    pack.units[u] = reinterpret_cast<const Unit<T>&>(word[u]);
                }
            }
#pragma unroll
            for (int u = 0; u < UNITS; u++) held[k * UNITS + u] = pack.units[u];
        }
        if (here < DOWN * ROWS || rows < DOWN * ROWS) keep_rows<T, UNITS, ROWS>(held, DOWN, mine);
        __syncthreads();
        fetch(strip + clusters);

        // The maximum of a column in this warp, and the sum relative to it.
        R max[SIZE], sum[SIZE];
        sum_columns<T, Output<R>, ACROSS, UNITS, ROWS>(held, max, scaling, [&](int c, R, R of_column) { sum[c] = of_column; });
        if (threadIdx.x % 32 < ACROSS) {
#pragma unroll
            for (int c = 0; c < SIZE; c++) of_warp[warp * COLUMNS + column * SIZE + c] = {max[c], sum[c] * unscale<T>()};
        }
        __syncthreads();

        merge_strip<Output<R>, STRIP_THREADS, COLUMNS>(of_warp, of_blocks, of_line, exchanged, blocks, rank, turn, scaling);
        __syncthreads();

        // What is to be computed again must not be kept from the first time.
        if constexpr (!KEEPS && Output<R>::OF_EXPONENTIAL) {
#pragma unroll
            for (auto& unit : held) forget(unit);
        }
        Output<R> output[SIZE];
#pragma unroll
        for (int c = 0; c < SIZE; c++) {
            output[c] = Output<R>::of_term(max[c], of_line[column * SIZE + c], unscale<T>(), scaling);
            max[c] = part_reference(max[c]);
        }
        T* to = y + (int64_t(outer) * len + rank * rows + row) * inner + first;
        const int stored = first < inner ? mine : 0;
#pragma unroll
        for (int k = 0; k < ROWS; k++, to += jump) {
            const auto pack = column_results<T, SIZE>(held + k * UNITS, max, output, scaling);
            if (k * DOWN < stored) store_by(results_first, reinterpret_cast<Pack<T, SIZE>*>(to), pack);
        }
    }
}

#define STRIP_KERNEL(name, dtype, T, Output, ACROSS, UNITS, ROWS, WHOLE)                                                \
    extern "C" __global__ void __launch_bounds__(STRIP_THREADS, 2)                                                      \
        name##_##dtype(const __grid_constant__ TensorMap x, T* y, int len, int inner, int strips, int rows, int before, \
                       Scaling<Real<T>> scaling) {                                                                      \
        strip_lines<T, Output, ACROSS, UNITS, ROWS, WHOLE>(x, y, len, inner, strips, rows, before, scaling);            \
    }
