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
constexpr int RESIDENT_COLUMNS = 64, RESIDENT_WARPS = 16, RESIDENT_BOX = 64;
constexpr int RESIDENT_SLOTS = 25, RESIDENT_FIRST = 4, RESIDENT_MERGES = 3;
// Half of a strip's warps take every other box, so that some wait for what arrives while the others have exponentials to take: in a model of
// this kernel, whose lengths are constants, 8.05 us with all in step, so 7.4, in four parts 7.7 (H200).
constexpr int RESIDENT_TURNS = 2;

// Grid: a cluster for each strip of neighbouring lines, times outer. Rows and the input begin at multiples of 16 bytes, the output of 4.
// `rows`: of a block. Shared memory has slots for their boxes; where it has not enough, the last boxes, up to HELD, take the place of the
// first, which are kept in registers. Shared memory: the slots, (warps + 2 x blocks + 1) x columns states, and a barrier for each box and
// merge. The code is kept short: what is computed before the first copy, and what a loop does beside its elements, is waited for (8.0 us
// became 7.8 without divisions; were all lengths constants, 7.4).
template <typename T, template <typename> class Output, int HELD>
__device__ __forceinline__ void resident_lines(const TensorMap& map, const T* x, T* y, int len, int inner, int rows, int streams,
                                               Scaling<float> scaling) {
    using Exchange = ClusterExchange<float>;
    constexpr bool LOG = !Output<float>::OF_EXPONENTIAL;
    constexpr int COLUMNS = RESIDENT_COLUMNS, BOX = RESIDENT_BOX, WARPS = RESIDENT_WARPS, TURNS = RESIDENT_TURNS;
    constexpr int SIDE_BY_SIDE = WARPS / TURNS, STEPS = BOX / SIDE_BY_SIDE;
    static_assert(TURNS == 2 && HELD % TURNS == 0);
    using Row = Unit<T>[COLUMNS / 2];
    using States = Normalizer<float>[COLUMNS];
    extern __shared__ __align__(128) unsigned char resident_memory[];
    const int blocks = Exchange::blocks(), rank = Exchange::rank(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int turn = warp / SIDE_BY_SIDE, top_row = warp % SIDE_BY_SIDE;
    const int boxes = (rows + BOX - 1) / BOX, slots = HELD > 0 ? RESIDENT_SLOTS : boxes, kept = boxes - slots;
    auto* slot = reinterpret_cast<Row(*)[BOX]>(resident_memory);
    auto* of_warps = reinterpret_cast<States*>(slot + slots);
    auto& of_line = of_warps[WARPS];
    auto* of_blocks = of_warps + WARPS + 1;
    auto* arrived = reinterpret_cast<ArrivalBarrier*>(of_blocks + 2 * blocks);
    auto* exchanged = arrived + boxes;
    if (threadIdx.x < boxes + RESIDENT_MERGES) {
        arrived[threadIdx.x].init();
        ArrivalBarrier::announce();
        if (threadIdx.x >= boxes) arrived[threadIdx.x].expect(blocks * sizeof(States));
    }
    // No block may be sent anything before its barriers are there.
    if (blocks > 1) Exchange::begin();
    // Each thread takes a unit of two columns.
    const int first_column = Exchange::cluster() * COLUMNS, column = first_column + lane * 2, outer = blockIdx.y;
    const bool inside = column < inner;
    const int64_t line = int64_t(outer) * len * inner + column;
    const int here = len - rank * rows;
    const int mine = (here < rows ? here : rows) - top_row;  // rows from the warp's first on
    __syncthreads();
    wait_for_kernel_before(true);

    // The L2 cache is to keep results, where it has no room for both tensors, and else what has been read. What HELD is 0 for fits,
    // or nearly so, and has no need of policies, which take time of their own ((64, 1000, 128) 7.8 us, so 7.7).
    const EitherAccess reads(streams), writes(!streams);
    const auto slot_of = [&](int box) { return slot[box < slots ? box : box - slots]; };
    const auto fetch = [&](int box) {
        arrived[box].expect(BOX * sizeof(Row));
        const int row = rank * rows + box * BOX;
        if (HELD > 0) copy_box(slot_of(box), map, first_column, row, outer, arrived[box], reads.policy);
        else copy_box(slot_of(box), map, first_column, row, outer, arrived[box]);
    };
    Unit<T> top[RESIDENT_FIRST];
#pragma unroll
    for (int row = 0; row < RESIDENT_FIRST; row++) {
        top[row] = no_elements<T>();
        load_bits_if(inside && row < len, bits_of(top[row]), x + line + int64_t(row) * inner);
    }
    // Behind the first rows, which would wait for the boxes: (64, 1700, 128) dim 1 bf16 15.3 us on an H200, so 13.9. Two warps ask for
    // them: (64, 1000, 128) 8.25 us on an H100, one 8.37, four 8.72.
    if (warp < 2 && lane == 0) {
#pragma unroll 1
        for (int box = warp; box < slots; box += 2) fetch(box);
    }
    Unit<T> max = top[0];
#pragma unroll
    for (int row = 1; row < RESIDENT_FIRST; row++) max = greater(max, top[row]);

    RelativeExponential exponential[2];
    float sum[2];
    const auto refer_to = [&](float first, float second) {
        exponential[0] = RelativeExponential(part_reference(first), scaling);
        exponential[1] = RelativeExponential(part_reference(second), scaling);
        sum[0] = sum[1] = 0;
    };
    const auto grow = [&](Unit<T> unit) { max = greater(max, unit); };
    const auto add = [&](Unit<T> unit) {
        if (LOG) grow(unit);
#pragma unroll
        for (int c = 0; c < 2; c++) sum[c] += exponential[c](Element<T>::of_unit(unit, c));
    };
    // f(unit, rows below the thread's first, whether it is there) for those of a box: all, but -inf for those that are not there. Branches
    // would take them one by one.
    const auto each_of_box = [&](int box, const auto& f) {
        const Row* from = slot_of(box) + top_row;
        const int left = mine - box * BOX;
        const auto each = [&](auto all) {
            constexpr bool ALL = decltype(all)::value;
            Unit<T> units[STEPS];
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                units[k] = no_elements<T>();
                if (ALL || k * SIDE_BY_SIDE < left) units[k] = from[k * SIDE_BY_SIDE][lane];
            }
#pragma unroll
            for (int k = 0; k < STEPS; k++) f(units[k], k * SIDE_BY_SIDE, ALL || k * SIDE_BY_SIDE < left);
        };
        if (left > (STEPS - 1) * SIDE_BY_SIDE) each(std::true_type());
        else each(std::false_type());
    };
    // Of the boxes whose place others take, which are whole
    Unit<T> held[HELD > 0 ? HELD / TURNS * STEPS : 1];
    if constexpr (HELD > 0) {
#pragma unroll
        for (int k = 0; k < HELD / TURNS; k++) {
            const int box = k * TURNS + turn;
            if (box >= kept) continue;
            arrived[box].wait(0);
#pragma unroll
            for (int step = 0; step < STEPS; step++) held[k * STEPS + step] = slot[box][top_row + step * SIDE_BY_SIDE][lane];
        }
        announce_to_copies();
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll 1
            for (int box = slots; box < boxes; box++) fetch(box);
        }
    }
    // The same for the thread's rows of all boxes that it is its warp's turn to take; of(row) answers the f of a box, whose first row it is.
    const auto each_row = [&](auto awaited, const auto& of) {
#pragma unroll
        for (int k = 0; k < HELD / TURNS; k++) {
            const int box = k * TURNS + turn;
            if (box >= kept) continue;
            const auto f = of(box * BOX + top_row);
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                // What it is as numbers is not to be kept as well.
                auto unit = held[k * STEPS + step];
                forget(unit);
                f(unit, step * SIDE_BY_SIDE, true);
            }
        }
