// The algebra that every softmax here is a schedule of; src/state.rs is the same algebra for the CPU, and says why it is
// built so. Both are tested against tests/state_cases.txt.
//
// The state of a set of numbers is (m, d): m their maximum and d the sum of exp(x - r), with the reference r = m rounded
// to a multiple of 8. R is the type computed in: float, or double for f64 tensors.
#pragma once
#include "element.cuh"

__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __noinline__ double logarithm(double x) { return log(x); }
// NaN is passed over: it reaches the result through the sum.
__device__ __forceinline__ float greater(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double greater(double a, double b) { return fmax(a, b); }
#if __CUDA_ARCH__ >= 800
constexpr bool COMPARES_PAIRS = true;
__device__ __forceinline__ __half2 greater(__half2 a, __half2 b) { return __hmax2(a, b); }
__device__ __forceinline__ __nv_bfloat162 greater(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2(a, b); }
#else
constexpr bool COMPARES_PAIRS = false;
template <typename T>
__device__ __forceinline__ Unit<T> greater_units(Unit<T> a, Unit<T> b) {
    const float max[] = {greater(Element<T>::of_unit(a, 0), Element<T>::of_unit(b, 0)),
                         greater(Element<T>::of_unit(a, 1), Element<T>::of_unit(b, 1))};
    return Element<T>::to_unit(max);
}
__device__ __forceinline__ __half2 greater(__half2 a, __half2 b) { return greater_units<__half>(a, b); }
__device__ __forceinline__ __nv_bfloat162 greater(__nv_bfloat162 a, __nv_bfloat162 b) { return greater_units<__nv_bfloat16>(a, b); }
#endif
// Of a float in fewer instructions than a division, and as exact but where it is 0 or infinite
__device__ __forceinline__ float reciprocal(float x) {
    const float y = __fdividef(1.0f, x);
    return fmaf(y, fmaf(-x, y, 1.0f), y);
}
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }
// Within 1 ulp
__device__ __forceinline__ float quick_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ double quick_reciprocal(double x) { return 1.0 / x; }
__device__ __forceinline__ float round_to_grid(float x) { return rintf(x * 0.125f) * 8.0f; }
__device__ __forceinline__ double round_to_grid(double x) { return rint(x * 0.125) * 8.0; }

template <typename R>
__device__ __forceinline__ R negative_infinity() {
    return static_cast<R>(-__int_as_float(0x7f800000));
}

// A running sum that carries what each addition rounds away into the next (Kahan's, with Knuth's two-sum).
template <typename R>
struct CompensatedSum {
    R sum, carry;

    static __device__ __forceinline__ CompensatedSum empty() { return {R(0), R(0)}; }

    __device__ __forceinline__ void add(R x) {
        x += carry;
        const R total = sum + x;
        const R x_part = total - sum;
        const R lost = (sum - (total - x_part)) + (x - x_part);
        // What an infinity rounds away is NaN, and no part of the sum.
        carry = isfinite(total) ? lost : R(0);
        sum = total;
    }

    __device__ __forceinline__ void merge(const CompensatedSum& other) {
        add(other.sum);
        carry += other.carry;
    }

    __device__ __forceinline__ void scale(R factor) {
        sum = product(sum, factor);
        carry = product(carry, factor);
    }

    __device__ __forceinline__ R value() const { return sum + carry; }

    __device__ __forceinline__ CompensatedSum shuffle_xor(int mask) const {
        return {__shfl_xor_sync(~0u, sum, mask), __shfl_xor_sync(~0u, carry, mask)};
    }

    __device__ __forceinline__ CompensatedSum of_first_lane() const {
        return {__shfl_sync(~0u, sum, 0), __shfl_sync(~0u, carry, 0)};
    }
};

// The finished state of a line: its maximum and the sum of exp(x - maximum). Read, written and sent as one.
template <typename R>
struct alignas(2 * sizeof(R)) Normalizer {
    R max, sum;
};

// What to subtract from the elements of a part with this maximum. Finite where nothing but -inf was seen, so that
// exp(-inf - r) is 0 and a NaN survives.
template <typename R>
__device__ __forceinline__ R part_reference(R max) {
    return max == negative_infinity<R>() ? R(0) : max;
}

template <typename R>
struct SoftmaxState {
    R max;
    CompensatedSum<R> sum;

    static __device__ __forceinline__ SoftmaxState empty() { return {negative_infinity<R>(), CompensatedSum<R>::empty()}; }

    // Finite where nothing but -inf was seen, so that exp(-inf - r) is 0 and a NaN survives.
    static __device__ __forceinline__ R reference_for(R max) {
        return max == negative_infinity<R>() ? R(0) : round_to_grid(max);
    }

    __device__ __forceinline__ R reference() const { return reference_for(max); }

    // Takes `other` into the maximum, rescaling the sum if the reference moves; answers the reference.
    __device__ __forceinline__ R grow(R other) {
        const R old_reference = reference();
        if (!(other > max)) return old_reference;
        const R new_reference = reference_for(other);
        // The sum of an empty state is 0 (or NaN) relative to anything.
        if (new_reference != old_reference && max != negative_infinity<R>()) {
            sum.scale(exponential(old_reference - new_reference));
        }
        max = other;
        return new_reference;
    }

    // Adds a part of the sum: exponentials relative to the reference.
    __device__ __forceinline__ void add(R part) { sum.add(part); }

    // The state of the union of two sets.
    __device__ __forceinline__ void merge(SoftmaxState other) {
        grow(other.max);
        other.grow(max);
        sum.merge(other.sum);
    }

    // Of a line, given exp(max - reference), computed as the terms of the sum were.
    __device__ __forceinline__ Normalizer<R> finish_by(R of_max) const {
        // Divided rather than multiplied by the inverse, so that a line of one element sums to exactly 1.
        const R total = sum.value() / of_max;
        // The maximum itself adds exp(0) = 1: what lies below is rounding, and would let p pass 1.
        return {max, total < R(1) ? R(1) : total};
    }

    // The same for what may hold nothing but -inf, whose sum is 0: a part of a line, or a line for which that is not NaN yet.
    __device__ __forceinline__ Normalizer<R> finish_part_by(R of_max) const {
        return max == negative_infinity<R>() ? Normalizer<R>{max, sum.value()} : finish_by(of_max);
    }

    // The same, of exponentials of elements of T.
    template <typename T>
    __device__ __forceinline__ Normalizer<R> finish_part() const {
        return finish_part_by(Element<T>::exponential(max - reference()) * unscale<T>());
    }

    __device__ __forceinline__ SoftmaxState shuffle_xor(int mask) const {
        return {__shfl_xor_sync(~0u, max, mask), sum.shuffle_xor(mask)};
    }

    __device__ __forceinline__ SoftmaxState of_first_lane() const { return {__shfl_sync(~0u, max, 0), sum.of_first_lane()}; }
};
