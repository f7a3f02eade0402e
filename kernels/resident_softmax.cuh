// Softmax of half precision along another dimension than the last, on Hopper, of a tensor that the multiprocessors hold all at once. A
// block or two, each of which has a multiprocessor to itself, take a strip of neighbouring lines, 128 bytes wide, a run of rows each: the
// first in registers, the others in shared memory. Each element is read once and written once, so the ceiling is a copy, but one
// that reads all before it writes. Exponentials are taken of what has come, relative to the maximum of the rows in registers, so that a
// thread needs nothing from others until it has all.
#pragma once
#include "bulk.cuh"
#include "exchange.cuh"
#include "pack.cuh"
#include "schedule.cuh"
#include "start.cuh"

// (4096, 4096) dim 0 bf16 on an H100 25.1 us; in six parts rather than 13 25.6, streaming stores, too, 26.8 (a copy 23.2). On an H200 20.35,
// with exponentials of x minus a reference, of three instructions, 20.56 (a copy 17.0).
constexpr int RESIDENT_THREADS = 512, RESIDENT_HELD = 6, RESIDENT_PARTS = 14, RESIDENT_STEPS = 2;

// Parts PART, …, PARTS - 1 of what this thread copies, each as soon as it has come.
template <int PART, int PARTS, typename F>
__device__ __forceinline__ void each_copied_part(const F& f) {
    if constexpr (PART < PARTS) {
        wait_for_packs<PARTS - 1 - PART>();
        f(PART);
        each_copied_part<PART + 1, PARTS>(f);
    }
}

// Rows and both tensors begin at multiples of 16 bytes. `rows`: of a block. Shared memory: the packs that are not in registers, those of
// a thread for itself, (warps + blocks + 1) x columns states, a barrier.
template <typename T, template <typename> class Output>
__device__ __forceinline__ void resident_lines(const T* x, T* y, int len, int inner, int rows) {
    using Exchange = ClusterExchange<float>;
    constexpr int SIZE = 8, COLUMNS = 64, ACROSS = COLUMNS / SIZE, DOWN = RESIDENT_THREADS / ACROSS, WARPS = RESIDENT_THREADS / 32;
    constexpr int HELD = RESIDENT_HELD, ALIKE = RESIDENT_THREADS / COLUMNS;
    constexpr bool LOG = !Output<float>::OF_EXPONENTIAL;
    using P = Pack<T, SIZE>;
    extern __shared__ __align__(128) uint4 slots[];
    const int blocks = Exchange::blocks(), rank = Exchange::rank();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = threadIdx.x % ACROSS, row = threadIdx.x / ACROSS;
    const int steps = (rows + DOWN - 1) / DOWN, copied = steps > HELD ? steps - HELD : 0;
    auto* of_warp = reinterpret_cast<Normalizer<float>*>(slots + copied * RESIDENT_THREADS);
    auto* of_blocks = of_warp + WARPS * COLUMNS;
    auto* of_line = of_blocks + blocks * COLUMNS;
    auto& arrived = *reinterpret_cast<ArrivalBarrier*>(of_line + COLUMNS);
    if (blocks > 1) Exchange::begin(arrived, blocks * COLUMNS * sizeof(Normalizer<float>));
    const int per_row = (inner + COLUMNS - 1) / COLUMNS, strip = blockIdx.x / blocks, outer = strip / per_row;
    const int first = (strip - outer * per_row) * COLUMNS + column * SIZE;
    const int here = len - rank * rows;
    const int mine = first < inner ? (here < rows ? here : rows) - row : 0;  // rows from the thread's first on
    const int64_t start = (int64_t(outer) * len + rank * rows + row) * inner + first, jump = int64_t(DOWN) * inner;
    x += start;
    y += start;

    // What is read makes room in the L2 cache for what is written.
    const EitherAccess access(true);
    wait_for_kernel_before(true);
    P held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++, x += jump) {
        held[k] = no_pack<T, SIZE>();
        access.load_if(k * DOWN < mine, held[k], x);
    }
    const auto slot = [&](int k) { return slots + (k - HELD) * RESIDENT_THREADS + threadIdx.x; };
    const auto each_of_part = [&](int part, const auto& f) {
#pragma unroll 1
        for (int k = HELD + part * RESIDENT_STEPS; k < HELD + (part + 1) * RESIDENT_STEPS; k++) {
            if (k * DOWN < mine) f(k);
        }
    };
#pragma unroll
    for (int part = 0; part < RESIDENT_PARTS; part++) {
        each_of_part(part, [&](int k) {
            copy_pack(slot(k), x, access.policy);
            x += jump;
        });
        end_of_packs();
    }
    const auto pack_at = [&](int k) { return load(reinterpret_cast<const P*>(slot(k))); };

    // Of each column, the exponentials of this warp, relative to what it saw first, and their sum; of logarithms the maximum, too.
    RelativeExponential exponential[SIZE];
    float sum[SIZE];
    P max;
    const auto grow = [&](const P& pack) {
#pragma unroll
        for (int u = 0; u < P::UNITS; u++) max.units[u] = greater(max.units[u], pack.units[u]);
    };
    const auto element = [](const P& pack, int c) { return Element<T>::of_unit(pack.units[c / 2], c % 2); };
    const auto max_of_warp = [&] {
#pragma unroll
        for (auto& unit : max.units) {
#pragma unroll
            for (int mask = 16; mask >= ACROSS; mask /= 2) unit = greater(unit, __shfl_xor_sync(~0u, unit, mask));
        }
    };
    const auto refer_to_max = [&] {
        max_of_warp();
#pragma unroll
        for (int c = 0; c < SIZE; c++) exponential[c] = RelativeExponential(part_reference(element(max, c)));
    };
    max = held[0];
