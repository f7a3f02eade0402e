// The dtypes: read as the type that is computed in, written with one rounding.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// A product that is not fused into the addition behind it, which would change what the addition rounds away.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }

__device__ __forceinline__ float exponential(float x) { return expf(x); }  // 1 ulp, subnormal results kept
// Those of double are hundreds of instructions long: a call keeps the kernels small.
__device__ __noinline__ double exponential(double x) { return exp(x); }

// 2^x within 2 ulp; 0 in place of subnormal results.
__device__ __forceinline__ float flushed_power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Within a relative 4e-7 + 1e-8 |x|: what the rounding of the exponent loses is put back by a factor. Subnormal results are
// kept, within twice their spacing.
__device__ __forceinline__ float quick_exponential(float x) {
    const float exponent = x * 1.44269504f, lost = fmaf(exponent, -0.693147182f, x);
    const bool tiny = exponent < -126.0f;
    const float y = flushed_power_of_two(tiny ? exponent * 0.5f : exponent);
    return tiny ? y * y : fmaf(y, lost, y);
}
__device__ __forceinline__ double quick_exponential(double x) { return exponential(x); }

// Within a relative 5e-7 + 6e-8 |x| in three instructions: the square of half the power. Subnormal results are kept.
__device__ __forceinline__ float swift_exponential(float x) {
    const float root = flushed_power_of_two(x * 0.72134752f);
    return root * root;
}
__device__ __forceinline__ double swift_exponential(double x) { return exponential(x); }

// A dtype: what it is computed in, and how. A unit is what a register holds of it: one element, or two neighbours of half
// precision. exponential(x) gives exp(x) times EXP_SCALE, probability(log) gives exp(log) where what is below 1e-38 does not count.
template <typename T>
struct Element;

// float and double are computed in as they are.
template <typename T>
struct WideElement {
    using Real = T;
    using Unit = T;
    static constexpr int PER_UNIT = 1;
    static constexpr float EXP_SCALE = 1, LOG2_EXP_SCALE = 0;
    static __device__ __forceinline__ T read(T x) { return x; }
    static __device__ __forceinline__ T write(T x) { return x; }
    static __device__ __forceinline__ T of_unit(T unit, int) { return unit; }
    static __device__ __forceinline__ T to_unit(const T (&x)[1]) { return x[0]; }
};

template <>
struct Element<double> : WideElement<double> {
    static __device__ __forceinline__ double exponential(double x) { return ::exponential(x); }
    static __device__ __forceinline__ double probability(double log) { return ::exponential(log); }
};

template <>
struct Element<float> : WideElement<float> {
    static __device__ __forceinline__ float exponential(float x) { return quick_exponential(x); }
    static __device__ __forceinline__ float probability(float log) { return quick_exponential(log); }
};

// For half precision: 2^8 exp(x) within 1e-6 in two instructions. The factor keeps what is still a number in bf16 from being
// flushed to 0.
struct HalfElement {
    using Real = float;
    static constexpr int PER_UNIT = 2;
    static constexpr float EXP_SCALE = 256, LOG2_EXP_SCALE = 8;
    static __device__ __forceinline__ float exponential(float x, float log2_e = 1.44269504f) { return flushed_power_of_two(fmaf(x, log2_e, LOG2_EXP_SCALE)); }
    static __device__ __forceinline__ float probability(float log) { return flushed_power_of_two(log * 1.44269504f); }
};

// What makes logits of elements. Where it is the difference to a maximum that is multiplied, a line's logits are as exact as those differences, whatever the
// maximum is; and it costs nothing but for f32 and f64, whose exponentials are made of the logit, a multiplication.
template <typename R>
struct Scaling {
    R scale;      // above 0
    R steepness;  // the same times log2 e
    R least;      // added to a line's sum: 0; or so little that only a sum of 0, as where all is -inf, is another one then, and probabilities are 0 and not NaN

    // Of an element, or of the difference of two
    __device__ __forceinline__ R logit(R x) const { return product(x, scale); }
};

// exp(logit - reference's logit) times EXP_SCALE in two instructions: x log2 e is exact until the reference's is subtracted, whose rounding all that is
// relative to it have in common. From 2^20 on that would be too much, but logits of half precision are equal there or so far apart that
// only the power of two of what they are multiplied with matters.
struct RelativeExponential {
    float factor, shift;

    RelativeExponential() = default;
    __device__ __forceinline__ RelativeExponential(float reference, Scaling<float> scaling)
        : factor(fabsf(scaling.logit(reference)) < float(1 << 20) ? scaling.steepness : __uint_as_float(__float_as_uint(scaling.scale) & 0xff800000u)),
          shift(HalfElement::LOG2_EXP_SCALE - reference * factor) {}
    __device__ __forceinline__ float operator()(float x) const { return flushed_power_of_two(fmaf(x, factor, shift)); }
};

