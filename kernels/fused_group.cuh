// Softmax with what models put around it, of lines of any length along any dimension: a group of threads walks its lines twice.
// The second time they come from the L2 cache where what all groups have at once fits in.
#pragma once
#include "fused.cuh"
#include "line_group.cuh"

// The logits of a line: those in its window.
template <typename T>
struct FusedLogits {
    using R = Real<T>;
    static constexpr int TILE = 4;  // elements in flight at once

    const Fused<R>& call;
    Place at;
    StridedLine line;

    // The logits from element `from` on, -inf of what takes no part, and their scores
    __device__ __forceinline__ void read(int64_t from, R (&z)[TILE], T (&scores)[TILE]) const {
        T added[TILE];
        uint8_t kept[TILE];
        const int first = line.left(from, at.first), left = line.left(from, at.end);
        line.load(scores, static_cast<const T*>(call.scores) + at.scores, call.inner, from, left);
        if (call.adds) line.load(added, static_cast<const T*>(call.bias) + at.bias, call.bias_step, from, left);
        if (call.masks) line.load(kept, static_cast<const uint8_t*>(call.mask) + at.mask, call.mask_step, from, left);
#pragma unroll
        for (int k = 0; k < TILE; k++) z[k] = product(Element<T>::read(scores[k]), call.scale);
        if (call.cap > R(0)) {
#pragma unroll
            for (auto& x : z) x = product(call.cap, hyperbolic_tangent(x * call.inverse_cap));
        }
        if (call.adds) {
#pragma unroll
            for (int k = 0; k < TILE; k++) z[k] += Element<T>::read(added[k]);
        }
        if (call.masks) {
#pragma unroll
            for (int k = 0; k < TILE; k++) z[k] = kept[k] ? z[k] : negative_infinity<R>();
        }
#pragma unroll
        for (int k = 0; k < TILE; k++) z[k] = line.has(k, left) && !line.has(k, first) ? z[k] : negative_infinity<R>();
    }

    // The gradients of the results from element `from` on
    __device__ __forceinline__ void read_gradients(int64_t from, R (&g)[TILE]) const {
        const auto of = [&](auto* type) {
            using O = std::remove_pointer_t<decltype(type)>;
            O elements[TILE];
            line.load(elements, static_cast<const O*>(call.gradient) + at.scores, call.inner, from, line.left(from, at.end));
#pragma unroll
            for (int k = 0; k < TILE; k++) g[k] = static_cast<R>(Element<O>::read(elements[k]));
        };
        if (call.dtype == OWN<T>) of(static_cast<T*>(nullptr));
        else by_dtype(call.dtype, of);
        if (call.threshold) drop_any(from, g, call.kept_scale);
    }

    // Multiplies what is not dropped, and sets to 0 what is.
    __device__ __forceinline__ void drop_any(int64_t from, R (&values)[TILE], R factor) const {
        uint32_t dropped = 0;
#pragma unroll 1
        for (int k = 0; k < TILE; k++) {
            each_dropped<1>(call, at.line, from + k * line.step, [&](int) { dropped |= 1u << k; });
        }
#pragma unroll
        for (int k = 0; k < TILE; k++) values[k] = dropped >> k & 1 ? R(0) : values[k] * factor;
    }

    template <typename O>
    __device__ __forceinline__ void store(O* to, int64_t from, const R (&results)[TILE]) const {
        line.store<TILE>(to + at.scores, call.inner, from, line.left(from, line.len), [&](int k) { return rounded_to<O>(results[k]); });
    }
};

// The state of a line, and the sum of the gradients g of its results, which has the exponentials as its weights or, of log-softmax, none.
template <typename R>
struct WeighedState {
    SoftmaxState<R> softmax;
    CompensatedSum<R> dot;
    bool weighted;

    __device__ __forceinline__ R grow(R max) {
        const R before = softmax.reference();
        const bool any = softmax.max != negative_infinity<R>();
        const R reference = softmax.grow(max);
        if (weighted && any && reference != before) dot.scale(exponential(before - reference));
        return reference;
    }
    __device__ __forceinline__ void merge(WeighedState other) {
        grow(other.softmax.max);
        other.grow(softmax.max);
        softmax.sum.merge(other.softmax.sum);
        dot.merge(other.dot);
    }
};

template <typename R>
__device__ __forceinline__ SoftmaxState<R>& softmax_of(SoftmaxState<R>& state) { return state; }
template <typename R>
__device__ __forceinline__ SoftmaxState<R>& softmax_of(WeighedState<R>& state) { return state.softmax; }

// A finished line: its maximum and sum with the sink, which becomes part of the state, and whether nothing takes part.
template <typename T, typename State>
__device__ __forceinline__ Normalizer<Real<T>> finished(const Fused<Real<T>>& call, const Place& at, State& state, bool& empty) {
    using R = Real<T>;
    auto& softmax = softmax_of(state);
    if (call.sinks) {
        const R sink = sink_of<T>(call, at), reference = state.grow(sink);
        softmax.add(exponential(sink - reference));
    }
    empty = softmax.max == negative_infinity<R>() && softmax.sum.value() == R(0);
    return softmax.finish();
}

