// The gradient of the elements of contiguous lines, given that of the weights of the greatest.
#include "line.cuh"
#include "reduce.cuh"

constexpr int GRADIENT_ELEMENTS = 1024;

// With w the weights, g their gradient and d = sum g w: w (g - d) at the k places; elsewhere 0 or, where the weights are shares of `sums`
// of exponentials, -p d, p an element's own share. Each element is read at most once and written once: at most a copy.
// 2^shift threads take up to 1024 elements of a line, which has so many `parts`. WARP: a whole warp, as the compiler had better know.
template <typename T, bool WARP>
__device__ __forceinline__ void backward(const T* x, const T* weights, const T* g, const uint32_t* places, const Real<T>* sums, T* grad,
                                         int64_t lines, int64_t len, int k, int64_t parts, int shift) {
    using R = Real<T>;
    if (WARP) shift = 5;
    const int threads = 1 << shift, thread = threadIdx.x & (threads - 1);
    const int64_t share = blockIdx.x * int64_t(blockDim.x >> shift) + (threadIdx.x >> shift), line = quotient(share, parts);
    const bool inside = line < lines;
    if (!inside) len = k = 0;
    const int64_t begin = (share - line * parts) * GRADIENT_ELEMENTS;
    const int here = static_cast<int>(min(len - begin, int64_t(GRADIENT_ELEMENTS)));
    weights += line * k, g += line * k, places += line * k, x += line * len, grad += line * len + begin;
    R dot = 0;
    for (int n = thread; n < k; n += threads) dot += Element<T>::read(weights[n]) * Element<T>::read(g[n]);
    dot = warp_group_reduce(dot, threads, [](R a, R b) { return a + b; });
    if (sums && inside) {
        // Callers have the places, too, and may have written over them.
        const uint32_t first = places[0];
        const R max = first < len ? Element<T>::read(x[first]) : R(NAN), factor = -dot / sums[line];
        x += begin;
#pragma unroll 4
        for (int i = thread; i < here; i += threads) grad[i] = Element<T>::write(factor * quick_exponential(Element<T>::read(x[i]) - max));
    } else {
#pragma unroll 4
        for (int i = thread; i < here; i += threads) grad[i] = Element<T>::write(0);
    }
    __syncwarp();  // over what other threads have written
    for (int n = thread; n < k; n += threads) {
        const int64_t place = places[n] - begin;
        if (0 <= place && place < here) grad[place] = Element<T>::write(Element<T>::read(weights[n]) * (Element<T>::read(g[n]) - dot));
    }
}

#define KERNELS(dtype, T)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(128)                                                                              \
        top_k_backward_##dtype(const T* x, const T* weights, const T* g, const uint32_t* places, const Real<T>* sums, T* grad,     \
                               int64_t lines, int64_t len, int k, int64_t parts, int shift) {                                      \
        if (shift == 5) backward<T, true>(x, weights, g, places, sums, grad, lines, len, k, parts, shift);                         \
        else backward<T, false>(x, weights, g, places, sums, grad, lines, len, k, parts, shift);                                   \
    }
FOR_EACH_DTYPE(KERNELS)
