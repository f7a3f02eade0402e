// Softmax of few very long lines on Hopper: one block to a multiprocessor, and a line is held by the shared memory and registers of
// many while they tell each other the maximum and sum of their parts. Each element is read once and written once, so the ceiling is
// a copy; but nothing is written before all of a line was read, and the memory does one after the other.
#pragma once
#include <cooperative_groups.h>

#include "bulk.cuh"
#include "exchange.cuh"
#include "register_softmax.cuh"

// A block's warps share chunks of 4 KB, two and two: eight chunks are in work at a time, each for long enough to have its
// exponentials hide the others' wait (1 x 16777216 bf16: with chunks of all warps 25.0 us, of four 23.2, of two 22.2).
constexpr int GRID_THREADS = 512, CHUNK_THREADS = 64, CHUNK_GROUPS = GRID_THREADS / CHUNK_THREADS, CHUNK_BYTES = 4096;
// A group has seven chunks in shared memory, side by side since copies to multiples of 128 bytes are faster (22.2 us, by 16 bytes
// 23.7), of which two are on their way (a third of a microsecond faster than all at once); and where that is not enough, one more in
// registers.
constexpr int SLOTS = 7 * CHUNK_GROUPS, AHEAD = 2 * CHUNK_GROUPS;

// A line's chunks: where they are cut, packs of 16 bytes of the output begin. The packs of the input that a chunk is in begin `shift`
// elements before it, and one more is needed behind them.
template <typename T>
struct LineChunks {
    static constexpr int SIZE = 16 / sizeof(T), PACKS = CHUNK_BYTES / 16, CHUNK = PACKS * SIZE;
    const T* x;  // of the line
    T* y;
    int64_t len;
    int64_t tensor_begin, tensor_end;  // from the line's begin on
    int shift, before;                 // `before` elements of the first pack of the output lie before the line
    int part, parts;                   // The block's chunks are part, part + parts, ..., so that all blocks read side by side.
    int count, first_full, last_full;  // of the line; which lie in it with all of their packs

    __device__ __forceinline__ LineChunks(const T* x, T* y, int lines, int64_t len) : len(len) {
        const auto number = [](const T* at) { return static_cast<int>(reinterpret_cast<uintptr_t>(at) / sizeof(T)); };
        parts = gridDim.x / lines;
        const int line = blockIdx.x / parts;
        part = blockIdx.x - line * parts;
        tensor_begin = -line * len;
        tensor_end = (lines - line) * len;
        this->x = x - tensor_begin;
        this->y = y - tensor_begin;
        before = number(this->y) & (SIZE - 1);
        shift = (number(this->x) - before) & (SIZE - 1);
        const int64_t room = len + before + shift;
        count = static_cast<int>((room + CHUNK - 1) / CHUNK);
        first_full = before + shift > 0;
        last_full = static_cast<int>((room - (shift > 0 ? SIZE : 0)) / CHUNK) - 1;
    }
    __device__ __forceinline__ bool is_full(int chunk) const { return chunk >= first_full && chunk <= last_full; }
    // The first element of the packs of the input that it is in, which may lie before the line or the tensor
    __device__ __forceinline__ int64_t begin(int chunk) const { return int64_t(chunk) * CHUNK - before - shift; }
    // Of a pack
    __device__ __forceinline__ bool is_of_tensor(int64_t begin) const {
        return begin >= tensor_begin && begin + SIZE <= tensor_end;
    }

