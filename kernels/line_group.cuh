// Threads that share lines: some that lie side by side, or a contiguous one. Neighbouring threads take neighbouring elements, row by row, so that
// narrow rows are accessed as a whole, too.
#pragma once
#include "cluster.cuh"
#include "line.cuh"

constexpr int GROUP_THREADS = 512;

// COUNT lines that lie side by side and are one thread's: of half precision two, whose elements it reads as one word where rows begin at words.
template <typename T, int COUNT>
struct SideBySide {
    using R = Real<T>;
    using Word = std::conditional_t<COUNT == 1, T, Unit<T>>;
    static_assert(COUNT == 1 || COUNT == Element<T>::PER_UNIT, "an element, or a unit");

    static __device__ __forceinline__ R read(const Word& word, int i) {
        if constexpr (COUNT == 1) return Element<T>::read(word);
        else return Element<T>::of_unit(word, i);
    }
    static __device__ __forceinline__ Word write(const R (&results)[COUNT]) {
        if constexpr (COUNT == 1) return Element<T>::write(results[0]);
        else return Element<T>::to_unit(results);
    }
};

// What is to be known of each of them.
template <typename State, int COUNT>
struct Each {
    State of[COUNT];

    __device__ __forceinline__ void merge(const Each& other) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) of[i].merge(other.of[i]);
    }
};

// Where few lines are shared by more blocks than a cluster has, those of the grid's second dimension, a kernel runs twice: the first time it
// leaves the states of their parts, the second time it merges them.
enum class Phase : int { WHOLE, PARTS, MERGED };

// A group is 2^shift threads of a block or, if those are all, the blocks of a cluster; src/cuda/plan says how many, and how many lines they
// take side by side. A thread alone has one line.
struct LineGroup {
    int64_t groups, len, inner, strips;  // strips of lines that lie side by side in a row
    int shift, across, rows;             // lines of the group, and threads of a block to each
    int row, column;                     // this thread's; some may have no row
    int blocks, rank;                    // of the cluster

    // `groups`: as many as there are strips in all rows; `shape`: shift and, from bit 8 on, across
    __device__ __forceinline__ LineGroup(int64_t groups, int64_t len, int64_t inner, int shape)
        : groups(groups), len(len), inner(inner), shift(shape & 0xff), across(shape >> 8), blocks(Cluster::blocks()), rank(Cluster::rank()) {
        strips = across == 1 ? inner : inner == across ? 1 : (inner + across - 1) / across;
        rows = threads() / static_cast<unsigned>(across);
        const unsigned thread = threadIdx.x & (threads() - 1);
        row = thread / static_cast<unsigned>(across);
        column = thread - row * across;
    }
    __device__ __forceinline__ int threads() const { return 1 << shift; }
    // Whether this thread has the line's first elements.
    __device__ __forceinline__ bool leads() const { return row == 0 && rank == 0; }

    // Calls f(line's number, its elements for this thread) for each of the group's strips; of a thread that has no line, there are no elements.
    // All threads of a block make the same calls.
    template <typename F>
    __device__ __forceinline__ void each(F f) const {
        const unsigned of_block = blockDim.x >> shift;
#pragma unroll 1
        for (int64_t first = int64_t(blockIdx.x / blocks) * of_block; first < groups; first += int64_t(gridDim.x / blocks) * of_block) {
            const int64_t group = first + (threadIdx.x >> shift), outer = strips == 1 ? group : quotient(group, strips);
            const int64_t at = (group - outer * strips) * across + column;
            const bool there = group < groups && row < rows && at < inner;
            const int64_t start = there ? outer * len * inner + at : 0;
            f(there ? outer * inner + at : 0, StridedLine{start, inner, int64_t(rank * rows + row), int64_t(blocks * rows), there ? len : 0});
        }
    }

    // What all of a line's threads have, merged, the same bits for each of them. Called by all threads of a block.
    template <typename State>
    __device__ __forceinline__ State reduce(State state) const {
        if (rows == 1 && blocks == 1) return state;
        __shared__ State states[GROUP_THREADS];
        State* own = states + threadIdx.x;
        State* of_line = states + (threadIdx.x & ~(threads() - 1)) + column;
        *own = state;
        merge_rows(own, rows);
        if (blocks > 1) {
            Cluster::sync();
            if (row < blocks) state = *Cluster::of_block(row, of_line);
            Cluster::sync();  // all have read
            *own = state;
            merge_rows(own, blocks);
        }
        state = *of_line;
        sync();  // `states` is free for the next
        return state;
    }

    // The same in any phase, of the line with this number, whose elements for this thread `line` has; false where that was all there is to do.
    // `parts` has room for a state of each part of each line.
    template <typename State>
    __device__ __forceinline__ bool merge(State& state, Phase phase, State* parts, int64_t number, const StridedLine& line) const {
        parts += number * gridDim.y;
        if (phase == Phase::MERGED && line.len > 0) {
#pragma unroll 1
            for (int part = row; part < gridDim.y; part += rows) state.merge(parts[part]);
        }
        state = reduce(state);
        if (phase != Phase::PARTS) return true;
        if (leads() && line.len > 0) parts[blockIdx.y] = state;
        return false;
    }

  private:
    __device__ __forceinline__ void sync() const {
        if (shift <= 5) __syncwarp();
        else __syncthreads();
    }
    // Into the first of them
    template <typename State>
    __device__ __forceinline__ void merge_rows(State* own, int count) const {
#pragma unroll 1
        while (count > 1) {
            const int half = (count + 1) / 2;
            sync();
            if (row + half < count) own->merge(own[half * across]);
            count = half;
        }
        sync();
    }
};
