// Softmax of half precision along another dimension than the last, on Hopper, of a tensor that the multiprocessors hold all at once. A
// block or a cluster takes a strip of neighbouring lines, 128 bytes wide, a run of rows to each block, which the hardware copies into
// shared memory box by box. Each element is read once and written once, so the ceiling is a copy, but one that reads all before it
// writes. Exponentials are taken as boxes come, relative to the greatest of the line's first few rows, which all warps know: their sums
// need only be added.
#pragma once
#include "bulk.cuh"
#include "exchange.cuh"
#include "pack.cuh"
#include "schedule.cuh"
#include "start.cuh"

// (64, 1000, 128) dim 1 bf16 on an H100: with boxes of 32 rows 9.8 us for 8.4, of 128 8.5, with 32 warps 8.5, eight 8.8; packs of 8 bytes
// 8.5; results written by the hardware, too, 9.1 for 8.5; a quarter of the exponentials by polynomials 8.8 for 8.6.
constexpr int RESIDENT_COLUMNS = 64, RESIDENT_WARPS = 16, RESIDENT_STEPS = 4, RESIDENT_BOX = RESIDENT_WARPS * RESIDENT_STEPS;
constexpr int RESIDENT_SLOTS = 25, RESIDENT_FIRST = 4, RESIDENT_MERGES = 3;