    // Has those packs of a chunk, and the one behind it, copied into shared memory that lie in the tensor whole and are needed.
    __device__ __forceinline__ void fetch(int chunk, Pack<T, SIZE>* slot, Pack<T, SIZE>* behind, ArrivalBarrier& arrived) const {
        const int64_t begin = this->begin(chunk);
        int first = 0, end = PACKS, more = shift > 0;
        if (!is_full(chunk)) {
            const int64_t needed = tensor_end < len + SIZE ? tensor_end : len + SIZE;
            if (begin < tensor_begin) first = static_cast<int>((tensor_begin - begin + SIZE - 1) / SIZE);
            if (begin + CHUNK > needed) end = static_cast<int>((needed - begin) / SIZE);
            if (end < first) end = first;
            if (begin + CHUNK + SIZE > needed) more = 0;
        }
        arrived.expect((end - first + more) * 16);
        if (end > first) copy_in(slot + first, x + begin + first * SIZE, (end - first) * 16, arrived);
        if (more) copy_in(behind, x + begin + CHUNK, 16, arrived);
    }
    // A pack of which some may lie outside, element by element
    __device__ __forceinline__ Pack<T, SIZE> one(int64_t begin) const {
        const int64_t from = tensor_begin - begin, to = tensor_end - begin;
        if (from >= SIZE || to <= 0) return no_pack<T, SIZE>();
        return RegisterLine<T, SIZE, false, 0>::load_part(x + begin, from > 0 ? int(from) : 0, to < SIZE ? int(to) : SIZE);
    }
    // Without what of a pack is not of the line
    __device__ __forceinline__ Pack<T, SIZE> in_line(Pack<T, SIZE> pack, int64_t begin) const {
        if (begin >= len || begin <= -SIZE) return no_pack<T, SIZE>();
        return part_of(pack, begin < 0 ? int(-begin) : 0, len - begin < SIZE ? int(len - begin) : SIZE);
    }
};

// A thread's maximum and its sum, of a few dozen terms, relative to a reference that follows the maximum from afar: rescaling is
// seldom.
struct ThreadSum {
    float max = negative_infinity<float>(), reference = negative_infinity<float>(), sum = 0;

    // Answers the reference.
    __device__ __forceinline__ float grow(float other, Scaling<float> scaling) {
        max = greater(max, other);
        if (scaling.logit(max - reference) > 8.0f) {
            sum *= quick_exponential(scaling.logit(reference - max));
            reference = max;
        }
        return part_reference(reference);
    }
    __device__ __forceinline__ Normalizer<float> finish(float unscale, Scaling<float> scaling) const {
        const float total = sum * unscale * quick_exponential(scaling.logit(reference - part_reference(max)));
        // The maximum itself adds 1: what lies below is rounding, and would let p pass 1.
        return {max, max == negative_infinity<float>() ? sum : total < 1.0f ? 1.0f : total};
    }
};

