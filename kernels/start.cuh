// How a kernel begins.
#pragma once

// Waits until the kernel launched before has ended and what it wrote can be read. On Hopper a kernel that calls this is set
// up while the one before still runs (src/cuda/launch.rs asks for it), and lets the next be set up in turn; but not where
// there are `many` blocks, since each takes 1.2 ns to say so. `early`: before it waits, which took off a grid of half precision
// that fills the GPU a twentieth to a tenth, and off a single cluster 0.15 us. Several small kernels would be in each other's
// way: 4 x 102400 f32 3.5 us, early 3.8.
__device__ __forceinline__ void wait_for_kernel_before(bool early = false, unsigned many = 2048) {
#if __CUDA_ARCH__ >= 900
    if (early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (!early && gridDim.x < many) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
