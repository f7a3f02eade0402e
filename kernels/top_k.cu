// The places of the k greatest elements of each contiguous line, greatest first, of equal ones the first first.
//
// Short lines: a warp holds a line in registers, reads it once and finds one place after the other; the ceiling is half a copy.
//
// Long lines: a block, or a cluster where there are few lines, counts the elements by the most significant digit of their rank, which says in
// which digit the k-th is, and goes on with the next digit of those (radix select; Alabi et al., 2012). Of equal ones the digits of the places
// are what decides. Then the k are collected and sorted. A line is read once for each digit, up to four times for most, all but the
// first time from a cache where it fits one.
#include "cluster.cuh"
#include "element.cuh"
#include "reduce.cuh"

// Numbers in an order without exceptions: -0 is 0, and NaN, all of them equal, is greater than +inf, as in torch.topk.
__device__ __forceinline__ uint32_t rank_of(float x) {
    const int32_t bits = __float_as_int(x == 0.0f ? 0.0f : x);
    return isnan(x) ? ~0u : static_cast<uint32_t>(bits < 0 ? ~bits : bits ^ INT32_MIN);
}
__device__ __forceinline__ uint64_t rank_of(double x) {
    const int64_t bits = __double_as_longlong(x == 0.0 ? 0.0 : x);
    return isnan(x) ? ~uint64_t(0) : static_cast<uint64_t>(bits < 0 ? ~bits : bits ^ INT64_MIN);
}

// An element's rank and place. `empty` comes after every element of a line.
template <typename R>
struct Candidate {
    using Rank = decltype(rank_of(R()));
    Rank rank;
    uint32_t place;

    static __device__ __forceinline__ Candidate empty() { return {0, ~0u}; }
    __device__ __forceinline__ bool before(const Candidate& other) const {
        return rank > other.rank || (rank == other.rank && place < other.place);
    }
};

// ---- A line in the registers of a warp -----------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t greatest_of_warp(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, x);
#else
    return warp_group_reduce(x, 32, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
#endif
}
__device__ __forceinline__ uint64_t greatest_of_warp(uint64_t x) {
    const auto high = static_cast<uint32_t>(x >> 32), greatest = greatest_of_warp(high);
    return uint64_t(greatest) << 32 | greatest_of_warp(high == greatest ? static_cast<uint32_t>(x) : 0u);
}

// Up to 32 COUNT elements, each lane every 32nd.
template <int COUNT, typename T>
__device__ __forceinline__ void top_k_of_warp(const T* x, uint32_t* out, int len, int k) {
    using Rank = typename Candidate<Real<T>>::Rank;
    const int lane = threadIdx.x % 32;
    Rank ranks[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int place = i * 32 + lane;
        ranks[i] = place < len ? rank_of(Element<T>::read(x[place])) : Rank(0);
    }
    uint32_t left = 0;  // those of this lane's elements that were not found yet, bit by bit
#pragma unroll
    for (int i = 0; i < COUNT; i++) left |= i * 32 + lane < len ? 1u << i : 0u;
    for (int n = 0; n < k; n++) {
        Rank best = 0;
        int at = COUNT;
#pragma unroll
        for (int i = COUNT - 1; i >= 0; i--) {
            const bool better = (left >> i & 1) && ranks[i] >= best;
            best = better ? ranks[i] : best;
            at = better ? i : at;
        }
        const Rank greatest = greatest_of_warp(best);
        // Of equal ones the first; one that was found, or that there is not, has no place.
        const uint32_t place = at < COUNT && best == greatest ? at * 32 + lane : ~0u;
        const uint32_t found = ~greatest_of_warp(~place);
        if (place == found) left &= ~(1u << at);
        if (lane == 0) out[n] = found;
    }
}

// A warp takes a line of up to 1024.
template <typename T>
__device__ __forceinline__ void short_rows(const T* x, uint32_t* out, int64_t lines, int len, int k) {
    const int64_t line = blockIdx.x * int64_t(blockDim.x / 32) + threadIdx.x / 32;
    if (line >= lines) return;
    x += line * len;
    out += line * k;
    if (len <= 64) top_k_of_warp<2>(x, out, len, k);
    else if (len <= 128) top_k_of_warp<4>(x, out, len, k);
    else if (len <= 256) top_k_of_warp<8>(x, out, len, k);
    else top_k_of_warp<32>(x, out, len, k);
}

// ---- A line that a block or cluster selects from -------------------------------------------------------------------------

constexpr int TOP_K_THREADS = 1024, DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS;

// Bits of a rank that are not the same for all numbers of T
template <typename T> using RankOf = typename Candidate<Real<T>>::Rank;
template <typename T> constexpr int RANK_BITS = sizeof(Real<T>) * 8;
template <> constexpr int RANK_BITS<__half> = 19;
template <> constexpr int RANK_BITS<__nv_bfloat16> = 16;

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

