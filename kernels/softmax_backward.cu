// The gradient of the input from the result y and its gradient g: y * (g - sum of g * y), or for log-softmax
// g - exp(y) * sum of g. y and g are read twice and the gradient written once: 5/2x the bytes of a copy, 3/2x while the
// second reads come from the L2 cache. A group of threads takes a line, or some that lie side by side.
#include "line_group.cuh"
#include "schedule.cuh"

template <typename T>
__device__ __forceinline__ void gradients(const T* y, const T* g, T* dx, int64_t groups, int64_t len, int64_t inner, int shape, bool log) {
    using R = Real<T>;
    constexpr int TILE = StridedLine::TILE;
    const LineGroup group(groups, len, inner, shape);
    group.each([&](int64_t, const StridedLine& line) {
        // The tile that is read last for the sum is the first that is needed again, and kept.
        int64_t kept = -1;
        T own_y[TILE], own_g[TILE];
        const auto read = [&](int64_t from, int left) {
            line.load(own_y, y + line.start, inner, from, left);
            line.load(own_g, g + line.start, inner, from, left);
            kept = from;
        };
        auto total = CompensatedSum<R>::empty();
        line.each_first_backwards(0, line.len, [&](int64_t from) {
            const int left = line.left(from, line.len);
            read(from, left);
            R terms[TILE];
#pragma unroll
            for (int k = 0; k < TILE; k++) {
                const R of_g = Element<T>::read(own_g[k]), term = log ? of_g : of_g * Element<T>::read(own_y[k]);
                terms[k] = line.has(k, left) ? term : R(0);
            }
            total.add(pairwise_sum(terms));
        });
        const R sum = group.reduce(total).value();
        line.each_first(line.len, [&](int64_t from) {
            const int left = line.left(from, line.len);
            if (from != kept) read(from, left);
            line.store<TILE>(dx + line.start, inner, from, left, [&](int k) {
                const R of_y = Element<T>::read(own_y[k]), of_g = Element<T>::read(own_g[k]);
                return Element<T>::write(log ? of_g - exponential(of_y) * sum : of_y * (of_g - sum));
            });
        });
    });
}

#define KERNELS(dtype, T)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS, sizeof(T) == 8 ? 1 : 2)                                                                  \
        backward_group_##dtype(const T* y, const T* g, T* dx, int64_t groups, int64_t len, int64_t inner, int shape, int log) {  \
        gradients<T>(y, g, dx, groups, len, inner, shape, log);                                                                   \
    }
FOR_EACH_DTYPE(KERNELS)
