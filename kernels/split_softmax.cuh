// Softmax of few very long lines: each is split over many blocks. A first kernel leaves the state of every part, a second
// merges the states of its line and writes the result, the last parts first, since those are still in the L2 cache. Each
// element is read twice (once from the cache as far as it holds them) and written once: 1 to 1.5x the bytes of a copy.
#pragma once
#include "pack.cuh"
#include "reduce.cuh"
#include "register_softmax.cuh"

constexpr int SPLIT_PACKS = 4;

// The blocks of a line take tiles of SPLIT_PACKS packs a thread in turn: tile part, part + parts, ...
template <typename T>
struct SplitLine {
    using Line = RegisterLine<T, SPLIT_PACKS, false>;
    int64_t start;
    int64_t len;
    int part, parts;

    __device__ __forceinline__ int tiles() const {
        const int64_t packs = (start + len + Line::SIZE - 1) / Line::SIZE - start / Line::SIZE;
        return static_cast<int>((packs + SPLIT_PACKS * blockDim.x - 1) / (SPLIT_PACKS * blockDim.x));
    }

    __device__ __forceinline__ Line tile(int n) const {
        return Line(start, static_cast<int>(len), n * SPLIT_PACKS * blockDim.x + threadIdx.x, blockDim.x);
    }
};

// Grid: parts x lines. Leaves the state of (line, part) in parts_of[line * parts + part].
template <typename T>
__device__ __forceinline__ void split_states(const T* x, Normalizer<Real<T>>* parts_of, int64_t lines, int64_t len) {
    using R = Real<T>;
    const Input<T> input{x, lines * len};
    const SplitLine<T> line{int64_t(blockIdx.y) * len, len, int(blockIdx.x), int(gridDim.x)};
    auto state = SoftmaxState<R>::empty();
#pragma unroll 1
    for (int n = line.part; n < line.tiles(); n += line.parts) {
        auto held = line.tile(n);
        held.load(input);
        const R reference = state.grow(held.max());
        state.add(exp_sum(held.x, reference));
    }
    state = block_reduce(state);
    if (threadIdx.x == 0) parts_of[blockIdx.y * int64_t(gridDim.x) + blockIdx.x] = state.finish_part();
}

template <typename T, template <typename> class Output>
__device__ __forceinline__ void split_apply(const T* x, const Normalizer<Real<T>>* parts_of, T* y, int64_t lines,
                                            int64_t len) {
    using R = Real<T>;
    const Input<T> input{x, lines * len};
    const int64_t number = lines - 1 - blockIdx.y;
    const SplitLine<T> line{number * len, len, int(gridDim.x - 1 - blockIdx.x), int(gridDim.x)};
    parts_of += number * gridDim.x;
    R max = negative_infinity<R>();
    for (int i = threadIdx.x; i < line.parts; i += blockDim.x) max = greater(max, parts_of[i].max);
    max = group_max(max, blockDim.x);
    R sum = 0;
    for (int i = threadIdx.x; i < line.parts; i += blockDim.x) {
        sum += parts_of[i].sum * exponential(parts_of[i].max - max);
    }
    const Output<R> output(Normalizer<R>{max, group_sum(sum, blockDim.x)});
    const int tiles = line.tiles();
#pragma unroll 1
    for (int n = line.part + (tiles - 1 - line.part) / line.parts * line.parts; n >= line.part; n -= line.parts) {
        auto held = line.tile(n);
        held.load(input);
#pragma unroll
        for (int i = 0; i < held.COUNT; i++) held.x[i] = output(held.x[i]);
        held.store(y);
    }
}
