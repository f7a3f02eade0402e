// The gradient of the elements of contiguous lines, given that of the weights of the greatest.
#include "reduce.cuh"

constexpr int GRADIENT_ELEMENTS = 1024;

// With w the weights, g their gradient and d = sum g w: w (g - d) at the k places; elsewhere 0 or, where the weights are shares of `sums`
// of exponentials, -p d, p an element's own share. Each element is read at most once and written once: at most a copy.
// A warp takes up to 1024 elements of a line, which has so many `parts`.
template <typename T>
__device__ __forceinline__ void backward(const T* x, const T* weights, const T* g, const uint32_t* places, const Real<T>* sums, T* grad,
                                         int64_t lines, int64_t len, int k, int64_t parts) {
    using R = Real<T>;
    const int64_t warp = blockIdx.x * int64_t(blockDim.x / 32) + threadIdx.x / 32, line = warp / parts;
    if (line >= lines) return;
    const int lane = threadIdx.x % 32;
    const int64_t begin = (warp - line * parts) * GRADIENT_ELEMENTS, end = min(begin + GRADIENT_ELEMENTS, len);
    weights += line * k, g += line * k, places += line * k, x += line * len, grad += line * len;
    R dot = 0;
    for (int n = lane; n < k; n += 32) dot += Element<T>::read(weights[n]) * Element<T>::read(g[n]);
    dot = warp_group_reduce(dot, 32, [](R a, R b) { return a + b; });
    if (sums) {
        // Callers have the places, too, and may have written over them.
        const uint32_t first = places[0];
        const R max = first < len ? Element<T>::read(x[first]) : R(NAN), factor = -dot / sums[line];
#pragma unroll 4
        for (int64_t i = begin + lane; i < end; i += 32) {
            grad[i] = Element<T>::write(factor * quick_exponential(Element<T>::read(x[i]) - max));
        }
    } else {
#pragma unroll 4
        for (int64_t i = begin + lane; i < end; i += 32) grad[i] = Element<T>::write(0);
    }
    __syncwarp();  // over what other lanes have written
    for (int n = lane; n < k; n += 32) {
        const int64_t place = places[n];
        if (begin <= place && place < end) grad[place] = Element<T>::write(Element<T>::read(weights[n]) * (Element<T>::read(g[n]) - dot));
    }
}

#define KERNELS(dtype, T)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(128)                                                                              \
        top_k_backward_##dtype(const T* x, const T* weights, const T* g, const uint32_t* places, const Real<T>* sums, T* grad,     \
                               int64_t lines, int64_t len, int k, int64_t parts) {                                                 \
        backward(x, weights, g, places, sums, grad, lines, len, k, parts);                                                         \
    }
FOR_EACH_DTYPE(KERNELS)
