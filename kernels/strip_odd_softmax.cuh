// Softmax of long lines along another dimension than the last, on Hopper, as in strip_softmax.cuh, in rows that are not whole packs of 16
// bytes, of which each begins elsewhere. What is written has to be whole sectors of 32 bytes even so: in parts of sectors (8, 4096, 4095) f32
// takes 472 us, so 367. So strips overlap by a sector, and of each row a cluster writes a run of whole sectors (but at the row's ends). Each element
// is read once, one in eight twice, but from the L2 cache, and written once: the ceiling is a copy.
#pragma once
#include "start.cuh"
#include "strip.cuh"

// 256 bytes of a row, by a warp, of which 224 are written
template <typename T>
struct OddStrip {
    static constexpr int PER_UNIT = Element<T>::PER_UNIT, UNITS = 2, SIZE = UNITS * PER_UNIT, COLUMNS = 32 * SIZE, SECTOR = 32 / sizeof(T);
    static constexpr int WRITTEN = COLUMNS - SECTOR, PITCH = COLUMNS * sizeof(T) + 16, PIECES = PITCH / 16, ROWS = 32;
    // As many that a thread's rows are whole sectors apart, and its columns the same in all of them
    static constexpr int WARPS = SECTOR, THREADS = 32 * WARPS, MOST_ROWS = WARPS * ROWS;
};

