// Tiles: several short contiguous lines that a block copies into shared memory and back as the one run that they are in memory,
// wherever lines end. There a group of threads takes a line.
#pragma once
#include "bulk.cuh"
#include "pack.cuh"

// Of a block that takes several lines.
constexpr int TILE_THREADS = 128;
// What shared memory has beside a tile: up to 128 bytes before it, and 16 behind.
constexpr int TILE_MARGIN = 144;

// What a tile of so many elements takes of shared memory where another one follows, in bytes.
template <typename T>
__device__ __forceinline__ int tile_room(int count) {
    return (count * int(sizeof(T)) + TILE_MARGIN + 127) / 128 * 128;
}

// Waits until what each barrier counts has come once more than `parity` says.
template <int TILES>
__device__ __forceinline__ void wait_for_copies(ArrivalBarrier (&arrived)[TILES], int parity) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (auto& barrier : arrived) barrier.wait(parity);
#endif
}

// All threads call this before any tile is fetched, with a barrier for each, in as many pieces as it says, …
template <int TILES>
__device__ __forceinline__ void prepare(ArrivalBarrier (&arrived)[TILES], int pieces = 1) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
#pragma unroll
        for (auto& barrier : arrived) barrier.init(pieces);
        ArrivalBarrier::announce();
    }
#endif
}
// … and this before they read any of them.
template <int TILES>
__device__ __forceinline__ void wait_for_tiles(ArrivalBarrier (&arrived)[TILES]) {
    __syncthreads();
    wait_for_copies(arrived, 0);
}

// A run of elements in shared memory, `before` elements behind a multiple of 128 bytes as it lies in global memory: copies between
// lines of 128 bytes that lie otherwise are slower (131328 x 511 f16 1.01 copies, with 16 bytes instead 1.05, and not even the
// first line where a multiple of 128 bytes is 1.12).
template <typename T>
struct Tile {
    static constexpr int SIZE = 16 / sizeof(T);
    T* elements;
    int count;

    static __device__ __forceinline__ int before(const T* at) {
        return static_cast<int>(reinterpret_cast<uintptr_t>(at) % 128 / sizeof(T));
    }

    // All threads call this. The tensor begins so many elements before the run, and ends so many behind it: what shares 16 bytes with
    // the run is read, too, if it is of the tensor.
    __device__ __forceinline__ void fetch(const T* run, int64_t elements_before, int64_t elements_behind, ArrivalBarrier& arrived) const {
        fetch(run, elements_before, elements_behind, arrived, threadIdx.x, blockDim.x);
    }
    // The same by so many of the threads, SIZE or more, of which this one has that rank.
    __device__ __forceinline__ void fetch(const T* run, int64_t elements_before, int64_t elements_behind, ArrivalBarrier& arrived, int rank, int threads) const {
        if (!copies(rank)) return;
        const int from = before(run), behind = from + count;
        const T* source = run - from;
        // Whole packs, and elements at both ends
        const int first = elements_before < SIZE ? (from + SIZE - 1) / SIZE : from / SIZE;
        const int end = elements_behind < SIZE ? behind / SIZE : (behind + SIZE - 1) / SIZE;
#if __CUDA_ARCH__ >= 900
        if (rank == 0) {
            const uint32_t bytes = end > first ? (end - first) * 16 : 0;
            arrived.expect(bytes);
            if (bytes > 0) copy_in(elements + first * SIZE, source + first * SIZE, bytes, arrived);
        }
#else
        for (int p = first + rank; p < end; p += threads) {
            reinterpret_cast<uint4*>(elements)[p] = reinterpret_cast<const uint4*>(source)[p];
        }
#endif
        each_at_ends(from, first, end, rank, [&](int i) { elements[i] = source[i]; });
    }