#pragma unroll 1
        for (int box = kept + ((kept ^ turn) & 1); box < boxes; box += TURNS) {
            if (decltype(awaited)::value) arrived[box].wait(0);
            each_of_box(box, of(box * BOX + top_row));
        }
    };
    // Maxima of all warps and blocks, and their sums, a column to a thread. Whether all references were near enough to the maximum: they
    // add about 1, and one that is less than the maximum by 55 (of logarithms 27) costs a relative 3e-6 (1e-6).
    const auto merge = [&](int time) {
        reinterpret_cast<float4*>(of_warps[warp])[lane] = {Element<T>::of_unit(max, 0), sum[0], Element<T>::of_unit(max, 1), sum[1]};
        __syncthreads();
        if (blocks > 1 && time == 0) Exchange::wait();
        bool near = true;
        if (threadIdx.x < COLUMNS) {
            auto all = of_warps[0][threadIdx.x];
            const auto join = [&](const States& part) {
                all.max = greater(all.max, part[threadIdx.x].max);
                all.sum += part[threadIdx.x].sum;
            };
#pragma unroll
            for (int warp = 1; warp < WARPS; warp++) join(of_warps[warp]);
            if (blocks > 1) {
                // What was sent here two times before has been read by all that have sent anything since.
                States* others = of_blocks + time % 2 * blocks;
#pragma unroll 1
                for (int block = 0; block < blocks; block++) send(block, others[rank] + threadIdx.x, all, exchanged[time]);
                exchanged[time].wait(0);
                all = others[0][threadIdx.x];
#pragma unroll 4
                for (int block = 1; block < blocks; block++) join(others[block]);
            }
            of_line[threadIdx.x] = {all.max, LOG ? all.sum : reciprocal(all.sum + scaling.least)};
            near = all.sum >= 0.5f * HalfElement::EXP_SCALE && all.sum < HalfElement::EXP_SCALE * (LOG ? 0x1p40f : 0x1p80f);
        }
        return __syncthreads_and(near);
    };

    refer_to(Element<T>::of_unit(max, 0), Element<T>::of_unit(max, 1));
    // Once, if all is well; or the maxima are found, and then the sums relative to them. The code is the same: it is to stay in its cache.
