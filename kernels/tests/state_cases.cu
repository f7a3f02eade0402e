// Runs the table of cases through softmax_state.cuh, one thread a case: parts[part] .. parts[part + 1] are the numbers of
// a part, cases[c] .. cases[c + 1] the parts of a case. Compiled for the tests alone.
#include <cstdint>

#include "../softmax_state.cuh"

template <typename R>
__device__ void state_cases(const R* numbers, const int64_t* parts, const int64_t* cases, int64_t count, R* max, R* sum) {
    const int64_t c = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (c >= count) return;
    auto whole = SoftmaxState<R>::empty();
    for (int64_t part = cases[c]; part < cases[c + 1]; part++) {
        auto state = SoftmaxState<R>::empty();
        for (int64_t i = parts[part]; i < parts[part + 1]; i++) {
            const R reference = state.grow(numbers[i]);
            state.add(exponential(numbers[i] - reference));
        }
        whole.merge(state);
    }
    const auto line = whole.finish_by(exponential(whole.max - whole.reference()));
    max[c] = line.max;
    sum[c] = line.sum;
}

#define KERNEL(dtype, R)                                                                                             \
    extern "C" __global__ void state_cases_##dtype(const R* numbers, const int64_t* parts, const int64_t* cases,     \
                                                   int64_t count, R* max, R* sum) {                                  \
        state_cases<R>(numbers, parts, cases, count, max, sum);                                                      \
    }
KERNEL(f32, float)
KERNEL(f64, double)