// The tile that is read last on the way to the line's state is the first that is needed again, and kept.
template <typename T>
__device__ __forceinline__ void fused_line(const FusedLogits<T>& logits, const LineGroup& group) {
    using R = Real<T>;
    constexpr int TILE = FusedLogits<T>::TILE;
    const auto& call = logits.call;
    const Place& at = logits.at;
    auto state = SoftmaxState<R>::empty();
    int64_t kept = -1;
    R z[TILE];
    T scores[TILE];
    const auto read = [&](int64_t from) {
        logits.read(from, z, scores);
        kept = from;
    };
    logits.line.template each_first_backwards<TILE>(at.first, at.end, [&](int64_t from) {
        read(from);
        const R reference = state.grow(max_of(z));
        state.add(exp_sum(z, reference));
    });
    state = group.reduce(state);
    bool empty;
    const auto line = finished<T>(call, at, state, empty);
    const R inverse = call.kept_scale / line.sum, log_sum = call.log ? logarithm(line.sum) : R(0);
    const R of_none = call.nan_rows && !call.sinks ? R(NAN) : call.log ? negative_infinity<R>() : R(0);
    logits.line.template each_first<TILE>(logits.line.len, [&](int64_t from) {
        if (from != kept) read(from);
        R results[TILE];
        if (call.log) {
#pragma unroll
            for (int k = 0; k < TILE; k++) results[k] = (z[k] - line.max) - log_sum;
        } else {
#pragma unroll
            for (int k = 0; k < TILE; k++) results[k] = exponential(z[k] - line.max) * inverse;
        }
        if (empty) {
#pragma unroll
            for (auto& x : results) x = of_none;
        }
        if (call.threshold) logits.drop_any(from, results, R(1));
        if (call.dtype == OWN<T>) return logits.store(static_cast<T*>(call.result), from, results);
        by_dtype(call.dtype, [&](auto* type) { logits.store(reinterpret_cast<decltype(type)>(call.result), from, results); });
    });
}

template <typename T>
__device__ __forceinline__ void fused_backward_line(const FusedLogits<T>& logits, const LineGroup& group) {
    using R = Real<T>;
    constexpr int TILE = FusedLogits<T>::TILE;
    const auto& call = logits.call;
    const Place& at = logits.at;
    const auto takes_part = [](R z) { return !(z == negative_infinity<R>()); };
    WeighedState<R> state{SoftmaxState<R>::empty(), CompensatedSum<R>::empty(), !call.log};
    int64_t kept = -1;
    R z[TILE], g[TILE];
    T scores[TILE];
    const auto read = [&](int64_t from) {
        logits.read_gradients(from, g);
        logits.read(from, z, scores);
        kept = from;
    };
    logits.line.template each_first_backwards<TILE>(at.first, at.end, [&](int64_t from) {
        read(from);
        const R reference = state.grow(max_of(z));
        R exponentials[TILE], terms[TILE];
#pragma unroll
        for (int k = 0; k < TILE; k++) {
            const R e = exponentials[k] = exponential(z[k] - reference);
            // What takes no part does not count, even if it is not a number.
            terms[k] = !takes_part(z[k]) ? R(0) : call.log ? g[k] : g[k] * e;
        }
        state.softmax.add(pairwise_sum(exponentials));
        state.dot.add(pairwise_sum(terms));
    });
    state = group.reduce(state);
    bool empty;
    const auto line = finished<T>(call, at, state, empty);
    const R inverse = empty ? R(0) : R(1) / line.sum, reference = empty ? R(0) : line.max;
    R dot = state.dot.value();
    if (!call.log) dot = empty ? R(0) : dot / state.softmax.sum.value();
    if (call.sinks_gradient && group.leads() && logits.line.len > 0) {
        const R p = empty ? R(0) : exponential(sink_of<T>(call, at) - reference) * inverse;
        call.sinks_gradient[at.line] = -p * dot;
    }
    logits.line.template each_first<TILE>(logits.line.len, [&](int64_t from) {
        if (from != kept) read(from);
        R results[TILE];
#pragma unroll
        for (int k = 0; k < TILE; k++) {
            const R p = exponential(z[k] - reference) * inverse;
            results[k] = !takes_part(z[k]) ? R(0) : call.log ? g[k] - p * dot : p * (g[k] - dot);
        }
        if (call.logits_gradient) logits.store(call.logits_gradient, from, results);
        if (!call.result) return;
#pragma unroll
        for (int k = 0; k < TILE; k++) {
            if (takes_part(z[k])) results[k] *= slope(call, Element<T>::read(scores[k]));
        }
        logits.store(static_cast<T*>(call.result), from, results);
    });
}

template <typename T, bool BACKWARD>
__device__ __forceinline__ void fused_group(const Fused<Real<T>>& call, int shape, int64_t groups) {
    const LineGroup group(groups, call.len, call.inner, shape);
    group.each([&](int64_t number, const StridedLine& line) {
        FusedLogits<T> logits{call, locate<false>(call, number), line};
        logits.at.scores = line.start;
        if (line.len == 0) logits.at.first = logits.at.end = 0;
        if constexpr (BACKWARD) fused_backward_line(logits, group);
        else fused_line(logits, group);
    });
}
