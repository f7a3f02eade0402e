// The greatest elements of long lines.
//
// A block has a line, or a cluster where there are few. Each thread finds the greatest of the elements in a third of its tiles. What bounds the
// (k / blocks)-th greatest of those of each block is a threshold, and the least threshold of all blocks has k elements or more at or above it. These are
// collected as the line is read, about 3k where elements are in no order, and sorted: by warps, and then each counts those before it among what the other
// warps have. So a line is read once, and that third once more from a cache: the ceiling is half a copy.
//
// Where too few have anything but -inf, as of a masked line, all that do are collected, and the first places of those that do not.
//
// Where they are too many, the threshold is found by all tiles, and the line read twice. Where they are too many still, as of many equal ones, elements
// are selected by digits: they are counted by the most significant digit of their rank, which says in which digit the k-th is, and then those of it by
// the next (radix select; Alabi et al., 2012). Of equal ones the digits of the places are what decides. A line is read once for each digit.
#include "packed_line.cuh"
#include "start.cuh"
#include "top_k.cuh"

// A threshold is found by one in FOUND_BY of a line's tiles.
constexpr int FOUND_BY = 3, TOP_K_THREADS = 512, DIGIT_BITS = 10, DIGITS = 1 << DIGIT_BITS;

// Which keys are the greatest: those not below `prefix` once their lowest `shift` bits are taken off; of as many bits as were looked at so far.
template <typename Key>
struct Selection {
    Key prefix;
    int shift;
    int wanted;  // how many of those with this very prefix
    bool all;    // whether that is all there are
};

__device__ __forceinline__ void sync_blocks() {
    if (Cluster::blocks() > 1) Cluster::sync();
    else __syncthreads();
}

struct SelectShared {
    uint32_t counts[DIGITS], all_counts[DIGITS];  // of elements with each digit, of this block and of all
    uint32_t of_warp[32];
    uint32_t digit, above, here;
};

// Finds the digit that the `wanted`-th greatest has, given how many have each; how many have a greater one, and this one.
__device__ __forceinline__ void find_digit(SelectShared& shared, uint32_t wanted) {
    // Each thread has neighbours, the greatest digits first.
    const int each = DIGITS / blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = DIGITS - 1 - threadIdx.x * each;
    uint32_t sum = 0;
    for (int digit = first; digit > first - each; digit--) {
        uint32_t count = shared.counts[digit];
        for (unsigned block = 1; block < Cluster::blocks(); block++) {
            count += *Cluster::of_block((Cluster::rank() + block) % Cluster::blocks(), &shared.counts[digit]);
        }
        shared.all_counts[digit] = count;
        sum += count;
    }
    uint32_t before = sum;  // up to this thread's last one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) shared.of_warp[warp] = before;
    __syncthreads();
    for (int w = 0; w < warp; w++) before += shared.of_warp[w];
    before -= sum;
    if (before >= wanted || wanted > before + sum) return;
    for (int digit = first; digit > first - each; digit--) {
        const uint32_t count = shared.all_counts[digit];
        if (wanted <= before + count) {
            shared.digit = digit, shared.above = before, shared.here = count;
            return;
        }
        before += count;
    }
}

// f(i, rank) for the elements of a line, as far as this thread's warp shares them, by all of its lanes alike: some i are past the end.
template <typename T, typename F>
__device__ __forceinline__ void each_of_line(const T* x, int64_t len, F f) {
    constexpr int TILE = 4;
    const int64_t threads = Cluster::blocks() * int64_t(blockDim.x), first = Cluster::rank() * int64_t(blockDim.x) + threadIdx.x;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int64_t from = first; from - lane < len; from += TILE * threads) {
        T tile[TILE];
        // All are asked for before any is waited for.
#pragma unroll
        for (int n = 0; n < TILE; n++) tile[n] = x[min(from + n * threads, len - 1)];
#pragma unroll
        for (int n = 0; n < TILE; n++) f(from + n * threads, short_rank_of(tile[n]));
    }
}

// The `wanted` greatest keys, of `bits` bits each, of all threads: each(f) is to call f(whether there is one, a key) for a thread's, as
// often for each lane of a warp.
template <typename Key, typename Each>
__device__ __forceinline__ Selection<Key> select(SelectShared& shared, int bits, int wanted, Each each) {
    Selection<Key> found{0, bits, wanted, false};
#pragma unroll 1
    while (found.shift > 0 && !found.all) {
        const int width = found.shift < DIGIT_BITS ? found.shift : DIGIT_BITS, shift = found.shift - width;
        for (int i = threadIdx.x; i < DIGITS; i += blockDim.x) shared.counts[i] = 0;
        __syncthreads();
        each([&](bool counts, Key key) {
            if (found.shift < bits) counts = counts && key >> found.shift == found.prefix;
            const uint32_t digit = counts ? static_cast<uint32_t>(key >> shift) & ((1u << width) - 1) : DIGITS;
            // Many are the same where a line is masked.
            int same;
            __match_all_sync(~0u, digit, &same);
            if (digit < DIGITS && (!same || threadIdx.x % 32 == 0)) atomicAdd(&shared.counts[digit], same ? 32u : 1u);
        });
        sync_blocks();
        find_digit(shared, found.wanted);
        __syncthreads();
        found.prefix = found.prefix << width | shared.digit;
        found.shift = shift;
        found.wanted -= shared.above;
        found.all = shared.here == static_cast<uint32_t>(found.wanted);
        sync_blocks();  // all have read the counts
    }
    return found;
}