#pragma unroll
    for (int k = 1; k < HELD; k++) grow(held[k]);
    refer_to_max();
#pragma unroll 1
    for (int attempt = 0;; attempt++) {
        const auto take = [&](const P& pack) {
            if (LOG) grow(pack);
#pragma unroll
            for (int c = 0; c < SIZE; c++) sum[c] += exponential[c](element(pack, c));
        };
#pragma unroll
        for (auto& of_column : sum) of_column = 0;
#pragma unroll
        for (int k = 0; k < HELD; k++) take(held[k]);
        each_copied_part<0, RESIDENT_PARTS>([&](int part) { each_of_part(part, [&](int k) { take(pack_at(k)); }); });
        bool near = true;
#pragma unroll
        for (auto& of_column : sum) {
#pragma unroll
            for (int mask = 16; mask >= ACROSS; mask /= 2) of_column += __shfl_xor_sync(~0u, of_column, mask);
            near = near && of_column >= 0.5f * HalfElement::EXP_SCALE && of_column < HalfElement::EXP_SCALE * float(1 << 20);
        }
        // The reference adds about 1. Where it was of nothing, or less than the maximum by 14 or more, which would cost bits of the
        // exponents, the maximum itself is taken.
        if (attempt > 0 || __all_sync(~0u, near || first >= inner)) break;
#pragma unroll
        for (int k = 0; k < HELD; k++) grow(held[k]);
#pragma unroll 1
        for (int k = HELD; k * DOWN < mine; k++) grow(pack_at(k));
        refer_to_max();
    }
    if (LOG) max_of_warp();
    // What the parts of a line are merged by: their maxima or, but for logarithms, the exponents of what exponentials are relative to; -inf
    // where there was nothing else.
    float part_max[SIZE];
#pragma unroll
    for (int c = 0; c < SIZE; c++) {
        part_max[c] = sum[c] == 0 ? negative_infinity<float>() : LOG ? element(max, c) : exponential[c].exponent();
    }
    const auto weight = [](float d) { return LOG ? quick_exponential(d) : power_of_two(d); };
    if (lane < ACROSS) {
#pragma unroll
        for (int c = 0; c < SIZE; c++) {
            const float part = part_max[c];
            // Rounded as the maximum's own exponential was in the sum
            const float of_part = LOG ? sum[c] / exponential[c](part_reference(part)) : sum[c] * unscale<T>();
            of_warp[warp * COLUMNS + column * SIZE + c] = {part, of_part};
        }
    }
    __syncthreads();

    // Neighbouring threads merge the warps' parts of a column, and send them to all blocks.
    {
        static_assert(WARPS == 2 * ALIKE, "a thread merges two");
        const int c = threadIdx.x / ALIKE, of = threadIdx.x % ALIKE;
        const auto part = of_warp[of * COLUMNS + c], other = of_warp[(of + ALIKE) * COLUMNS + c];
        const float max = warp_group_reduce(greater(part.max, other.max), ALIKE, [](float a, float b) { return greater(a, b); });
        const float to = part_reference(max);
        const float mine = part.sum * weight(part.max - to) + other.sum * weight(other.max - to);
        const float sum = warp_group_reduce(mine, ALIKE, [](float a, float b) { return a + b; });
        if (blocks > 1) {
            Exchange::wait();
            if (of < blocks) send(of, of_blocks + rank * COLUMNS + c, Normalizer<float>{max, sum}, arrived);
        } else if (of == 0) {
            of_blocks[c] = {max, sum};
        }
    }
    if (blocks > 1) arrived.wait(0);
    else __syncthreads();
    if (threadIdx.x < COLUMNS) {
        const auto line = merge_column(of_blocks + threadIdx.x, blocks, COLUMNS, weight);
        of_line[threadIdx.x] = {line.max, Output<float>::term(line)};
    }
    __syncthreads();

    // What is to be computed again must not be kept from the first time.
#pragma unroll
    for (auto& pack : held) {
#pragma unroll
        for (auto& unit : pack.units) forget(unit);
    }
    Output<float> output[SIZE];
#pragma unroll
    for (int c = 0; c < SIZE; c++) {
        const auto line = of_line[column * SIZE + c];
        output[c] = Output<float>::of_weight(weight(part_max[c] - line.max), line, unscale<T>());
    }
    const auto store_results = [&](int k, const P& pack) {
        const auto results = pack_of<T, SIZE>([&](int c) {
            const float x = element(pack, c);
            return output[c].of_kept(LOG ? x : exponential[c](x));
        });
        if (k * DOWN < mine) store(reinterpret_cast<P*>(y), results);
        y += jump;
    };
#pragma unroll
    for (int k = 0; k < HELD; k++) store_results(k, held[k]);
#pragma unroll 8
    for (int k = HELD; k * DOWN < mine; k++) store_results(k, pack_at(k));
}
