// What the benchmark itself runs on the GPU: the copy that softmax is measured by, and the search for unwritten
// elements. Compiled when the benchmark starts, by NVRTC, so without any header.

typedef unsigned long long u64;

// A copy that keeps four 128-bit loads of a thread in flight. A block takes tiles of 4 × blockDim vectors in turn, so the
// grid may have a block for every tile or fewer. Both pointers are 16-byte aligned.
template <bool streaming_loads, bool streaming_stores>
__device__ void copy(const uint4 *__restrict__ src, uint4 *__restrict__ dst, u64 bytes)
{
    const u64 vectors = bytes / 16;
    const u64 tile = 4ull * blockDim.x;
    for (u64 first = blockIdx.x * tile; first < vectors; first += gridDim.x * tile) {
        const u64 at = first + threadIdx.x;
        if (first + tile <= vectors) {
            uint4 held[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                held[i] = streaming_loads ? __ldcs(src + at + i * blockDim.x) : src[at + i * blockDim.x];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (streaming_stores) __stcs(dst + at + i * blockDim.x, held[i]);
                else dst[at + i * blockDim.x] = held[i];
            }
        } else {
            for (u64 one = at; one < vectors; one += blockDim.x) dst[one] = src[one];
        }
    }
    // The last bytes that fill no vector.
    if (blockIdx.x == 0 && threadIdx.x < bytes % 16) {
        const u64 at = vectors * 16 + threadIdx.x;
        ((char *)dst)[at] = ((const char *)src)[at];
    }
}

extern "C" __global__ void __launch_bounds__(256) copy_cached(const uint4 *__restrict__ src, uint4 *__restrict__ dst, u64 bytes)
{
    copy<false, false>(src, dst, bytes);
}

extern "C" __global__ void __launch_bounds__(256) copy_streaming(const uint4 *__restrict__ src, uint4 *__restrict__ dst, u64 bytes)
{
    copy<true, true>(src, dst, bytes);
}

// What is read makes room in the cache for what is written.
extern "C" __global__ void __launch_bounds__(256) copy_kept(const uint4 *__restrict__ src, uint4 *__restrict__ dst, u64 bytes)
{
    copy<true, false>(src, dst, bytes);
}

// Adds to `found` how many elements are not a number: without its sign, the bit pattern is above that of infinity.
template <typename Bits>
__device__ void count_nan(const Bits *values, u64 len, Bits magnitude, Bits infinity, u64 *found)
{
    u64 count = 0;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < len; i += (u64)gridDim.x * blockDim.x)
        count += (values[i] & magnitude) > infinity;
    if (count) atomicAdd(found, count);
}

extern "C" __global__ void count_nan_f32(const unsigned *values, u64 len, u64 *found)
{
    count_nan<unsigned>(values, len, 0x7fffffffu, 0x7f800000u, found);
}

extern "C" __global__ void count_nan_f16(const unsigned short *values, u64 len, u64 *found)
{
    count_nan<unsigned short>(values, len, 0x7fff, 0x7c00, found);
}

extern "C" __global__ void count_nan_bf16(const unsigned short *values, u64 len, u64 *found)
{
    count_nan<unsigned short>(values, len, 0x7fff, 0x7f80, found);
}
