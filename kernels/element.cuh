// The dtypes: read as the type that is computed in, written with one rounding.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float exponential(float x) { return expf(x); }  // 1 ulp, subnormal results kept
// Those of double are hundreds of instructions long: a call keeps the kernels small.
__device__ __noinline__ double exponential(double x) { return exp(x); }

template <typename T>
struct Element {  // float and double are computed in as they are
    using Real = T;
    // exponential(x) gives exp(x) times this.
    static constexpr float EXP_SCALE = 1;
    static __device__ __forceinline__ T exponential(T x) { return ::exponential(x); }
    static __device__ __forceinline__ T read(T x) { return x; }
    static __device__ __forceinline__ T write(T x) { return x; }
};

// For half precision: 2^8 exp(x) within 1e-6 in two instructions. ex2.approx.ftz flushes subnormal results, and the factor
// keeps out of there what is still a number in bf16.
struct HalfExponential {
    static constexpr float EXP_SCALE = 256;
    static __device__ __forceinline__ float exponential(float x) {
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, 1.44269504f, 8.0f)));
        return y;
    }
};

template <>
struct Element<__half> : HalfExponential {
    using Real = float;
    static __device__ __forceinline__ float read(__half x) { return __half2float(x); }
    static __device__ __forceinline__ __half write(float x) { return __float2half_rn(x); }
};

template <>
struct Element<__nv_bfloat16> : HalfExponential {
    using Real = float;
    static __device__ __forceinline__ float read(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __forceinline__ __nv_bfloat16 write(float x) { return __float2bfloat16_rn(x); }
};

template <typename T>
using Real = typename Element<T>::Real;

// What takes the factor out of a sum of exponentials, exactly.
template <typename T>
__device__ __forceinline__ Real<T> unscale() {
    return Real<T>(1) / Element<T>::EXP_SCALE;
}

// Instantiates a kernel for each dtype: KERNEL(suffix of its name, element type). The build compiles a module for each, by
// defining one of the names below.
#if defined(ONLY_F32)
#define FOR_EACH_DTYPE(KERNEL) KERNEL(f32, float)
#define FOR_EACH_WIDE_DTYPE(KERNEL) KERNEL(f32, float)
#elif defined(ONLY_F64)
#define FOR_EACH_DTYPE(KERNEL) KERNEL(f64, double)
#define FOR_EACH_WIDE_DTYPE(KERNEL) KERNEL(f64, double)
#elif defined(ONLY_F16)
#define FOR_EACH_DTYPE(KERNEL) KERNEL(f16, __half)
#define FOR_EACH_WIDE_DTYPE(KERNEL)
#elif defined(ONLY_BF16)
#define FOR_EACH_DTYPE(KERNEL) KERNEL(bf16, __nv_bfloat16)
#define FOR_EACH_WIDE_DTYPE(KERNEL)
#else
#define FOR_EACH_DTYPE(KERNEL) \
    KERNEL(f32, float)         \
    KERNEL(f64, double)        \
    KERNEL(f16, __half)        \
    KERNEL(bf16, __nv_bfloat16)
#define FOR_EACH_WIDE_DTYPE(KERNEL) \
    KERNEL(f32, float)              \
    KERNEL(f64, double)
#endif
