// The schedules of the state over the logits of a line, and what is stored for an element. `Logits` is one of line.cuh's:
// each_tile(f) hands out tiles of logits in the order of the line (-inf where the line has ended), map(f) writes f(x).
#pragma once
#include <type_traits>

#include "line.cuh"

template <int TILE, typename R>
__device__ __forceinline__ R max_of(const R (&tile)[TILE]) {
    R max = tile[0];
#pragma unroll
    for (int k = 1; k < TILE; k++) max = greater(max, tile[k]);
    return max;
}

// The sum of the terms, added two by two, which uses them up.
template <int COUNT, typename R>
__device__ __forceinline__ R pairwise_sum(R (&terms)[COUNT]) {
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2) {
#pragma unroll
        for (int k = 0; k < half; k++) terms[k] += terms[k + half];
    }
    return terms[0];
}

template <int TILE, typename R>
__device__ __forceinline__ R exp_sum(const R (&tile)[TILE], R reference) {
    R terms[TILE];
#pragma unroll
    for (int k = 0; k < TILE; k++) terms[k] = exponential(tile[k] - reference);
    return pairwise_sum(terms);
}

// Two passes: the maximum, then the sum.
template <typename Logits>
__device__ __forceinline__ auto safe_state(Logits& logits) {
    using R = typename Logits::R;
    auto state = SoftmaxState<R>::empty();
    logits.each_tile([&](const R (&tile)[Logits::TILE]) { state.grow(max_of(tile)); });
    const R reference = state.reference();
    logits.each_tile([&](const R (&tile)[Logits::TILE]) { state.add(exp_sum(tile, reference)); });
    return state;
}

// One pass: the sum is rescaled when a tile's maximum moves the reference.
template <typename Logits>
__device__ __forceinline__ auto online_state(Logits& logits) {
    using R = typename Logits::R;
    auto state = SoftmaxState<R>::empty();
    logits.each_tile([&](const R (&tile)[Logits::TILE]) {
        const R reference = state.grow(max_of(tile));
        state.add(exp_sum(tile, reference));
    });
    return state;
}

// What is stored for a logit, given the finished line, whose maximum is one; or of a part of the line, whose exponentials relative to its own
// maximum are to be multiplied by `factor`, given the exponential or the element, of which the maxima are some then.
template <typename R>
struct Probability {
    static constexpr bool OF_EXPONENTIAL = true;
    R max, inverse;
    Probability() = default;
    __device__ __forceinline__ Probability(Normalizer<R> line, Scaling<R> scaling) : max(part_reference(line.max)), inverse(term(line, scaling)) {}
    __device__ __forceinline__ R operator()(R logit) const { return exponential(logit - max) * inverse; }
    static __device__ __forceinline__ Probability of_part(R part_max, Normalizer<R> line, R factor, Scaling<R> scaling) {
        return of_term(part_max, {line.max, term(line, scaling)}, factor, scaling);
    }
    // The same in two steps: what a line's parts have in common, in place of the sum, and what is left for each.
    static __device__ __forceinline__ R term(Normalizer<R> line, Scaling<R> scaling) { return R(1) / (line.sum + scaling.least); }
    static __device__ __forceinline__ Probability of_term(R part_max, Normalizer<R> line, R factor, Scaling<R> scaling) {
        return Probability(quick_exponential(scaling.logit(part_max - part_reference(line.max))) * line.sum * factor);
    }
    // Of exponentials the inverse of whose sum this is, whatever they are relative to
    static __device__ __forceinline__ Probability of_inverse(R inverse) { return Probability(inverse); }
    __device__ __forceinline__ R of_kept(R e) const { return e * inverse; }

  private:
    __device__ __forceinline__ explicit Probability(R factor) : max(0), inverse(factor) {}
};

template <typename R>
struct LogProbability {
    static constexpr bool OF_EXPONENTIAL = false;
    R max, log_sum;
    Scaling<R> scaling;
    LogProbability() = default;
    __device__ __forceinline__ LogProbability(Normalizer<R> line, Scaling<R> scaling) : LogProbability(line.max, term(line, scaling), scaling) {}
    __device__ __forceinline__ R operator()(R logit) const { return (logit - max) - log_sum; }
    static __device__ __forceinline__ LogProbability of_part(R, Normalizer<R> line, R, Scaling<R> scaling) { return LogProbability(line, scaling); }
    static __device__ __forceinline__ R term(Normalizer<R> line, Scaling<R> scaling) { return logarithm(line.sum + scaling.least); }
    static __device__ __forceinline__ LogProbability of_term(R, Normalizer<R> line, R, Scaling<R> scaling) {
        return LogProbability(line.max, line.sum, scaling);
    }
    __device__ __forceinline__ R of_kept(R x) const { return fma(x - max, scaling.scale, -log_sum); }

  private:
    __device__ __forceinline__ LogProbability(R max, R log_sum, Scaling<R> scaling) : max(part_reference(max)), log_sum(log_sum), scaling(scaling) {}
};

// The output of a line that a thread knows all of, given its maximum and the sum of its exponentials, times EXP_SCALE.
template <typename T, template <typename> class Output>
__device__ __forceinline__ Output<Real<T>> output_of_line(Real<T> max, Real<T> sum, Scaling<Real<T>> scaling) {
    using R = Real<T>;
    if constexpr (Output<R>::OF_EXPONENTIAL) return Output<R>::of_inverse(reciprocal(sum + scaling.least));
    else return Output<R>(Normalizer<R>{max, sum * unscale<T>()}, scaling);
}

// The gradient of an element, given its result, the gradient of that, and the sum over the line: of g * y, or for log-softmax of g.
template <typename T>
__device__ __forceinline__ Real<T> gradient_of(Real<T> y, Real<T> g, Real<T> sum, bool log) {
    return log ? g - Element<T>::probability(y) * sum : y * (g - sum);
}

// Stores what is asked for, which a kernel is told at run time where that costs it nothing, given the state of all of a line.
template <typename Logits>
__device__ __forceinline__ void map_output(Logits& logits, const SoftmaxState<typename Logits::R>& state, bool log) {
    using R = typename Logits::R;
    const auto line = state.finish_part_by(exponential(state.max - state.reference()));
    if (log) logits.map(LogProbability<R>(line, logits.scaling));
    else logits.map(Probability<R>(line, logits.scaling));
}

// The results of SIZE neighbours in a row, each of a line of its own, given what was kept of them: a number each, or units of
// elements, whose exponentials relative to these references are computed again.
template <typename T, int SIZE, typename Kept, typename Output>
__device__ __forceinline__ Pack<T, SIZE> column_results(const Kept* kept, const Real<T> (&references)[SIZE], const Output (&output)[SIZE],
                                                       Scaling<Real<T>> scaling) {
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
    return pack_of<T, SIZE>([&](int c) {
        if constexpr (std::is_same_v<Kept, Real<T>>) {
            return output[c].of_kept(kept[c]);
        } else {
            Real<T> number = Element<T>::of_unit(kept[c / PER_UNIT], c % PER_UNIT);
            if constexpr (Output::OF_EXPONENTIAL) number = exponential_of<T>(number - references[c], scaling);
            return output[c].of_kept(number);
        }
    });
}

// A kernel for probabilities and its twin for their logarithms.
#define BOTH(KERNEL, family, dtype, T, ...)                           \
    KERNEL(family##_softmax, dtype, T, Probability, __VA_ARGS__)      \
    KERNEL(family##_log_softmax, dtype, T, LogProbability, __VA_ARGS__)
