// The gradients, where a bias is broadcast to several lines: its gradient is the sum of the logits' gradients of these, which one
// group of threads takes one after the other and adds up, so that they are not written. 3/2 of a copy's bytes and the sums, which is the floor.
#pragma once
#include "fused.cuh"

// Dimensions that lines are numbered along, outermost first, and by how much the number grows with a step.
struct LineSteps {
    struct Steps : ExactDivisor {
        uint32_t step;
    } of[MAX_AXES];
    int32_t count;

    __device__ __forceinline__ uint32_t line(uint32_t number) const {
        uint32_t line = 0;
#pragma unroll 1
        for (int i = count - 1; i >= 0; i--) {
            const uint32_t rest = of[i].quotient(number);
            line += (number - rest * of[i].size) * of[i].step;
            number = rest;
        }
        return line;
    }
};

// For each line of the bias as many are added up, in parts of up to 16, whose plain sums are as good as f32; src/cuda/fused.rs lays this out alike.
template <typename R>
struct BiasSums {
    R* sums;  // the lines of a part one after the other, and part after part
    LineSteps kept, summed;
    uint32_t kept_lines, summed_lines, lines_of_part;
    uint32_t groups;  // lines of the bias times parts
};
static_assert(sizeof(BiasSums<float>) == 288 && sizeof(BiasSums<double>) == 288, "as src/cuda/fused.rs lays it out");

// Fetches a line of both tensors into the L2 cache: a group, of which there is room for few, has nothing else to do while it waits for the next one.
template <typename T, typename Group>
__device__ __forceinline__ void fetch(const Fused<Real<T>>& call, const Group& group, int64_t line) {
    constexpr int LINE = 128 / sizeof(T);  // of the cache
    int64_t first = 0, end = call.len;
    if (call.window) {
        const Place place = locate<true>(call, line);
        first = place.first / LINE * LINE, end = place.end;
    }
    const int64_t j = first + group.rank() * LINE, at = line * call.len + j;
    if (j >= end) return;
    prefetch(static_cast<const T*>(call.scores) + at);
    if (call.dtype == OWN<T>) prefetch(static_cast<const T*>(call.gradient) + at);
}

template <typename T, int COUNT, int SIZE, typename Group>
__device__ __forceinline__ void fused_backward_bias(const Fused<Real<T>>& call, const BiasSums<Real<T>>& bias, const Group& group) {
    using R = Real<T>;
    constexpr int PACKS = COUNT / SIZE;
    const int64_t number = group.line();
    const bool there = Group::BLOCK || number < bias.groups;
    const uint32_t own = there ? static_cast<uint32_t>(number) : 0, part = own / bias.kept_lines;
    const uint32_t kept = bias.kept.line(own - part * bias.kept_lines), first = part * bias.lines_of_part;
    const uint32_t end = min(first + bias.lines_of_part, bias.summed_lines);
    R sums[PACKS][SIZE] = {};
#pragma unroll 1
    for (uint32_t i = first; group.any(i < end); i++) {
        if (Group::BLOCK && i > first) __syncthreads();  // All have read the parts of the line before.
        const bool takes = there && i < end;
        if (there && i + 1 < end) fetch<T>(call, group, kept + bias.summed.line(i + 1));
        const uint32_t line = kept + bias.summed.line(i < end ? i : first);
        fused_backward_line<T, COUNT, SIZE, Softcap::ASKED>(call, group, line, takes, [&](int k, int64_t, const auto& z) {
#pragma unroll
            for (int n = 0; n < SIZE; n++) sums[k][n] += z[n];
        });
    }
    if (!there) return;
    const auto places = held_logits<T, COUNT, SIZE, true>(group, Place{});
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (places.place(k) < call.len) store_as(call.access(), bias.sums + number * call.len + places.place(k), sums[k]);
    }
}

#define FUSED_BACKWARD_BIAS_WARP(name, dtype, T, COUNT, SIZE)                                                                    \
    extern "C" __global__ void __launch_bounds__(128)                                                                            \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, const __grid_constant__ BiasSums<Real<T>> bias, int shift) { \
        fused_backward_bias<T, COUNT, SIZE>(call, bias, WarpGroup<Real<T>>{shift});                                              \
    }
// Of half precision 96 registers: (8, 16, 2048, 2048) bf16 with a bias for all of the batch 2.36 copies, with 128 2.57; f32 with 128 1.88, with 96 2.03.
#define FUSED_BACKWARD_BIAS_BLOCK(name, dtype, T, COUNT, SIZE)                                                                   \
    extern "C" __global__ void __launch_bounds__(sizeof(T) == 2 ? 640 : 512)                                                     \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, const __grid_constant__ BiasSums<Real<T>> bias) {            \
        using R = Real<T>;                                                                                                       \
        __shared__ Weighted<R> parts[MAX_WARPS];                                                                                 \
        fused_backward_bias<T, COUNT, SIZE>(call, bias, WholeBlocks<R, BlockExchange<R>>{{}, parts});                            \
    }
