// How a kernel begins.
#pragma once

// Waits until the kernel launched before has ended and what it wrote can be read. On Hopper a kernel that calls this is set
// up while the one before still runs (src/cuda/launch.rs asks for it), and lets the next be set up in turn; but not where
// there are many blocks, since each takes 1.2 ns to say so.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (gridDim.x < 2048) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
