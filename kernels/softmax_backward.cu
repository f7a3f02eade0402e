// The gradient of the input from the result y and its gradient g: y * (g - sum of g * y), or for log-softmax
// g - exp(y) * sum of g. y (of log-softmax not for the sum) and g are read twice and the gradient written once: 5/2x (2x) the bytes of a
// copy, 3/2x while the second reads come from the L2 cache. A group of threads takes a line, or some that lie side by side; or many blocks a few, in two phases.
#include "line_group.cuh"
#include "schedule.cuh"

template <typename T, int COUNT>
__device__ __forceinline__ void gradients(const T* y, const T* g, T* dx, int64_t groups, int64_t len, int64_t inner, int shape, bool log, Phase phase,
                                          CompensatedSum<Real<T>>* parts) {
    using R = Real<T>;
    using Lines = SideBySide<T, COUNT>;
    using Word = typename Lines::Word;
    using Sums = Each<CompensatedSum<R>, COUNT>;
    constexpr int TILE = StridedLine::TILE;
    inner /= COUNT;
    const LineGroup group(groups, len, inner, shape);
    group.each([&](int64_t number, const StridedLine& whole) {
        const StridedLine line = whole.of_grid();
        const auto* of_y = reinterpret_cast<const Word*>(y) + line.start;
        const auto* of_g = reinterpret_cast<const Word*>(g) + line.start;
        Sums total;
#pragma unroll
        for (auto& sum : total.of) sum = CompensatedSum<R>::empty();
        // Back and forth: the tile that is read last for the sum is the first that is needed again, and kept.
        int64_t kept = -1;
        // The sum of log-softmax needs no y, whose place g takes again, which costs no branch; of few tiles it is kept, too.
        const bool y_later = log && line.len > 4 * TILE * line.step;
        const auto* of_sum = y_later ? of_g : of_y;
        Word own_y[TILE], own_g[TILE];
        R sums[COUNT];
#pragma unroll
        for (int walk = 0; walk < 2; walk++) {
            if (walk == 0 && phase == Phase::MERGED) continue;
            if (walk == 1) {
                if (!group.merge(total, phase, reinterpret_cast<Sums*>(parts), number, line)) return;
#pragma unroll
                for (int i = 0; i < COUNT; i++) sums[i] = total.of[i].value();
            }
            line.each_first_of(0, line.len, walk == 0, [&](int64_t from) {
                const int left = line.left(from, line.len);
                if (walk == 0 || from != kept) {
                    line.load(own_y, walk == 0 ? of_sum : of_y, inner, from, left);
                    line.load(own_g, of_g, inner, from, left);
                    kept = y_later ? -1 : from;
                }
                if (walk == 0) {
#pragma unroll
                    for (int i = 0; i < COUNT; i++) {
                        R terms[TILE];
#pragma unroll
                        for (int k = 0; k < TILE; k++) {
                            const R g = Lines::read(own_g[k], i), term = log ? g : g * Lines::read(own_y[k], i);
                            terms[k] = line.has(k, left) ? term : R(0);
                        }
                        total.of[i].add(pairwise_sum(terms));
                    }
                } else {
                    line.store<TILE>(reinterpret_cast<Word*>(dx) + line.start, inner, from, left, [&](int k) {
                        R results[COUNT];
#pragma unroll
                        for (int i = 0; i < COUNT; i++) {
                            results[i] = gradient_of<T>(Lines::read(own_y[k], i), Lines::read(own_g[k], i), sums[i], log);
                        }
                        return Lines::write(results);
                    });
                }
            });
        }
    });
}

#define KERNEL(name, dtype, T, COUNT)                                                                                            \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS, sizeof(T) == 8 ? 1 : 2)                                          \
        name##_##dtype(const T* y, const T* g, T* dx, int64_t groups, int64_t len, int64_t inner, int shape, int log, int phase, \
                       CompensatedSum<Real<T>>* parts) {                                                                         \
        gradients<T, COUNT>(y, g, dx, groups, len, inner, shape, log, static_cast<Phase>(phase), parts);                         \
    }
#define KERNELS(dtype, T) KERNEL(backward_group, dtype, T, 1)
#define KERNELS_OF_PAIRS(dtype, T) KERNEL(backward_group_pairs, dtype, T, 2)
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS_OF_PAIRS)