// `rows`: of a block. Shared memory: the rows a block may have, (warps + 2 x blocks + 1) x columns states, two barriers.
template <typename T, template <typename> class Output>
__device__ __forceinline__ void strip_odd_lines(const T* x, T* y, int len, int inner, int strips, int rows, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    using S = OddStrip<T>;
    using Exchange = ClusterExchange<R>;
    constexpr int PER_UNIT = S::PER_UNIT, UNITS = S::UNITS, SIZE = S::SIZE, COLUMNS = S::COLUMNS, ROWS = S::ROWS, WARPS = S::WARPS;
    constexpr bool KEEPS = PER_UNIT == 1;
    extern __shared__ __align__(128) unsigned char strip_memory[];
    const int blocks = Exchange::blocks(), rank = Exchange::rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto* of_warp = reinterpret_cast<Normalizer<R>*>(strip_memory + S::MOST_ROWS * S::PITCH);
    auto* of_blocks = of_warp + WARPS * COLUMNS;
    auto* of_line = of_blocks + 2 * blocks * COLUMNS;
    auto* exchanged = reinterpret_cast<ArrivalBarrier*>(of_line + COLUMNS);  // two in turn: a block may be one strip ahead of another
    if (threadIdx.x == 0) {
        exchanged[0].init();
        exchanged[1].init();
        ArrivalBarrier::announce();
    }
    // No block may be sent anything before its barriers are there.
    if (blocks > 1) Exchange::begin();
    const int per_row = (inner + S::SECTOR - 1 + S::WRITTEN - 1) / S::WRITTEN, clusters = gridDim.x / blocks;
    wait_for_kernel_before(false, blocks == 16 || strips <= clusters ? 2048 : 0);

    const int here = len - rank * rows;
    // The first column that is read of a strip, which a row's first strip does not have, and its place in this row of the block
    const auto first_of = [&](int strip) { return strip % per_row * S::WRITTEN - S::SECTOR; };
    const auto place_of = [&](int strip, int row) {
        return (int64_t(strip / per_row) * len + rank * rows + row) * inner + first_of(strip);
    };
    const auto fetch = [&](int strip) {
        if (strip >= strips) return;
        const int first = first_of(strip), begin = first < 0 ? -first : 0, end = inner - first < COLUMNS ? inner - first : COLUMNS;
        const auto base = reinterpret_cast<uintptr_t>(x + place_of(strip, 0));
        const int all = (here < rows ? here : rows) * S::PIECES;
        // What a piece of a row has of others is read with it, but nothing behind the tensor's last.
        const int last = strip >= strips - per_row ? here - 1 : -1, in_row = inner - first < 2 * COLUMNS ? inner - first : 2 * COLUMNS;
        for (int i = threadIdx.x; i < all; i += S::THREADS) {
            const int row = i / S::PIECES, piece = i % S::PIECES;
            const auto at = base + int64_t(row) * inner * sizeof(T);
            // Bytes before the piece, and from there on
            const int skipped = piece * 16 - static_cast<int>(at & 15), left = end * int(sizeof(T)) - skipped;
            if (left <= 0 || skipped + 16 <= begin * int(sizeof(T))) continue;
            const auto* from = reinterpret_cast<const T*>(at + skipped);
            auto* to = reinterpret_cast<T*>(strip_memory + i * 16);
            if (row != last || skipped + 16 <= in_row * int(sizeof(T))) {
                copy_pack(to, from);
            } else {
                for (int e = 0; e * int(sizeof(T)) < left; e++) to[e] = from[e];
            }
        }
    };
    int strip = blockIdx.x / blocks;
    fetch(strip);
    __syncthreads();
    if (blocks > 1) Exchange::wait();

    const int mine = (here < rows ? here : rows) - warp;  // rows from the thread's first on
    const int64_t jump = int64_t(WARPS) * inner;
    for (int turn = 0; strip < strips; strip += clusters, turn++) {
        const int first = first_of(strip);
        const int64_t place = place_of(strip, warp);
        // Of the sector that the row's first column is in: elements before that. They are the same for all of the thread's rows.
        const int before = reinterpret_cast<uintptr_t>(y + place) % 32 / sizeof(T);
        // Which column of the strip is element c of the thread: what is written comes first.
        const auto number = [&](int c) { return (c / PER_UNIT * 32 + lane) * PER_UNIT + c % PER_UNIT; };
        int column[SIZE];
#pragma unroll
        for (int c = 0; c < SIZE; c++) {
            const int behind = number(c) - S::WRITTEN;
            column[c] = behind < 0 ? number(c) + S::SECTOR - before : behind < before ? COLUMNS - before + behind : behind - before;
        }
        copied_packs();
        __syncthreads();
        Unit<T> held[ROWS * UNITS];
        const unsigned char* from = strip_memory + warp * S::PITCH + reinterpret_cast<uintptr_t>(x + place) % 16;
        // What lies behind the block's rows, and beside the tensor's, may be anything.
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const T* elements = reinterpret_cast<const T*>(from + k * WARPS * S::PITCH);
            Pack<T, SIZE> pack;
#pragma unroll
            for (int c = 0; c < SIZE; c++) element(pack, c) = elements[column[c]];
#pragma unroll
            for (int u = 0; u < UNITS; u++) held[k * UNITS + u] = pack.units[u];
        }
        if (here < S::MOST_ROWS || rows < S::MOST_ROWS) keep_rows<T, UNITS, ROWS>(held, WARPS, mine);
        __syncthreads();
        fetch(strip + clusters);

        // The maximum of a column in this warp, and the sum relative to it.
        R max[SIZE];
        sum_columns<T, Output<R>, 32, UNITS, ROWS>(held, max, scaling, [&](int c, R max, R sum) {
            of_warp[warp * COLUMNS + column[c]] = {max, sum * unscale<T>()};
        });
        __syncthreads();

        merge_strip<Output<R>, S::THREADS, COLUMNS>(of_warp, of_blocks, of_line, exchanged, blocks, rank, turn, scaling);
        __syncthreads();

        // What is to be computed again must not be kept from the first time.
        if constexpr (!KEEPS && Output<R>::OF_EXPONENTIAL) {
#pragma unroll
            for (auto& unit : held) forget(unit);
        }
        Output<R> output[SIZE];
        bool written[SIZE];
#pragma unroll
        for (int c = 0; c < SIZE; c++) {
            output[c] = Output<R>::of_term(max[c], of_line[column[c]], unscale<T>(), scaling);
            max[c] = part_reference(max[c]);
            written[c] = number(c) < S::WRITTEN && first + column[c] >= 0 && first + column[c] < inner;
        }
        T* to = y + place + (S::SECTOR - before) + number(0);
#pragma unroll
        for (int k = 0; k < ROWS; k++, to += jump) {
            auto pack = column_results<T, SIZE>(held + k * UNITS, max, output, scaling);
            if (k * WARPS >= mine) continue;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                T* unit = to + u * 32 * PER_UNIT;
                const int c = u * PER_UNIT;
                if (written[c] && written[c + PER_UNIT - 1]) {
                    *reinterpret_cast<uint32_t*>(unit) = reinterpret_cast<const uint32_t&>(pack.units[u]);
                } else if constexpr (PER_UNIT == 2) {
                    if (written[c]) unit[0] = pack.units[u].x;
                    if (written[c + 1]) unit[1] = pack.units[u].y;
                }
            }
        }
    }
}

#define STRIP_ODD_KERNEL(name, dtype, T, Output, ...)                                                          \
    extern "C" __global__ void __launch_bounds__(OddStrip<T>::THREADS, 512 / OddStrip<T>::THREADS)             \
        name##_##dtype(const T* x, T* y, int len, int inner, int strips, int rows, Scaling<Real<T>> scaling) { \
        strip_odd_lines<T, Output>(x, y, len, inner, strips, rows, scaling);                                   \
    }
