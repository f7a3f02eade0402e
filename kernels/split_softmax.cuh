// Softmax of few very long lines: each is split over many blocks. A first kernel leaves the state of every part, a second
// merges the states of its line and writes the result, the last parts first, since those are still in the L2 cache. Each
// element is read twice (once from the cache as far as it holds them) and written once: 1 to 1.5x the bytes of a copy.
#pragma once
#include "register_softmax.cuh"

// The blocks of a line take tiles of COUNT elements a thread in turn: tile part, part + parts, ...
template <typename T, int COUNT, bool WHOLE>
struct SplitLine {
    using Held = RegisterLine<T, COUNT, WHOLE, 32>;
    const T* y;
    int64_t start;
    int len;
    int part, parts;

    // Elements up to where accesses are aligned lie before the line.
    __device__ __forceinline__ int tiles() const {
        const int tile = COUNT * blockDim.x, before = WHOLE ? 0 : Held::ALIGNMENT - 1;
        return (len + before + tile - 1) / tile;
    }
    // The first tiles, as many as the L2 cache will not hold until they are read again: 1 x 16777216 bf16 1.32, with 24 MB 1.34, with
    // 12 MB 1.38; f32 1.44 with any of them.
    __device__ __forceinline__ int tiles_read_once() const {
        const int kept = (20 << 20) / (COUNT * int(sizeof(T)) * blockDim.x * gridDim.y);
        return tiles() - kept;
    }
    __device__ __forceinline__ Held tile(int n) const {
        const int warp = (n * blockDim.x + threadIdx.x) / 32;
        return Held(y, start, len, warp * Held::PACKS * 32 + threadIdx.x % 32, 32);
    }
};

// A line's state is of logits, whose reference follows the maximum by steps of 8, and so is what is relative to it: exp(logit - reference) times EXP_SCALE, …
template <typename T>
struct LogitExponential {
    Real<T> reference;
    Scaling<Real<T>> scaling;
    __device__ __forceinline__ Real<T> operator()(Real<T> x) const { return Element<T>::exponential(scaling.logit(x) - reference); }
};
// … and what is made of exponentials, or of elements.
template <typename Output, typename R>
struct OfElements {
    static constexpr bool OF_EXPONENTIAL = Output::OF_EXPONENTIAL;
    Output output;
    Scaling<R> scaling;
    __device__ __forceinline__ R of_kept(R kept) const {
        if constexpr (Output::OF_EXPONENTIAL) return output.of_kept(kept);
        else return output(scaling.logit(kept));
    }
};

// Grid: parts x lines. Leaves the state of (line, part) in parts_of[line * parts + part].
template <typename T, int COUNT, bool WHOLE>
__device__ __forceinline__ void split_states(const T* x, Normalizer<Real<T>>* parts_of, const T* y, int64_t len, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    wait_for_kernel_before();
    const int64_t total = gridDim.y * len;
    const SplitLine<T, COUNT, WHOLE> line{y, blockIdx.y * len, int(len), int(blockIdx.x), int(gridDim.x)};
    auto state = SoftmaxState<R>::empty();
    const int tiles = line.tiles(), once = line.tiles_read_once();
    auto next = line.tile(line.part);
    next.load(PlainAccess{}, x, y, total);
#pragma unroll 1
    for (int n = line.part; n < tiles; n += line.parts) {
        auto held = next;
        next = line.tile(n + line.parts);
        if (n + line.parts < once) {
            next.load(StreamingAccess{}, x, y, total);
        } else if (n + line.parts < tiles) {
            next.load(PlainAccess{}, x, y, total);
        }
        const R reference = state.grow(scaling.logit(held.max()));
        state.add(held.template exponentiate<Probability<R>>(LogitExponential<T>{reference, scaling}) * unscale<T>());
    }
    __shared__ Normalizer<R> of_warps[MAX_WARPS];
    const auto part = block_merge(state.template finish_part<T>(), of_warps);
    if (threadIdx.x == 0) parts_of[blockIdx.y * int64_t(gridDim.x) + blockIdx.x] = part;
}

template <typename T, template <typename> class Output, int COUNT, bool WHOLE>
__device__ __forceinline__ void split_apply(const T* x, const Normalizer<Real<T>>* parts_of, T* y, int64_t len, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    const int number = gridDim.y - 1 - blockIdx.y;
    const int64_t total = gridDim.y * len;
    const SplitLine<T, COUNT, WHOLE> line{y, number * len, int(len), int(gridDim.x - 1 - blockIdx.x), int(gridDim.x)};
    const int tiles = line.tiles(), last = line.part + (tiles - 1 - line.part) / line.parts * line.parts;
    wait_for_kernel_before();
    auto next = line.tile(last);
    next.load(PlainAccess{}, x, y, total);
    constexpr int AT_ONCE = sizeof(R) == 8 ? 2 : 9;  // Two parts a multiprocessor are 264.
    __shared__ Normalizer<R> told;
    const auto whole = merge_far_parts<AT_ONCE>(parts_of + number * int64_t(gridDim.x), line.parts, &told);
    const OfElements<Output<R>, R> output{output_of_line<T, Output>(whole.max, whole.sum * Element<T>::EXP_SCALE, scaling), scaling};
#pragma unroll 1
    for (int n = last; n >= line.part; n -= line.parts) {
        auto held = next;
        if (n > line.part) {
            next = line.tile(n - line.parts);
            next.load(PlainAccess{}, x, y, total);
        }
        const LogitExponential<T> exponential{part_reference(whole.max), scaling};
        held.template exponentiate<Output<R>>(exponential);
        held.store(StreamingAccess{}, y, exponential, output);
    }
}

// Elements that a thread holds of a tile; of the next, as many are on their way.
template <typename T>
constexpr int TILE_COUNT = sizeof(T) == 8 ? 8 : sizeof(T) == 2 ? 32 : 16;

#define STATES(name, dtype, T, WHOLE)                                                                               \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                            \
        name##_##dtype(const T* x, Normalizer<Real<T>>* parts, const T* y, int64_t len, Scaling<Real<T>> scaling) { \
        split_states<T, TILE_COUNT<T>, WHOLE>(x, parts, y, len, scaling);                                           \
    }
#define APPLY(name, dtype, T, Output, WHOLE)                                                                        \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                            \
        name##_##dtype(const T* x, const Normalizer<Real<T>>* parts, T* y, int64_t len, Scaling<Real<T>> scaling) { \
        split_apply<T, Output, TILE_COUNT<T>, WHOLE>(x, parts, y, len, scaling);                                    \
    }
