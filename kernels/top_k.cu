// The greatest elements of long lines.
//
// A block has a line, or a cluster where there are few. Each thread finds the greatest of the elements it reads. Of those of each block the
// (k / blocks)-th greatest is a threshold, and the least threshold of all blocks has k elements or more at or above it, and hardly more where
// elements are in no order. All of these are collected and sorted: a line is read twice, the second time from a cache where it fits one, and once more
// for weights that are not renormalised.
//
// Where there are too many, as of many equal ones, elements are selected by digits: they are counted by the most significant digit of their rank,
// which says in which digit the k-th is, and then those of it by the next (radix select; Alabi et al., 2012). Of equal ones the digits of the
// places are what decides. A line is read once for each digit.
#include "cluster.cuh"
#include "top_k.cuh"

constexpr int TOP_K_THREADS = 512, DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS;

// An element's rank and place. `empty` comes after every element of a line.
template <typename Rank>
struct Candidate {
    Rank rank;
    uint32_t place;

    static __device__ __forceinline__ Candidate empty() { return {0, ~0u}; }
    __device__ __forceinline__ bool before(const Candidate& other) const {
        return rank > other.rank || (rank == other.rank && place < other.place);
    }
};

// Which keys are the greatest: those not below `prefix` once their lowest `shift` bits are taken off; of as many bits as were looked at so far.
template <typename Key>
struct Selection {
    Key prefix;
    int shift;
    int wanted;  // how many of those with this very prefix
    bool all;    // whether that is all there are
};

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
        __syncthreads();
        Cluster::sync();
        find_digit(shared, found.wanted);
        __syncthreads();
        found.prefix = found.prefix << width | shared.digit;
        found.shift = shift;
        found.wanted -= shared.above;
        found.all = shared.here == static_cast<uint32_t>(found.wanted);
        Cluster::sync();  // all have read the counts
        __syncthreads();
    }
    return found;
}

// Greatest first; there is room for the power of two from `count` on.
template <typename C>
__device__ __forceinline__ void sort(C* candidates, int found) {
    int count = 1;
    while (count < found) count *= 2;
    for (int i = found + threadIdx.x; i < count; i += blockDim.x) candidates[i] = C::empty();
    for (int size = 2; size <= count; size *= 2) {
        for (int apart = size / 2; apart > 0; apart /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < count / 2; pair += blockDim.x) {
                const int a = pair / apart * 2 * apart + pair % apart, b = a + apart;
                const C first = candidates[a], second = candidates[b];
                const bool descends = (a & size) == 0;
                if (second.before(first) == descends) candidates[a] = second, candidates[b] = first;
            }
        }
    }
    __syncthreads();
}

constexpr int MOST_OF_WARP = 16;

