// The gradient of the input from the result y and its gradient g: y * (g - sum of g * y), or for log-softmax
// g - exp(y) * sum of g. y (of log-softmax not for the sum) and g are read twice and the gradient written once: 5/2x (2x) the bytes of a
// copy, 3/2x while the second reads come from the L2 cache. A group of threads takes a line, or some that lie side by side; or many blocks a few, in two phases.
#include "line_group.cuh"
#include "schedule.cuh"

template <typename T>
__device__ __forceinline__ void gradients(const T* y, const T* g, T* dx, int64_t groups, int64_t len, int64_t inner, int shape, bool log, Phase phase,
                                          CompensatedSum<Real<T>>* parts) {
    using R = Real<T>;
    constexpr int TILE = StridedLine::TILE;
    const LineGroup group(groups, len, inner, shape);
    group.each([&](int64_t number, const StridedLine& whole) {
        const StridedLine line = whole.of_grid();
        auto total = CompensatedSum<R>::empty();
        // Back and forth: the tile that is read last for the sum is the first that is needed again, and kept.
        int64_t kept = -1;
        // The sum of log-softmax needs no y, whose place g takes again, which costs no branch; of few tiles it is kept, too.
        const bool y_later = log && line.len > 4 * TILE * line.step;
        const T* of_sum = y_later ? g : y;
        T own_y[TILE], own_g[TILE];
        R sum;
#pragma unroll
        for (int walk = 0; walk < 2; walk++) {
            if (walk == 0 && phase == Phase::MERGED) continue;
            if (walk == 1) {
                if (!group.merge(total, phase, parts, number, line)) return;
                sum = total.value();
            }
            line.each_first_of(0, line.len, walk == 0, [&](int64_t from) {
                const int left = line.left(from, line.len);
                if (walk == 0 || from != kept) {
                    line.load(own_y, (walk == 0 ? of_sum : y) + line.start, inner, from, left);
                    line.load(own_g, g + line.start, inner, from, left);
                    kept = y_later ? -1 : from;
                }
                if (walk == 0) {
                    R terms[TILE];
#pragma unroll
                    for (int k = 0; k < TILE; k++) {
                        const R of_g = Element<T>::read(own_g[k]), term = log ? of_g : of_g * Element<T>::read(own_y[k]);
                        terms[k] = line.has(k, left) ? term : R(0);
                    }
                    total.add(pairwise_sum(terms));
                } else {
                    line.store<TILE>(dx + line.start, inner, from, left, [&](int k) {
                        const R of_y = Element<T>::read(own_y[k]), of_g = Element<T>::read(own_g[k]);
                        return Element<T>::write(log ? of_g - exponential(of_y) * sum : of_y * (of_g - sum));
                    });
                }
            });
        }
    });
}

#define KERNELS(dtype, T)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS, sizeof(T) == 8 ? 1 : 2)                                          \
        backward_group_##dtype(const T* y, const T* g, T* dx, int64_t groups, int64_t len, int64_t inner, int shape, int log,    \
                               int phase, CompensatedSum<Real<T>>* parts) {                                                      \
        gradients<T>(y, g, dx, groups, len, inner, shape, log, static_cast<Phase>(phase), parts);                                \
    }
FOR_EACH_DTYPE(KERNELS)