// Finds the digit that the `wanted`-th greatest has, given how many elements have each; how many have a greater one, and this one.
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
    constexpr int TILE = 4, UNUSED = sizeof(RankOf<T>) * 8 - RANK_BITS<T>;
    const int64_t threads = Cluster::blocks() * int64_t(blockDim.x), first = Cluster::rank() * int64_t(blockDim.x) + threadIdx.x;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int64_t from = first; from - lane < len; from += TILE * threads) {
        T tile[TILE];
        // All are asked for before any is waited for.
#pragma unroll
        for (int n = 0; n < TILE; n++) tile[n] = x[min(from + n * threads, len - 1)];
#pragma unroll
        for (int n = 0; n < TILE; n++) f(from + n * threads, static_cast<RankOf<T>>(rank_of(Element<T>::read(tile[n])) >> UNUSED));
    }
}

// The `wanted` greatest of the keys, of `bits` bits each: key(i, rank, its key), which says whether the element is one of those.
template <typename Key, typename T, typename F>
__device__ __forceinline__ Selection<Key> select(SelectShared& shared, const T* x, int64_t len, int bits, int wanted, F key) {
    using Rank = RankOf<T>;
    Selection<Key> found{0, bits, wanted, false};
    while (found.shift > 0 && !found.all) {
        const int width = found.shift < DIGIT_BITS ? found.shift : DIGIT_BITS, shift = found.shift - width;
        for (int i = threadIdx.x; i < DIGITS; i += blockDim.x) shared.counts[i] = 0;
        __syncthreads();
        each_of_line(x, len, [&](int64_t i, Rank rank) {
            Key own = 0;
            bool counts = i < len && key(i, rank, own);
            if (found.shift < bits) counts = counts && own >> found.shift == found.prefix;
            const uint32_t digit = counts ? static_cast<uint32_t>(own >> shift) & ((1u << width) - 1) : DIGITS;
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

// Greatest first, a power of two of them
template <typename C>
__device__ __forceinline__ void sort(C* candidates, int count) {
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

// Dynamic shared memory: what is selected by, and then the candidates, as many as the power of two from k on.
template <typename T>
__device__ __forceinline__ void rows(const T* x, uint32_t* out, int64_t len, int k) {
    using C = Candidate<Real<T>>;
    using Rank = RankOf<T>;
    extern __shared__ uint4 dynamic[];
    __shared__ uint32_t collected;
    auto& shared = *reinterpret_cast<SelectShared*>(dynamic);
    auto* candidates = reinterpret_cast<C*>(dynamic);
    const int64_t line = blockIdx.x / Cluster::blocks();
    x += line * len;
    const auto ranks = select<Rank>(shared, x, len, RANK_BITS<T>, k, [](int64_t, Rank rank, Rank& key) {
        key = rank;
        return true;
    });
    // Of more equal ones than are wanted, those whose places are lowest
    const int bits = 32 - __clz(static_cast<int>(len - 1) | 1);
    const uint32_t last = (uint64_t(1) << bits) - 1;
    Selection<uint32_t> places{0, 0, 0, true};
    if (!ranks.all) {
        places = select<uint32_t>(shared, x, len, bits, ranks.wanted, [&](int64_t i, Rank rank, uint32_t& key) {
            key = last - static_cast<uint32_t>(i);
            return rank == ranks.prefix;
        });
    }
    int count = 1;
    while (count < k) count *= 2;
    if (threadIdx.x == 0) collected = 0;
    for (int i = k + threadIdx.x; i < count; i += blockDim.x) candidates[i] = C::empty();
    __syncthreads();
    Cluster::sync();
    // Into the first block's memory
    C* there = Cluster::of_block(0, candidates);
    uint32_t* number = Cluster::of_block(0, &collected);
    each_of_line(x, len, [&](int64_t i, Rank rank) {
        const Rank prefix = rank >> ranks.shift;
        const bool equal = prefix == ranks.prefix && !ranks.all;
        const bool selected = equal ? (last - static_cast<uint32_t>(i)) >> places.shift >= places.prefix : prefix >= ranks.prefix;
        if (i < len && selected) there[atomicAdd(number, 1u)] = {rank, static_cast<uint32_t>(i)};
    });
    Cluster::sync();
    if (Cluster::rank() > 0) return;
    sort(candidates, count);
    for (int i = threadIdx.x; i < k; i += blockDim.x) out[line * k + i] = candidates[i].place;
}

#define KERNELS(dtype, T)                                                                         \
    extern "C" __global__ void __launch_bounds__(128)                                             \
        top_k_short_rows_##dtype(const T* x, uint32_t* out, int64_t lines, int64_t len, int k) {  \
        short_rows(x, out, lines, static_cast<int>(len), k);                                      \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(TOP_K_THREADS)                                   \
        top_k_rows_##dtype(const T* x, uint32_t* out, int64_t lines, int64_t len, int k) {        \
        rows(x, out, len, k);                                                                     \
    }
FOR_EACH_DTYPE(KERNELS)