// The `wanted`-th greatest of what a block's threads have, or less if a warp has more than twice its share of the greatest, of which only so many
// are looked at. `shared` has room for MOST_OF_WARP of each warp, and one more.
__device__ __forceinline__ int share_of_warp(int wanted) { return (2 * wanted + blockDim.x / 32 - 1) / (blockDim.x / 32); }
template <typename Rank>
__device__ __forceinline__ Rank threshold_of(Rank own, int wanted, Rank* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = share_of_warp(wanted), count = share * (blockDim.x / 32);
    for (int n = 0; n < share; n++) {
        const Rank greatest = greatest_of<32>(own);
        if (lane == __ffs(__ballot_sync(~0u, own == greatest)) - 1) {
            shared[warp * share + n] = own;
            own = 0;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const Rank one = shared[i];
        int before = 0;
        for (int j = 0; j < count; j++) before += shared[j] > one || (shared[j] == one && j < i);
        if (before == wanted - 1) shared[count] = one;
    }
    __syncthreads();
    return shared[count];
}

// What a block or cluster collects, in the first block's memory.
template <typename C>
struct Collection {
    C* candidates;
    uint32_t* count;
    uint32_t room;

    // By all lanes of a warp
    __device__ __forceinline__ void add(bool wanted, const C& candidate) const {
        const unsigned all = __ballot_sync(~0u, wanted);
        if (all == 0) return;
        const int lane = threadIdx.x % 32, first = __ffs(all) - 1;
        uint32_t at = 0;
        if (lane == first) at = atomicAdd(count, __popc(all));
        at = __shfl_sync(~0u, at, first) + __popc(all & ((1u << lane) - 1));
        if (wanted && at < room) candidates[at] = candidate;
    }
};

// Dynamic shared memory: what is selected by, and then the candidates, as many as it has room for, at least the power of two from k on.
template <typename T>
__device__ __forceinline__ void rows(const T* x, const TopK<T>& call, int64_t len) {
    using R = Real<T>;
    using Rank = RankOf<T>;
    using C = Candidate<Rank>;
    constexpr int MAX_BLOCKS = 16;
    extern __shared__ uint4 dynamic[];
    __shared__ uint32_t collected;
    __shared__ Rank thresholds[MAX_BLOCKS];
    __shared__ R sums[MAX_BLOCKS];
    auto& shared = *reinterpret_cast<SelectShared*>(dynamic);
    auto* candidates = reinterpret_cast<C*>(dynamic);
    const int64_t line = blockIdx.x / Cluster::blocks();
    const int k = call.k, blocks = Cluster::blocks(), of_block = (k + blocks - 1) / blocks;
    x += line * len;
    uint32_t bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    const uint32_t room = 1u << (31 - __clz(bytes / sizeof(C)));
    const Collection<C> collection{Cluster::of_block(0, candidates), Cluster::of_block(0, &collected), room};

    if (threadIdx.x == 0) collected = 0;
    // Which are collected: those of ranks, and of equal ones the first places
    Selection<Rank> ranks{0, 0, 0, true}, places{0, 0, 0, true};
    bool selects = share_of_warp(of_block) > MOST_OF_WARP;
    if (!selects) {
        Rank greatest = 0;
        each_of_line(x, len, [&](int64_t i, Rank rank) { greatest = i < len && rank > greatest ? rank : greatest; });
        Rank threshold = threshold_of(greatest, of_block, reinterpret_cast<Rank*>(dynamic));
        Cluster::sync();  // all blocks have begun
        if (threadIdx.x < blocks) *Cluster::of_block(threadIdx.x, &thresholds[Cluster::rank()]) = threshold;
        __syncthreads();
        Cluster::sync();
        for (int block = 0; block < blocks; block++) threshold = thresholds[block] < threshold ? thresholds[block] : threshold;
        ranks.prefix = threshold;
    }
    const int bits = 32 - __clz(static_cast<int>(len - 1) | 1);
    const Rank last = (uint64_t(1) << bits) - 1;
    uint32_t found;
#pragma unroll 1
    while (true) {
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
            if (threadIdx.x == 0) collected = 0;
            __syncthreads();
            Cluster::sync();
        }
        const Rank least = ranks.prefix << ranks.shift;
        each_of_line(x, len, [&](int64_t i, Rank rank) {
            const bool first = ranks.all || rank > least || (last - static_cast<Rank>(i)) >> places.shift >= places.prefix;
            collection.add(i < len && rank >= least && first, {rank, static_cast<uint32_t>(i)});
        });
        __syncthreads();
        Cluster::sync();
        found = *collection.count;
        if (found <= room) break;
        Cluster::sync();  // all have read it
        selects = true;
    }
    Cluster::sync();
    if (Cluster::rank() == 0) sort(candidates, found);
    if (!call.renormalise) {
        Cluster::sync();
        const R max = number_of<T>(Cluster::of_block(0, candidates)->rank);
        auto sum = CompensatedSum<R>::empty();
        each_of_line(x, len, [&](int64_t i, Rank rank) {
            if (i < len) sum.add(quick_exponential(number_of<T>(rank) - max));
        });
        const R of_block = group_sum(sum.value(), blockDim.x);
        if (threadIdx.x == 0) *Cluster::of_block(0, &sums[Cluster::rank()]) = of_block;
        __syncthreads();
        Cluster::sync();
    }
    if (Cluster::rank() > 0) return;
    const R max = number_of<T>(candidates[0].rank);
    const auto exponential_of = [&](int i) { return quick_exponential(number_of<T>(candidates[i].rank) - max); };
    R sum = 0;
    if (call.renormalise) {
        for (int i = threadIdx.x; i < k; i += blockDim.x) sum += exponential_of(i);
        sum = group_sum(sum, blockDim.x);
    } else {
        for (unsigned block = 0; block < Cluster::blocks(); block++) sum += sums[block];
    }
    const R inverse = reciprocal(sum);
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        call.weights[line * k + i] = Element<T>::write(exponential_of(i) * inverse);
        call.places[line * k + i] = candidates[i].place;
    }
    if (call.sums && threadIdx.x == 0) call.sums[line] = sum;
}

#define KERNELS(dtype, T)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(TOP_K_THREADS, 4)                                                                 \
        top_k_rows_##dtype(const T* x, T* weights, uint32_t* places, Real<T>* sums, int64_t lines, int64_t len, int k,             \
                           int renormalise) {                                                                                      \
        rows(x, TopK<T>{weights, places, sums, k, renormalise != 0}, len);                                                         \
    }
FOR_EACH_DTYPE(KERNELS)
