// Short lines, in the registers of a part of a warp: whole packs of 16 bytes, or of any length and offset.
#include "register_softmax.cuh"

// Blocks of any lines that a multiprocessor shall hold: of half precision as many as it has threads for, of 8 floats to a thread 12.
// At an offset of one element: 2097152 x 16 f16 37.6 us with fewer, and 34.8, 131072 x 32 f32 6.3 and 5.9.
template <typename T>
constexpr int any_blocks([[maybe_unused]] int count) {
#if __CUDA_ARCH__ >= 900
    if (sizeof(T) == 2) return 16;
    if (sizeof(T) == 4 && count == 8) return 12;
#endif
    return 1;
}

#define KERNELS(dtype, T)                                             \
    BOTH(WARP_KERNEL, warp, dtype, T, 8, true, 1)                     \
    BOTH(WARP_KERNEL, warp, dtype, T, 16, true, 1)                    \
    BOTH(WARP_KERNEL, warp_any, dtype, T, 8, false, any_blocks<T>(8)) \
    BOTH(WARP_KERNEL, warp_any, dtype, T, 16, false, any_blocks<T>(16))
FOR_EACH_DTYPE(KERNELS)
