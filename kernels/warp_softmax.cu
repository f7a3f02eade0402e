// Short lines, in the registers of a part of a warp: whole packs of 16 bytes, or of any length and offset.
#include "register_softmax.cuh"

// Threads that a block of any lines may have, and how many of those a multiprocessor shall hold: of half precision as many as it has
// threads for, of 8 floats to a thread 12 blocks. At an offset of one element: 2097152 x 16 f16 37.6 us with fewer, and 34.8,
// 131072 x 32 f32 6.3 and 5.9.
#if __CUDA_ARCH__ >= 900
template <typename T>
constexpr int ANY_THREADS = sizeof(T) == 2 ? 512 : 128;
template <typename T, int COUNT>
constexpr int ANY_BLOCKS = sizeof(T) == 2 ? 4 : sizeof(T) == 4 && COUNT == 8 ? 12 : 1;
#else
template <typename T>
constexpr int ANY_THREADS = 128;
template <typename T, int COUNT>
constexpr int ANY_BLOCKS = 1;
#endif

#define ANY(dtype, T, COUNT) BOTH(WARP_KERNEL, warp_any, dtype, T, COUNT, false, ANY_THREADS<T>, (ANY_BLOCKS<T, COUNT>))
#define KERNELS(dtype, T)                              \
    BOTH(WARP_KERNEL, warp, dtype, T, 8, true, 128, 1)  \
    BOTH(WARP_KERNEL, warp, dtype, T, 16, true, 128, 1) \
    ANY(dtype, T, 8)                                   \
    ANY(dtype, T, 16)
FOR_EACH_DTYPE(KERNELS)