template <>
struct Element<__half> : HalfElement {
    using Unit = __half2;
    static constexpr uint32_t NEGATIVE_INFINITY = 0xfc00;
    static __device__ __forceinline__ float read(__half x) { return __half2float(x); }
    static __device__ __forceinline__ __half write(float x) { return __float2half_rn(x); }
    static __device__ __forceinline__ float of_unit(__half2 unit, int i) { return __half2float(i ? unit.y : unit.x); }
    static __device__ __forceinline__ __half2 to_unit(const float (&x)[2]) { return __floats2half2_rn(x[0], x[1]); }
};

template <>
struct Element<__nv_bfloat16> : HalfElement {
    using Unit = __nv_bfloat162;
    static constexpr uint32_t NEGATIVE_INFINITY = 0xff80;
    static __device__ __forceinline__ float read(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __forceinline__ __nv_bfloat16 write(float x) { return __float2bfloat16_rn(x); }
    static __device__ __forceinline__ float of_unit(__nv_bfloat162 unit, int i) {
        const uint32_t bits = reinterpret_cast<const uint32_t&>(unit);
        return __uint_as_float(i ? bits & 0xffff0000u : bits << 16);
    }
    static __device__ __forceinline__ __nv_bfloat162 to_unit(const float (&x)[2]) {
#if __CUDA_ARCH__ >= 800
        return __floats2bfloat162_rn(x[0], x[1]);
#else  // the same in fewer instructions than the toolkit's
        const uint32_t bits = __byte_perm(rounded(x[0]), rounded(x[1]), 0x7632);
        return reinterpret_cast<const __nv_bfloat162&>(bits);
    }
    // The nearest number of bfloat16, ties to even, in the upper half.
    static __device__ __forceinline__ uint32_t rounded(float x) {
        const uint32_t bits = __float_as_uint(x);
        return isnan(x) ? 0x7fffffffu : bits + 0x7fff + (bits >> 16 & 1);
#endif
    }
};

template <typename T>
using Real = typename Element<T>::Real;
template <typename T>
using Unit = typename Element<T>::Unit;

// exp(logit) times EXP_SCALE, of the difference of two elements.
template <typename T>
__device__ __forceinline__ Real<T> exponential_of(Real<T> difference, Scaling<Real<T>> scaling) {
    if constexpr (Element<T>::PER_UNIT == 2) return Element<T>::exponential(difference, scaling.steepness);
    else return Element<T>::exponential(scaling.logit(difference));
}

// exp(logit - reference's logit) times EXP_SCALE, where no common factor may be lost.
template <typename T>
struct ExactExponential {
    Real<T> reference;
    Scaling<Real<T>> scaling;

    __device__ __forceinline__ ExactExponential(Real<T> reference, Scaling<Real<T>> scaling) : reference(reference), scaling(scaling) {}
    __device__ __forceinline__ Real<T> operator()(Real<T> x) const { return exponential_of<T>(x - reference, scaling); }
};

// The same where exponentials are only summed, in fewer instructions and registers.
template <typename T>
struct SummedExponential : ExactExponential<T> {
    using ExactExponential<T>::ExactExponential;
    __device__ __forceinline__ Real<T> operator()(Real<T> x) const {
        if constexpr (std::is_same_v<T, float>) return swift_exponential(this->scaling.logit(x - this->reference));
        else return ExactExponential<T>::operator()(x);
    }
};
// … by what becomes of them
template <typename T, typename Output>
using ExponentialFor = std::conditional_t<Output::OF_EXPONENTIAL, ExactExponential<T>, SummedExponential<T>>;

// What takes the factor out of a sum of exponentials, exactly.
template <typename T>
__device__ __forceinline__ Real<T> unscale() {
    return Real<T>(1) / Element<T>::EXP_SCALE;
}

// Instantiates kernels for each dtype: KERNELS(suffix of their names, element type). The build compiles some at a time, by
// defining which it does without.
#ifdef WITHOUT_SINGLE
#define FOR_EACH_SINGLE_DTYPE(KERNELS)
#else
#define FOR_EACH_SINGLE_DTYPE(KERNELS) KERNELS(f32, float)
#endif
#ifdef WITHOUT_DOUBLE
#define FOR_EACH_DOUBLE_DTYPE(KERNELS)
#else
#define FOR_EACH_DOUBLE_DTYPE(KERNELS) KERNELS(f64, double)
#endif
#ifdef WITHOUT_HALF
#define FOR_EACH_HALF_DTYPE(KERNELS)
#else
#define FOR_EACH_HALF_DTYPE(KERNELS) KERNELS(f16, __half) KERNELS(bf16, __nv_bfloat16)
#endif
#define FOR_EACH_DTYPE(KERNELS) FOR_EACH_SINGLE_DTYPE(KERNELS) FOR_EACH_DOUBLE_DTYPE(KERNELS) FOR_EACH_HALF_DTYPE(KERNELS)