// Rows and the input begin at multiples of 16 bytes, the output of 4. `rows`: of a block. Shared memory has slots for their boxes; where
// it has not enough, the last boxes, up to HELD, take the place of the first, which are kept in registers. Shared memory: the slots,
// (warps + blocks + 1) x columns states, and a barrier for each box and merge.
template <typename T, template <typename> class Output, int HELD>
__device__ __forceinline__ void resident_lines(const TensorMap& map, const T* x, T* y, int len, int inner, int rows, int streams) {
    using Exchange = ClusterExchange<float>;
    constexpr bool LOG = !Output<float>::OF_EXPONENTIAL;
    constexpr int COLUMNS = RESIDENT_COLUMNS, WARPS = RESIDENT_WARPS, STEPS = RESIDENT_STEPS, BOX = RESIDENT_BOX;
    using Row = Unit<T>[COLUMNS / 2];
    using States = Normalizer<float>[COLUMNS];
    extern __shared__ __align__(128) unsigned char resident_memory[];
    const int blocks = Exchange::blocks(), rank = Exchange::rank(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int boxes = (rows + BOX - 1) / BOX, slots = HELD > 0 ? RESIDENT_SLOTS : boxes, kept = boxes - slots;
    auto* slot = reinterpret_cast<Row(*)[BOX]>(resident_memory);
    auto* of_warps = reinterpret_cast<States*>(slot + slots);
    auto* of_blocks = of_warps + WARPS;
    auto& of_line = of_blocks[blocks];
    auto* arrived = reinterpret_cast<ArrivalBarrier*>(of_blocks + blocks + 1);
    auto* exchanged = arrived + boxes;
    if (threadIdx.x == 0) {
        for (int k = 0; k < boxes + RESIDENT_MERGES; k++) arrived[k].init();
        ArrivalBarrier::announce();
        for (int k = 0; k < RESIDENT_MERGES; k++) exchanged[k].expect(blocks * sizeof(States));
    }
    // No block may be sent anything before its barriers are there.
    if (blocks > 1) Exchange::begin();
    __syncthreads();
    wait_for_kernel_before(true);

    const int strips = (inner + COLUMNS - 1) / COLUMNS, strip = blockIdx.x / blocks, outer = strip / strips;
    const int first = (strip - outer * strips) * COLUMNS;
    // The L2 cache is to keep results, where it has no room for both tensors, and else what has been read.
    const EitherAccess reads(streams), writes(!streams);
    const auto rows_of = [&](int box) { return slot[box < slots ? box : box - slots]; };
    const auto fetch = [&](int box) {
        arrived[box].expect(BOX * sizeof(Row));
        copy_box(rows_of(box), map, first, rank * rows + box * BOX, outer, arrived[box], reads.policy);
    };
    // Each thread takes a unit of two columns.
    const bool inside = first + lane * 2 < inner;
    const int64_t line = int64_t(outer) * len * inner + first + lane * 2;
    const int here = len - rank * rows;
    const int mine = (here < rows ? here : rows) - warp;  // rows from the warp's first on
    Unit<T> top[RESIDENT_FIRST];
#pragma unroll
    for (int row = 0; row < RESIDENT_FIRST; row++) {
        top[row] = no_elements<T>();
        load_bits_if(inside && row < len, bits_of(top[row]), x + line + int64_t(row) * inner);
    }
    // Behind the first rows, which would wait for the boxes: (64, 1700, 128) dim 1 bf16 15.3 us on an H200, so 13.9. Two warps ask for
    // them: (64, 1000, 128) 8.25 us on an H100, one 8.37, four 8.72.
    if (warp < 2 && lane == 0) {
        for (int box = warp; box < slots; box += 2) fetch(box);
    }
    Unit<T> max = top[0];
#pragma unroll
    for (int row = 1; row < RESIDENT_FIRST; row++) max = greater(max, top[row]);

    RelativeExponential exponential[2];
    float sum[2];
    const auto refer_to = [&](const float (&maxima)[2]) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            exponential[c] = RelativeExponential(part_reference(maxima[c]));
            sum[c] = 0;
        }
    };
    const auto grow = [&](Unit<T> unit) { max = greater(max, unit); };
    const auto add = [&](Unit<T> unit) {
        if (LOG) grow(unit);
#pragma unroll
        for (int c = 0; c < 2; c++) sum[c] += exponential[c](Element<T>::of_unit(unit, c));
    };
    // f(unit) for the thread's rows of a box, in order, all of which are read at once.
    const auto each_of_box = [&](int box, const auto& f) {
        const Row* from = rows_of(box) + warp;
        const int left = mine - box * BOX;
        if (left > (STEPS - 1) * WARPS) {
            Unit<T> units[STEPS];
#pragma unroll
            for (int k = 0; k < STEPS; k++) units[k] = from[k * WARPS][lane];
#pragma unroll
            for (int k = 0; k < STEPS; k++) f(units[k]);
        } else {
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                if (k * WARPS < left) f(from[k * WARPS][lane]);
            }
        }
    };
    // Of the boxes whose place others take, which are whole
    Unit<T> held[HELD > 0 ? HELD * STEPS : 1];
    const auto each_held = [&](const auto& f) {
#pragma unroll
        for (int k = 0; k < HELD * STEPS; k++) {
            if (k < kept * STEPS) f(held[k]);
        }
    };
    const auto each_row = [&](const auto& f) {
        each_held(f);
#pragma unroll 1
        for (int box = kept; box < boxes; box++) each_of_box(box, f);
    };
    // Maxima of all warps and blocks, and their sums, a column to a thread. Whether all references were near enough to the maximum: they
    // add about 1, and one that is less than the maximum by 55 (of logarithms 27) costs a relative 3e-6 (1e-6).
    const auto merge = [&](int time) {
        const float greatest[] = {Element<T>::of_unit(max, 0), Element<T>::of_unit(max, 1)};
        reinterpret_cast<float4*>(of_warps[warp])[lane] = {greatest[0], sum[0], greatest[1], sum[1]};
        __syncthreads();
        if (blocks > 1) {
            if (time > 0) Exchange::arrive();  // what was sent here before has been read
            Exchange::wait();
        }
        bool near = true;
        if (threadIdx.x < COLUMNS) {
            const auto merged = [&](const States* parts, int count) {
                auto all = parts[0][threadIdx.x];
#pragma unroll 16
                for (int i = 1; i < count; i++) {
                    if (LOG || time > 0) all.max = greater(all.max, parts[i][threadIdx.x].max);
                    all.sum += parts[i][threadIdx.x].sum;
                }
                return all;
            };
            auto all = merged(of_warps, WARPS);
            if (blocks > 1) {
                for (int block = 0; block < blocks; block++) send(block, of_blocks[rank] + threadIdx.x, all, exchanged[time]);
                exchanged[time].wait(0);
                all = merged(of_blocks, blocks);
            }
            of_line[threadIdx.x] = all;
            near = all.sum >= 0.5f * HalfElement::EXP_SCALE && all.sum < HalfElement::EXP_SCALE * (LOG ? 0x1p40f : 0x1p80f);
        }
        return __syncthreads_and(near);
    };

    refer_to({Element<T>::of_unit(max, 0), Element<T>::of_unit(max, 1)});
    if constexpr (HELD > 0) {
#pragma unroll
        for (int box = 0; box < HELD; box++) {
            if (box < kept) {
                arrived[box].wait(0);
#pragma unroll
                for (int k = 0; k < STEPS; k++) held[box * STEPS + k] = slot[box][k * WARPS + warp][lane];
            }
        }
        announce_to_copies();
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int box = slots; box < boxes; box++) fetch(box);
        }
        each_held(add);
    }
#pragma unroll 1
    for (int box = kept; box < boxes; box++) {
        arrived[box].wait(0);
        each_of_box(box, add);
    }
    if (!merge(0)) {
        // Once more, relative to the maximum itself.
        each_row(grow);
        merge(1);
        refer_to({of_line[lane * 2].max, of_line[lane * 2 + 1].max});
        each_row(add);
        merge(2);
    }
    if (!inside) return;

    Output<float> output[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        auto state = of_line[lane * 2 + c];
        if constexpr (LOG) {
            // Rounded as the maximum's own exponential was in the sum
            state.sum /= exponential[c](part_reference(state.max));
            output[c] = Output<float>(state);
        } else {
            output[c] = Output<float>::of_sum(state.sum);
        }
    }
    T* to = y + line + (int64_t(rank) * rows + warp) * inner;
    const int64_t jump = int64_t(WARPS) * inner;
    each_row([&](Unit<T> unit) {
        const auto results = pack_of<T, 2>([&](int c) {
            const float x = Element<T>::of_unit(unit, c);
            return output[c].of_kept(LOG ? x : exponential[c](x));
        });
        writes.store_unit(to, results.units[0]);
        to += jump;
    });
}
