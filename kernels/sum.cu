// Sums over some dimensions of a contiguous tensor, as the gradient of what was broadcast needs them. Each element is read once, and few are
// written: the ceiling is half the time of a copy.
#include "pack.cuh"
#include "start.cuh"

constexpr int THREADS = 256, MAX_STEPS = 8, TILE = 4;

// A dimension, or several that are neighbours: how many steps of what length.
struct Steps {
    int64_t size, stride;
};

// Outermost first. The last one varies fastest.
struct Dimensions {
    Steps steps[MAX_STEPS];
    int64_t count;

    __device__ __forceinline__ int64_t offset(int64_t number) const {
        int64_t offset = 0;
#pragma unroll 1
        for (int i = static_cast<int>(count) - 1; i >= 0; i--) {
            const int64_t rest = number / steps[i].size;
            offset += (number - rest * steps[i].size) * steps[i].stride;
            number = rest;
        }
        return offset;
    }
};

// What is summed and how it is shared out; src/cuda/sums.rs has the same. Terms are runs of so many elements, `run.stride` apart.
struct Sum {
    Dimensions kept, runs;
    Steps run;
    int64_t sums, count_of_runs;
    // A part of a sum is of so many elements of so many runs.
    int64_t runs_of_part, run_of_part, parts_of_run;
    int64_t shift;   // log2 of the threads that share a sum, or COUNT sums that lie side by side
    int64_t across;  // whether neighbouring threads have neighbouring sums, rather than neighbouring terms of one
};

static_assert(sizeof(Sum) == 344, "as src/cuda/sums.rs has it");

// The grid's second dimension are parts, whose sums are written one after the other.
template <typename R, int COUNT>
__device__ __forceinline__ void sum_over(const R* __restrict__ x, R* __restrict__ out, const Sum& sum) {
    using Values = Pack<R, COUNT>;
    const int shift = static_cast<int>(sum.shift), group = 1 << shift, slots = THREADS >> shift;
    const int thread = threadIdx.x, slot = sum.across ? thread % slots : thread >> shift, lane = sum.across ? thread / slots : thread % group;
    const int64_t number = (blockIdx.x * int64_t(slots) + slot) * COUNT;
    const int64_t part_of_runs = blockIdx.y / sum.parts_of_run, part_of_run = blockIdx.y - part_of_runs * sum.parts_of_run;
    const int64_t first_run = part_of_runs * sum.runs_of_part, runs = min(first_run + sum.runs_of_part, sum.count_of_runs);
    const int64_t begin = part_of_run * sum.run_of_part, end = min(begin + sum.run_of_part, sum.run.size);
    const bool there = number < sum.sums;
    CompensatedSum<R> sums[COUNT];
#pragma unroll
    for (auto& of_one : sums) of_one = CompensatedSum<R>::empty();
    if (there) {
        x += sum.kept.offset(number);
#pragma unroll 1
        for (int64_t run = first_run; run < runs; run++) {
            const R* at = x + sum.runs.offset(run);
#pragma unroll 1
            for (int64_t i = begin + lane; i < end; i += TILE * group) {
                Values tile[TILE] = {};
#pragma unroll
                for (int k = 0; k < TILE; k++) {
                    const int64_t term = i + k * group;
                    if (term < end) tile[k] = load(reinterpret_cast<const Values*>(at + term * sum.run.stride));
                }
#pragma unroll
                for (int n = 0; n < COUNT; n++) sums[n].add((tile[0].units[n] + tile[1].units[n]) + (tile[2].units[n] + tile[3].units[n]));
            }
        }
    }
    Values result;
#pragma unroll
    for (int n = 0; n < COUNT; n++) result.units[n] = sums[n].value();
    if (group > 1) {
        __shared__ Values of_threads[THREADS];
        Values& mine = of_threads[slot * group + lane];
        mine = result;
        for (int half = group / 2; half > 0; half /= 2) {
            __syncthreads();
            if (lane >= half) continue;
            const Values other = of_threads[slot * group + lane + half];
#pragma unroll
            for (int n = 0; n < COUNT; n++) mine.units[n] = result.units[n] += other.units[n];
        }
    }
    if (there && lane == 0) store(reinterpret_cast<Values*>(out + blockIdx.y * sum.sums + number), result);
}

#define KERNEL(name, dtype, R, COUNT)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_##dtype(const R* x, R* out, const __grid_constant__ Sum sum) { \
        wait_for_kernel_before();                                                                                               \
        sum_over<R, COUNT>(x, out, sum);                                                                                        \
    }
#define KERNELS(dtype, R)        \
    KERNEL(sum_1, dtype, R, 1)   \
    KERNEL(sum_packs, dtype, R, 16 / sizeof(R))
FOR_EACH_SINGLE_DTYPE(KERNELS)
FOR_EACH_DOUBLE_DTYPE(KERNELS)