// A bound of the `wanted`-th greatest of what a block's threads have, from below, which hardly more of them reach than are wanted.
template <typename Rank>
__device__ __forceinline__ Rank threshold_of(Rank own, int wanted, int bits) {
    Rank threshold = 0;
#pragma unroll 1
    for (int bit = bits - 1; bit >= 0; bit--) {
        const Rank higher = threshold | Rank(1) << bit;
        const int reach = __syncthreads_count(own >= higher);
        if (reach < wanted) continue;
        threshold = higher;
        if (reach <= wanted + wanted / 8) break;
    }
    return threshold;
}

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t key, int mask) { return __shfl_xor_sync(~0u, key, mask); }
__device__ __forceinline__ WideKey shuffle_xor(const WideKey& key, int mask) {
    return {shuffle_xor(key.rank, mask), __shfl_xor_sync(~0u, key.before, mask)};
}

// Each lane's key becomes the lane-th of the warp's, greatest first.
template <typename Key>
__device__ __forceinline__ Key sorted_by_warp(Key own) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
        for (int apart = size / 2; apart > 0; apart /= 2) {
            const Key other = shuffle_xor(own, apart);
            const bool wants_greater = ((lane & size) == 0) == ((lane & apart) == 0);
            if ((other > own) == wants_greater) own = other;
        }
    }
    return own;
}

// How many of 32 sorted keys are greater than one that is not among them.
template <typename Key>
__device__ __forceinline__ int count_greater(const Key* run, const Key& one) {
    int count = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) count += run[count + step - 1] > one ? step : 0;
    return count + (run[count] > one);
}

// Has by_rank[0..k] say which of the candidates are the greatest, in their order. There is room for a multiple of 32 of them.
template <typename Key>
__device__ __forceinline__ void sort(Key* candidates, int found, uint16_t* by_rank, int k) {
    const int runs = (found + 31) / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int run = warp; run < runs; run += warps) {
        const int i = run * 32 + lane;
        candidates[i] = sorted_by_warp(i < found ? candidates[i] : Key{});
    }
    __syncthreads();
#pragma unroll 1
    for (int run = warp; run < runs; run += warps) {
        const int i = run * 32 + lane;
        const Key own = candidates[i];
        int rank = lane;
#pragma unroll 4
        for (int other = 0; other < runs; other++) rank += other == run ? 0 : count_greater(candidates + other * 32, own);
        if (rank < k) by_rank[rank] = i;
    }
    __syncthreads();
}

// What a block or cluster collects, in the first block's memory.
template <typename Key>
struct Collection {
    Key* candidates;
    uint32_t* count;
    uint32_t room;

    __device__ __forceinline__ void add(const Key& key) const {
        const uint32_t at = atomicAdd(count, 1);
        if (at < room) candidates[at] = key;
    }

    // Calls one(i) for the candidates of the bits i that this lane wants; by all lanes of a warp.
    template <typename F>
    __device__ __forceinline__ void add(uint32_t wanted, const F& one) const {
        const int lane = threadIdx.x % 32, own = __popc(wanted);
        int before = own;  // up to this lane
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, before, step);
            if (lane >= step) before += other;
        }
        uint32_t at = 0;
        if (lane == 31 && before > 0) at = atomicAdd(count, before);
        at = __shfl_sync(~0u, at, 31) + before - own;
#pragma unroll 1
        for (; wanted != 0; wanted &= wanted - 1, at++) {
            if (at < room) candidates[at] = one(__ffs(wanted) - 1);
        }
    }
};

// Whether all of a unit are numbers below those of another.
__device__ __forceinline__ bool below(float a, float b) { return a < b; }
__device__ __forceinline__ bool below(double a, double b) { return a < b; }
__device__ __forceinline__ bool below(__half2 a, __half2 b) { return __hblt2(a, b); }
__device__ __forceinline__ bool below(__nv_bfloat162 a, __nv_bfloat162 b) { return __hblt2(a, b); }