// Grid: parts x lines, all at once, a line's in a cluster or in any place. `of_parts` has room for the state of each block, where they are
// in any place; it may be in the output's first chunk, if that is not the input's, which is written last then.
template <typename T>
__device__ __forceinline__ void grid_lines(const T* x, Normalizer<float>* of_parts, T* y, int lines, int64_t len, bool log, Scaling<float> scaling) {
    using Chunks = LineChunks<T>;
    using Exchange = ClusterExchange<float>;
    constexpr int SIZE = Chunks::SIZE, PER_UNIT = Element<T>::PER_UNIT;
    constexpr int MINE = Chunks::PACKS / CHUNK_THREADS;  // packs of a thread
    using P = Pack<T, SIZE>;
    extern __shared__ __align__(128) unsigned char grid_memory[];
    const auto slot = [&](int i) { return reinterpret_cast<P*>(grid_memory + i * CHUNK_BYTES); };
    auto* behind_slots = slot(SLOTS);
    auto* arrived = reinterpret_cast<ArrivalBarrier*>(behind_slots + SLOTS);
    auto& exchanged = arrived[SLOTS];
    auto* of_warps = reinterpret_cast<Normalizer<float>*>(&exchanged + 1);
    auto* of_blocks = of_warps + GRID_THREADS / 32;  // of the cluster, or of warps again
    const bool clusters = Exchange::blocks() > 1;
    const bool far = !clusters && gridDim.x > lines;  // the parts of a line
    const bool lent = far && reinterpret_cast<uintptr_t>(of_parts) - reinterpret_cast<uintptr_t>(y) < CHUNK_BYTES;
    const bool lends = lent && blockIdx.x == 0;
    if (clusters) Exchange::begin(exchanged, Exchange::blocks() * sizeof(Normalizer<float>));
    const int group = threadIdx.x / CHUNK_THREADS, own = threadIdx.x % CHUNK_THREADS;
    // One thread of a group sees to its barriers and copies; but the first of a long line are asked for by one warp, 0.4 us earlier
    // (pairs would take 0.7 us more).
    if (!clusters) {
        if (threadIdx.x < SLOTS) {
            arrived[threadIdx.x].init();
            ArrivalBarrier::announce();
        }
    } else if (own == 0) {
#pragma unroll
        for (int i = 0; i < SLOTS; i += CHUNK_GROUPS) arrived[i + group].init();
        ArrivalBarrier::announce();
    }
    const Chunks chunks(x, y, lines, len);
    // Of the block's chunks, the second for each group that has one there is in registers: it lies in the line whole.
    const int all = (chunks.count - chunks.part + chunks.parts - 1) / chunks.parts;
    const int held = all > SLOTS ? all - SLOTS : 0, slots = all - held;
    const auto chunk = [&](int i) { return (i < CHUNK_GROUPS ? i : i + held) * chunks.parts + chunks.part; };
    const int held_chunk = (CHUNK_GROUPS + group) * chunks.parts + chunks.part;
    // The thread's packs of a chunk: two warps have a half each.
    const auto place = [&](int k) { return (own / 32 * MINE + k) * 32 + own % 32; };
    const auto fetch = [&](int i) { chunks.fetch(chunk(i), slot(i), behind_slots + i, arrived[i]); };
    wait_for_kernel_before(true);

    P in_registers[MINE], behind;
    if (group < held) {
        const auto* from = reinterpret_cast<const P*>(chunks.x + chunks.begin(held_chunk));
#pragma unroll
        for (int k = 0; k < MINE; k++) in_registers[k] = load(from + place(k));
        if (own == 0) behind = load(from + Chunks::PACKS);
    }
    if (!clusters) {
        if (threadIdx.x < AHEAD && threadIdx.x < slots) fetch(threadIdx.x);
    } else if (own == 0) {
        for (int i = group; i < AHEAD && i < slots; i += CHUNK_GROUPS) fetch(i);
    }
    __syncthreads();

    ThreadSum state;
#pragma unroll 1
    for (int i = group < held ? group - CHUNK_GROUPS : group; i < slots; i += CHUNK_GROUPS) {
        P packs[MINE];
        if (i < 0) {
#pragma unroll
            for (int k = 0; k < MINE; k++) packs[k] = in_registers[k];
        } else {
            arrived[i].wait(0);
            if (own == 0 && i + AHEAD < slots) fetch(i + AHEAD);
            P* from = slot(i);
            if (!chunks.is_full(chunk(i))) {
                // What was not copied is put beside the rest, and -inf takes the place of what is not of the line.
#pragma unroll 1
                for (int k = 0; k < MINE + (own == 0); k++) {
                    const int64_t at = chunks.begin(chunk(i)) + (k < MINE ? place(k) : Chunks::PACKS) * SIZE;
                    P& pack = k < MINE ? from[place(k)] : behind_slots[i];
                    pack = chunks.in_line(chunks.is_of_tensor(at) ? pack : chunks.one(at), at);
                }
            }
#pragma unroll
            for (int k = 0; k < MINE; k++) packs[k] = from[place(k)];
        }
        Unit<T> greatest = packs[0].units[0];
#pragma unroll
        for (const P& pack : packs) {
#pragma unroll
            for (const auto& unit : pack.units) greatest = greater(greatest, unit);
        }
        const float reference = state.grow(max_of_unit<T>(greatest), scaling);
        float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < MINE; k++) {
#pragma unroll
            for (int e = 0; e < SIZE; e++) {
                const float x = Element<T>::of_unit(packs[k].units[e / PER_UNIT], e % PER_UNIT);
                sums[e % 8] += exponential_of<T>(x - reference, scaling);
            }
        }
        state.sum += pairwise_sum(sums);
    }

    // While the blocks tell each other their parts, the exponentials of a group's first chunk are made, relative to what is known by now
    // (0.4 us). All results are made so, unless elements are to be shifted.
    const auto part = block_merge(state.finish(unscale<T>(), scaling), of_warps, scaling.scale);
    float reference = part_reference(part.max);
    const auto exponential = [&](float x) { return exponential_of<T>(x - reference, scaling); };
    const bool later = lends && group == 0;
    const bool early = !later && chunks.shift == 0 && !log && group < slots && chunks.is_full(chunk(group));
    float exponentials[MINE][SIZE];
    const auto meanwhile = [&] {
        if (!early) return;
#pragma unroll
        for (int k = 0; k < MINE; k++) {
            const P pack = slot(group)[place(k)];
#pragma unroll
            for (int e = 0; e < SIZE; e++) exponentials[k][e] = exponential(Element<T>::of_unit(pack.units[e / PER_UNIT], e % PER_UNIT));
        }
    };
    auto line = part;
    const auto grid = cooperative_groups::this_grid();
    cooperative_groups::grid_group::arrival_token merged;
    if (clusters) {
        Exchange::wait();
        if (threadIdx.x < Exchange::blocks()) send(threadIdx.x, of_blocks + Exchange::rank(), part, exchanged);
        meanwhile();
        exchanged.wait(0);
        line = merge_parts(of_blocks, Exchange::blocks(), scaling.scale);
    } else if (far) {
        if (threadIdx.x == 0) of_parts[blockIdx.x] = part;
        auto told = grid.barrier_arrive();
        meanwhile();
        grid.barrier_wait(std::move(told));
        line = merge_far_parts<5>(of_parts + (blockIdx.x - chunks.part), chunks.parts, of_blocks, scaling.scale);
        if (lent) merged = grid.barrier_arrive();
    } else {
        meanwhile();
    }

    // Where a part is all -inf its exponentials are 0, relative to anything. Shifted, the last elements of a chunk are of another part,
    // whose maximum may be any.
    float part_max = part.max;
    if (chunks.shift > 0 || part.max == negative_infinity<float>()) part_max = line.max;
    if (chunks.shift > 0) reference = part_reference(line.max);
    const auto probability = Probability<float>::of_part(part_max, line, unscale<T>(), scaling);
    const auto log_probability = LogProbability<float>(line, scaling);
    const auto finish = [&](P (&packs)[MINE]) {
        const auto each = [&](auto result) {
#pragma unroll
            for (P& pack : packs) {
#pragma unroll
                for (auto& unit : pack.units) {
                    float numbers[PER_UNIT];
#pragma unroll
                    for (int e = 0; e < PER_UNIT; e++) numbers[e] = result(Element<T>::of_unit(unit, e));
                    unit = Element<T>::to_unit(numbers);
                }
            }
        };
        if (log) each([&](float x) { return log_probability.of_kept(x); });
        else each([&](float x) { return probability.of_kept(exponential(x)); });
    };
    int next = later ? group + CHUNK_GROUPS : group;
    if (early) {
        auto* to = reinterpret_cast<P*>(chunks.y + chunks.begin(chunk(next)));
#pragma unroll
        for (int k = 0; k < MINE; k++) {
            store_streaming(to + place(k), pack_of<T, SIZE>([&](int e) { return probability.of_kept(exponentials[k][e]); }));
        }
        next += CHUNK_GROUPS;
    }
    // Chunks that lie in the line whole and as the output's do need no more than this (0.4 us).
    if (chunks.shift == 0) {
#pragma unroll 1
        for (; next < slots && chunks.is_full(chunk(next)); next += CHUNK_GROUPS) {
            P results[MINE];
#pragma unroll
            for (int k = 0; k < MINE; k++) results[k] = slot(next)[place(k)];
            finish(results);
            auto* to = reinterpret_cast<P*>(chunks.y + chunks.begin(chunk(next)));
#pragma unroll
            for (int k = 0; k < MINE; k++) store_streaming(to + place(k), results[k]);
        }
    }
    const auto write = [&](int here, int number, bool in_slot) {
        const P* packs = slot(here);
        P results[MINE];
        if (chunks.shift == 0) {
#pragma unroll
            for (int k = 0; k < MINE; k++) {
                if (in_slot) results[k] = packs[place(k)];
                else results[k] = in_registers[k];
            }
        } else {
            const bool odd = PER_UNIT == 2 && chunks.shift % 2;
#pragma unroll
            for (int k = 0; k < MINE; k++) {
                const auto* words = reinterpret_cast<const uint32_t*>(packs + place(k));
                const auto* next = reinterpret_cast<const uint32_t*>(place(k) + 1 < Chunks::PACKS ? packs + place(k) + 1 : behind_slots + here);
                uint32_t word[5];
#pragma unroll
                for (int u = 0; u < 3 + PER_UNIT; u++) {
                    const int w = chunks.shift / PER_UNIT + u;
                    word[u] = w < 4 ? words[w] : next[w - 4];
                }
#pragma unroll
                for (int u = 0; u < 4; u++) {
                    if (odd) word[u] = __byte_perm(word[u], word[u + 1], 0x5432);
                    results[k].units[u] = reinterpret_cast<const Unit<T>&>(word[u]);
                }
            }
        }
        finish(results);
        const int64_t begin = chunks.begin(number) + chunks.shift;
        auto* to = reinterpret_cast<P*>(chunks.y + begin);
        if (chunks.is_full(number)) {
#pragma unroll
            for (int k = 0; k < MINE; k++) store_streaming(to + place(k), results[k]);
            return;
        }
#pragma unroll
        for (int k = 0; k < MINE; k++) {
            const int64_t at = begin + place(k) * SIZE;
            if (at >= 0 && at + SIZE <= len) store_streaming(to + place(k), results[k]);
        }
        // Elements at either end of the line whose packs are not of it alone
        if (own < 2 * SIZE) {
            const int64_t tail = (len - begin) / SIZE * SIZE;
            const int64_t at = own < SIZE ? own : tail + own - SIZE, element = begin + at;
            const bool head = own < SIZE && begin < 0, behind_packs = own >= SIZE && begin + tail >= 0 && tail < Chunks::CHUNK;
            if ((head || behind_packs) && element >= 0 && element < len) {
                const int64_t from = at + chunks.shift;
                const P* pack = from < Chunks::CHUNK ? packs + from / SIZE : behind_slots + here;
                const float x = Element<T>::read(reinterpret_cast<const T*>(pack)[from % SIZE]);
                chunks.y[element] = Element<T>::write(log ? log_probability.of_kept(x) : probability.of_kept(exponential(x)));
            }
        }
    };
#pragma unroll 1
    for (int i = next;; i += CHUNK_GROUPS) {
        const bool in_slot = i < slots;
        const int here = in_slot ? i : group + CHUNK_GROUPS, number = in_slot ? chunk(i) : held_chunk;
        if (!in_slot) {
            // What is in registers comes after the others, by way of a slot that has been read if elements are to be shifted.
            if (held == 0) break;
            if (chunks.shift > 0) {
                __syncthreads();
                if (group < held) {
#pragma unroll
                    for (int k = 0; k < MINE; k++) slot(here)[place(k)] = in_registers[k];
                    if (own == 0) behind_slots[here] = behind;
                }
                __syncthreads();
            }
            if (group >= held) break;
        }
        write(here, number, in_slot);
        if (!in_slot) break;
    }
    if (lends) {
        // By now all have read the parts.
        grid.barrier_wait(std::move(merged));
        if (later) write(group, chunk(group), true);
    }
}
