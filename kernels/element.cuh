// The dtypes: read as the type that is computed in, written with one rounding.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
struct Element {  // float and double are computed in as they are
    using Real = T;
    static __device__ __forceinline__ T read(T x) { return x; }
    static __device__ __forceinline__ T write(T x) { return x; }
};

template <>
struct Element<__half> {
    using Real = float;
    static __device__ __forceinline__ float read(__half x) { return __half2float(x); }
    static __device__ __forceinline__ __half write(float x) { return __float2half_rn(x); }
};

template <>
struct Element<__nv_bfloat16> {
    using Real = float;
    static __device__ __forceinline__ float read(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __forceinline__ __nv_bfloat16 write(float x) { return __float2bfloat16_rn(x); }
};

template <typename T>
using Real = typename Element<T>::Real;

// Instantiates a kernel for each dtype: KERNEL(suffix of its name, element type).
#define FOR_EACH_DTYPE(KERNEL) \
    KERNEL(f32, float)         \
    KERNEL(f64, double)        \
    KERNEL(f16, __half)        \
    KERNEL(bf16, __nv_bfloat16)