#pragma unroll 1
    for (int time = 0; time < RESIDENT_MERGES; time++) {
        if (time == 1) {
            each_row(std::false_type(), [&](int) { return [&](Unit<T> unit, int, bool) { grow(unit); }; });
        } else {
            each_row(std::true_type(), [&](int) { return [&](Unit<T> unit, int, bool) { add(unit); }; });
        }
        const bool near = merge(time);
        if (time == 0 && near) break;
        if (time == 1) refer_to(of_line[lane * 2].max, of_line[lane * 2 + 1].max);
    }
    if (!inside) return;

    Output<float> output[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        auto state = of_line[lane * 2 + c];
        if constexpr (LOG) {
            // Rounded as the maximum's own exponential was in the sum
            state.sum /= exponential[c](part_reference(state.max));
            output[c] = Output<float>(state, scaling);
        } else {
            output[c] = Output<float>::of_inverse(state.sum);
        }
    }
    T* to = y + line + int64_t(rank) * rows * inner;
    each_row(std::false_type(), [&](int row) {
        T* of_box = to + int64_t(row) * inner;
        return [&, of_box](Unit<T> unit, int below, bool there) {
            const auto results = pack_of<T, 2>([&](int c) {
                const float x = Element<T>::of_unit(unit, c);
                return output[c].of_kept(LOG ? x : exponential[c](x));
            });
            auto* at = reinterpret_cast<Pack<T, 2>*>(of_box + uint64_t(uint32_t(inner)) * below);
            if (there) {
                if (HELD > 0) store_by(writes.policy, at, results);
                else store_streaming(at, results);
            }
        };
    });
}