// Dynamic shared memory: what is selected by, and then the candidates, as many as it has room for, at least k, and the order
// of the greatest.
template <typename T>
__device__ __forceinline__ void rows(const T* x, const TopK<T>& call, int64_t len) {
    using R = Real<T>;
    using Rank = RankOf<T>;
    using Key = typename Keys<T>::Key;
    using Line = PackedLine<T>;
    constexpr int MAX_BLOCKS = 16, PACKS = Line::PACKS, SIZE = Line::SIZE;
    extern __shared__ uint4 dynamic[];
    __shared__ uint32_t collected;
    __shared__ Rank thresholds[MAX_BLOCKS];
    __shared__ R sums[MAX_BLOCKS];
    auto& shared = *reinterpret_cast<SelectShared*>(dynamic);
    auto* candidates = reinterpret_cast<Key*>(dynamic);
    const int64_t number = blockIdx.x / Cluster::blocks();
    const int k = call.k, blocks = Cluster::blocks(), of_block = (k + blocks - 1) / blocks;
    x += number * len;
    wait_for_kernel_before(false, 256);
    uint32_t bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    const uint32_t room = (bytes - k * sizeof(uint16_t)) / sizeof(Key) / 32 * 32;
    auto* by_rank = reinterpret_cast<uint16_t*>(candidates + room);
    const Collection<Key> collection{Cluster::of_block(0, candidates), Cluster::of_block(0, &collected), room};

    // A tile has packs of as many parts of the line as a thread takes at once.
    const Line line(x, len);
    const int tiles = static_cast<int>((line.packs + PACKS * line.threads - 1) / (PACKS * line.threads));
    const int64_t apart = int64_t(tiles) * line.threads;
    const auto first_pack = [&](int t) { return int64_t(t) * line.threads + line.thread; };
    const int64_t edge = line.head + line.tail > 0 ? line.edge() : -1;
    const int bits = 32 - __clz(static_cast<int>(len - 1) | 1);
    const Rank last = (uint64_t(1) << bits) - 1;

    // Which are collected: those of ranks, and of equal ones the first places
    Selection<Rank> ranks{0, 0, 0, true}, places{0, 0, 0, true};
    // Threads of a block that have elements; where most of these are wanted, a threshold is too low.
    const int64_t having = min(line.packs / blocks, int64_t(blockDim.x));
    bool selects = 8 * of_block > 7 * having;
    // Tiles that the threshold is found by
    int looked_at = 2 * of_block <= having && 4 * k <= room ? (tiles + FOUND_BY - 1) / FOUND_BY : tiles;
    const auto rank_from = [](R x) { return Rank(rank_of(x) >> UNUSED_BITS<T>); };
    const auto candidate_at = [&](int64_t i) { return Keys<T>::of(short_rank_of(x[i]), static_cast<uint32_t>(i)); };
    auto state = SoftmaxState<R>::empty();
    bool adds = !call.renormalise;
    uint32_t found;
#pragma unroll 1
    while (true) {
        typename Line::Packs tile, next;
        if (threadIdx.x == 0) collected = 0;
        if (selects) {
            // By ranks, and then the rest of those of the last rank by places
#pragma unroll 1
            for (int by_place = 0; by_place < 2; by_place++) {
                if (by_place && ranks.all) break;
                const auto selection = select<Rank>(shared, by_place ? bits : RANK_BITS<T>, by_place ? ranks.wanted : k, [&](auto f) {
                    each_of_line(x, len, [&](int64_t i, Rank rank) {
                        f(i < len && (!by_place || rank == ranks.prefix), by_place ? last - static_cast<Rank>(i) : rank);
                    });
                });
                (by_place ? places : ranks) = selection;
            }
            line.load(tile, first_pack(0), apart);
        } else {
            R greatest = edge >= 0 ? Element<T>::read(x[edge]) : negative_infinity<R>();
#pragma unroll 1
            for (int t = looked_at - 1; t >= 0; t--) {
                line.load(tile, first_pack(t), apart);
                greatest = greater(greatest, Line::max(tile));
            }
            Rank threshold = threshold_of(rank_from(greatest), of_block, RANK_BITS<T>);
            if (blocks > 1) {
                Cluster::sync();  // all blocks have begun
                if (threadIdx.x < blocks) *Cluster::of_block(threadIdx.x, &thresholds[Cluster::rank()]) = threshold;
                Cluster::sync();
                for (int block = 0; block < blocks; block++) threshold = thresholds[block] < threshold ? thresholds[block] : threshold;
            }
            ranks.prefix = threshold;
            // Fewer than that have anything but -inf.
            if (threshold <= rank_from(negative_infinity<R>())) {
                ranks.prefix = rank_from(LOWEST<T>);
#pragma unroll 1
                for (int i = threadIdx.x; Cluster::rank() == 0 && i < k; i += blockDim.x) {
                    if (short_rank_of(x[i]) < ranks.prefix) collection.add(candidate_at(i));
                }
            }
        }
        const Rank least = ranks.prefix << ranks.shift;
        // Whether it is one, of those that are not below the least
        const auto is_first = [&](int64_t i) {
            const Rank rank = short_rank_of(x[i]);
            return rank > least || (rank == least && (ranks.all || (last - static_cast<Rank>(i)) >> places.shift >= places.prefix));
        };
        const auto add = [&](R max, const auto& sum_by) { state.add(sum_by(state.grow(max))); };
        if (line.head + line.tail > 0) {
            if (__any_sync(~0u, edge >= 0)) collection.add(edge >= 0 && is_first(edge), [&](int) { return candidate_at(edge); });
            if (adds && edge >= 0) {
                const R element = Element<T>::read(x[edge]);
                add(element, [&](R reference) { return Element<T>::exponential(element - reference) * unscale<T>(); });
            }
        }
        // An element's rank is less than a number's if the element is. What is selected by need be no number of T.
        R of_unit[Element<T>::PER_UNIT];
        for (auto& number : of_unit) number = number_of<T>(least);
        const bool by_rank_alone = selects || isnan(of_unit[0]);
        const auto least_unit = Element<T>::to_unit(of_unit);
#pragma unroll 1
        for (int t = 0; t < tiles; t++) {
            if (t + 1 < tiles) line.load(next, first_pack(t + 1), apart);
            bool none = true;
#pragma unroll
            for (const auto& pack : tile) {
#pragma unroll
                for (const auto& unit : pack.units) none = none && below(unit, least_unit);
            }
            if (by_rank_alone || !__all_sync(~0u, none)) {
                uint32_t wanted = 0;
#pragma unroll
                for (int n = 0; n < PACKS; n++) {
                    if (first_pack(t) + n * apart >= line.packs) break;
#pragma unroll
                    for (int i = n * SIZE; i < (n + 1) * SIZE; i++) wanted |= uint32_t(!(Line::element(tile, i) < of_unit[0])) << i;
                }
                const auto place = [&](int i) { return line.head + (first_pack(t) + i / SIZE * apart) * SIZE + i % SIZE; };
                if (by_rank_alone) {
                    for (uint32_t left = wanted; left != 0; left &= left - 1) {
                        const int i = __ffs(left) - 1;
                        if (!is_first(place(i))) wanted -= 1u << i;
                    }
                    __syncwarp();
                }
                collection.add(wanted, [&](int i) { return candidate_at(place(i)); });
            }
            if (adds) add(Line::max(tile), [&](R reference) { return Line::exp_sum(tile, reference); });
#pragma unroll
            for (int n = 0; n < PACKS; n++) tile[n] = next[n];
        }
        adds = false;
        sync_blocks();
        found = *collection.count;
        if (found <= room) break;
        sync_blocks();  // all have read it
        if (!selects && looked_at < tiles) looked_at = tiles;
        else selects = true;
    }
    Cluster::sync();
    if (Cluster::rank() == 0) sort(candidates, found, by_rank, k);
    if (!call.renormalise) {
        Cluster::sync();
        const R max = number_of<T>(Keys<T>::rank(Cluster::of_block(0, candidates)[*Cluster::of_block(0, by_rank)]));
        const R of_block = block_sum(sum_relative_to(state, max));
        if (threadIdx.x == 0) *Cluster::of_block(0, &sums[Cluster::rank()]) = of_block;
        sync_blocks();
    }
    if (Cluster::rank() > 0) return;
    const auto number_at = [&](int i) { return number_of<T>(Keys<T>::rank(candidates[by_rank[i]])); };
    const R max = number_at(0);
    const auto exponential_of = [&](int i) { return quick_exponential(number_at(i) - max); };
    R sum = 0;
    if (call.renormalise) {
        for (int i = threadIdx.x; i < k; i += blockDim.x) sum += exponential_of(i);
        sum = block_sum(sum);
    } else {
        for (unsigned block = 0; block < Cluster::blocks(); block++) sum += sums[block];
    }
    const R inverse = reciprocal(sum);
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        call.weights[number * k + i] = Element<T>::write(exponential_of(i) * inverse);
        call.places[number * k + i] = Keys<T>::place(candidates[by_rank[i]]);
    }
    if (call.sums && threadIdx.x == 0) call.sums[number] = sum;
}

#define KERNELS(dtype, T)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(TOP_K_THREADS, 2)                                                                 \
        top_k_rows_##dtype(const T* x, T* weights, uint32_t* places, Real<T>* sums, int64_t lines, int64_t len, int k,             \
                           int renormalise) {                                                                                      \
        rows(x, TopK<T>{weights, places, sums, k, renormalise != 0}, len);                                                         \
    }
FOR_EACH_DTYPE(KERNELS)