    // All threads call this when they have written their part.
    __device__ __forceinline__ void store(T* run) const {
#if __CUDA_ARCH__ >= 900
        announce_to_copies();
#endif
        __syncthreads();
        if (!copies(threadIdx.x)) return;
        const int from = before(run), first = (from + SIZE - 1) / SIZE, end = (from + count) / SIZE;
        T* to = run - from;
        each_at_ends(from, first, end, threadIdx.x, [&](int i) { to[i] = elements[i]; });
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0 && end > first) copy_out(to + first * SIZE, elements + first * SIZE, (end - first) * 16);
#else
        for (int p = first + threadIdx.x; p < end; p += blockDim.x) {
            __stcs(reinterpret_cast<uint4*>(to) + p, reinterpret_cast<const uint4*>(elements)[p]);
        }
#endif
    }

    // The same of a run that lies in shared memory from element `from` on, whatever that is in global memory.
    __device__ __forceinline__ void store_elements(T* run, int from) const {
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += blockDim.x) run[i] = elements[from + i];
    }

    // Whether this thread's warp has to do with it: copies run by themselves.
    static __device__ __forceinline__ bool copies(int rank) {
#if __CUDA_ARCH__ >= 900
        return rank < 32;
#else
        return true;
#endif
    }

    // Calls f with the places of the elements that are not in packs first..end, which the run reaches at both ends: fewer than
    // SIZE at either end.
    template <typename F>
    __device__ __forceinline__ void each_at_ends(int from, int first, int end, int i, F f) const {
        const int behind = from + count;
        if (i >= SIZE) return;
        if (first * SIZE > from && from + i < first * SIZE && from + i < behind) f(from + i);
        // A run within one pack has no end of its own.
        if (end >= first && end * SIZE + i < behind) f(end * SIZE + i);
    }
};

// What is this thread's of a tile, whose lines 2^shift threads share: neighbouring words of 4 bytes. Of half precision a line may
// begin and end in the middle of a word that it shares with its neighbours: these elements are its first and its last thread's.
template <typename T>
struct TileShare {
    static constexpr int PER_UNIT = Element<T>::PER_UNIT;
    int begin, end;            // of the line, in elements of the tile
    bool has_first, has_last;  // the first and the last element by themselves
    int share;                 // words that a thread may have: an odd number where there are several, for different banks
    int word, mine;            // the first one, and how many there are

    // `lines` of the tile from element `before` on
    __device__ __forceinline__ TileShare(int before, int lines, int len, int shift) {
        const int group = 1 << shift, own = threadIdx.x >> shift, rank = threadIdx.x & (group - 1);
        begin = before + own * len;
        end = own < lines ? begin + len : begin;
        has_first = PER_UNIT > 1 && own < lines && begin % 2 == 1 && rank == 0;
        has_last = PER_UNIT > 1 && own < lines && end % 2 == 1 && rank == group - 1;
        share = ((len / PER_UNIT + group - 1) >> shift) | (shift > 0);
        word = (begin + PER_UNIT - 1) / PER_UNIT + rank * share;
        const int left = end / PER_UNIT - word;
        mine = left < share ? left : share;
    }
};

// Calls f with each multiple k of FEW below WORDS and `share`, as a constant: for words k, k + 1, ... of WORDS.
constexpr int FEW = 4;
template <int WORDS, typename F>
__device__ __forceinline__ void each_few(int share, F f) {
#pragma unroll
    for (int k = 0; k < WORDS; k += FEW) {
        if (k >= share) break;
        f(k);
    }
}

// These elements in registers, and -inf in place of those that there are not; `ends` are the first and the last by themselves.
template <typename T, int WORDS>
struct TileUnits {
    Unit<T> elements[WORDS], ends;

    // Answers the greatest.
    __device__ __forceinline__ Real<T> load(const TileShare<T>& own, const T* tile) {
        ends = no_elements<T>();
        if constexpr (Element<T>::PER_UNIT > 1) {
            if (own.has_first) ends.x = tile[own.begin];
            if (own.has_last) ends.y = tile[own.end - 1];
        }
        const auto* units = reinterpret_cast<const Unit<T>*>(tile) + own.word;
        Unit<T> greatest = ends;
        each_few<WORDS>(own.share, [&](int from) {
#pragma unroll
            for (int k = from; k < from + FEW && k < WORDS; k++) {
                elements[k] = no_elements<T>();
                if (k < own.mine) elements[k] = units[k];
                greatest = greater(greatest, elements[k]);
            }
        });
        return max_of_unit<T>(greatest);
    }
};
