// Log-sum-exp, and what cross-entropy needs to know of each line: every element is read once and a few numbers are written
// for a line, so the ceiling is half the time of a copy. What is asked for is a switch that a block looks at once a line.
#pragma once
#include <cfloat>

#include "register_softmax.cuh"
#include "targets.cuh"

template <typename T>
struct Request {
    using R = Real<T>;
    const T* x;
    void* out;               // without targets log-sum-exps, of T; else statistics, of R
    int64_t lines, len;
    const int64_t* targets;  // of each line, or null
    int64_t ignored;         // the target of lines that are skipped
    const R* weights;        // of each class, or null: 1
    bool smooth;             // whether the sum over classes is asked for

    // Lines that are not to be read.
    __device__ __forceinline__ bool skips(int64_t line) const { return targets && ignores(ignored, targets[line]); }

    __device__ __forceinline__ int statistics() const { return weights || smooth ? MOST_STATISTICS : FEWEST_STATISTICS; }

    __device__ __forceinline__ void skip(int64_t line) const {
        for (int k = 0; k < statistics(); k++) static_cast<R*>(out)[k * lines + line] = 0;
    }

    // What a class counts in the sum over classes.
    __device__ __forceinline__ R weight(int64_t j) const { return weights ? weights[j] : R(1); }

    // `nan`: whether there is one beside a maximum of +inf. `sums`: over classes, of weight * (x - maximum) and of weight.
    // Elements of the line, which begins at `first`, are `stride` apart.
    __device__ __forceinline__ void write(int64_t line, Normalizer<R> found, bool nan, const R (&sums)[2], const T* first, int64_t stride) const {
        const R infinity = -negative_infinity<R>(), none = infinity - infinity;
        const bool finite = abs(found.max) != infinity;
        // The maximum itself adds exp(0) = 1: what lies below is rounding.
        const R log_sum = logarithm(found.sum < R(1) ? R(1) : found.sum);
        if (!targets) {
            // Of nothing but -inf the sum is 0, or NaN where one was passed over.
            const R special = found.max > R(0) ? (nan ? none : infinity) : found.max + found.sum;
            static_cast<T*>(out)[line] = Element<T>::write(finite ? found.max + log_sum : special);
            return;
        }
        const int64_t target = targets[line];
        const bool valid = target >= 0 && target < len;
        const R log = finite ? log_sum : none;
        const R numbers[MOST_STATISTICS] = {
            valid ? (Element<T>::read(first[target * stride]) - found.max) - log : none,
            valid ? weight(target) : weights ? none : R(1),
            found.max,
            log,
            R(1),
            smooth ? sums[0] - sums[1] * log : R(0),
            sums[1],
        };
#pragma unroll
        for (int k = 0; k < MOST_STATISTICS; k++) {
            if (k < statistics()) static_cast<R*>(out)[k * lines + line] = numbers[k];
        }
    }

    // The same of a line that is skipped, or whose elements one thread looks at again where there may be a NaN.
    __device__ __forceinline__ void write_alone(int64_t line, bool skipped, Normalizer<R> found, const R (&sums)[2], const T* first,
                                                int64_t stride) const {
        if (skipped) {
            skip(line);
            return;
        }
        bool nan = false;
        if (!targets && found.max == -negative_infinity<R>()) {
            for (int64_t j = 0; j < len; j++) nan |= isnan(Element<T>::read(first[j * stride]));
        }
        write(line, found, nan, sums, first, stride);
    }
};

// The sums over classes, of weight * (x - pivot) and of weight, as far as one thread has added them. The pivot is the maximum of what it
// has added: so all terms have one sign, and neither what the logits have in common nor one far below the others drowns them.
template <typename R>
struct ClassSums {
    CompensatedSum<R> terms, weights;

    static __device__ __forceinline__ ClassSums empty() { return {CompensatedSum<R>::empty(), CompensatedSum<R>::empty()}; }

    // Finite where nothing but -inf was seen.
    static __device__ __forceinline__ R pivot(R max) { return greater(max, sizeof(R) == 8 ? R(-DBL_MAX) : R(-FLT_MAX)); }

    // What is to be added to the first sum where the maximum becomes `to`. By halves: from the lowest number up to a great one the way itself
    // is infinite, and no weight at all makes NaN of that.
    static __device__ __forceinline__ R moved(R weights, R from, R to) {
        const R half = weights * (R(0.5) * pivot(from) - R(0.5) * pivot(to));
        return half + half;
    }

    // Given the maximum of all that was added, and of that and what is added next.
    __device__ __forceinline__ void grow(R from, R to) {
        if (from != to) terms.add(moved(weights.value(), from, to));
    }

    // `count` elements that are neighbours of `x`, element j of the line, given the maximum. They have just been read: they come from a
    // cache, and take no registers from those who do not ask for them.
    template <typename T>
    __device__ __forceinline__ void add(const Request<T>& request, const T* x, int64_t j, int count, R max) {
        const R pivot = ClassSums::pivot(max);
        R sum = 0, sum_of_weights = 0;
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const R weight = request.weight(j + i);
            sum += weight * (Element<T>::read(x[i]) - pivot);
            sum_of_weights += weight;
        }
        terms.add(sum);
        weights.add(sum_of_weights);
    }
};

#define KERNEL(name, dtype, T, THREADS, BLOCKS, BODY)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                          \
        name##_##dtype(const T* x, void* out, int64_t lines, int64_t len, int64_t inner, int shift, int64_t groups,        \
                       const int64_t* targets, int64_t ignored, const Real<T>* weights, int smooth) {                      \
        wait_for_kernel_before();                                                                                          \
        const Request<T> request{x, out, lines, len, targets, ignored, weights, smooth != 0};                              \
        BODY;                                                                                                              \
    }
