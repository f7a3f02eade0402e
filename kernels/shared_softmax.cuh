// Softmax of long lines of half precision, half as many as there are multiprocessors, on Hopper. Two blocks, each of which has a
// multiprocessor to itself, hold a line in shared memory. Each element is read once and written once, so the ceiling is a copy, but
// one that reads all before it writes. Bulk copies run by themselves while exponentials are taken of what has come: relative to
// the maximum of a sample, the first packs of each block, so that the blocks meet once more alone, when they have all.
#pragma once
#include "bulk.cuh"
#include "exchange.cuh"
#include "pack.cuh"
#include "schedule.cuh"
#include "start.cuh"

// 64 x 151936 bf16 with 640 threads 9.1 us, 512 9.45, 768 9.25; with the exponentials of one to five packs of a thread kept 9.1 to 9.2,
// of none 9.5.
constexpr int SHARED_THREADS = 640, SHARED_WARPS = SHARED_THREADS / 32, SHARED_KEPT = 3;
constexpr int SHARED_BLOCKS = 2, MAX_SHARED_CHUNKS = 24, SAMPLE_PACKS = 4 * 32;

// Two neighbouring packs' elements from `shift` of the first on, as many as a pack has.
template <typename T>
__device__ __forceinline__ Pack<T, 8> across_packs(const Pack<T, 8>& first, const Pack<T, 8>& next, int shift) {
    uint32_t words[8];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        words[k] = bits_of(first.units[k]);
        words[k + 4] = bits_of(next.units[k]);
    }
    for (int step = 4; step > 1; step /= 2) {
        if (!(shift & step)) continue;
#pragma unroll
        for (int k = 0; k < 6; k++) words[k] = step == 4 ? words[k + 2] : words[k + 1];
    }
    if (shift & 1) {
#pragma unroll
        for (int k = 0; k < 4; k++) words[k] = __byte_perm(words[k], words[k + 1], 0x5432);
    }
    Pack<T, 8> pack;
#pragma unroll
    for (int k = 0; k < 4; k++) bits_of(pack.units[k]) = words[k];
    return pack;
}

// Lines are whole packs of the output. ALIGNED: of the input, too; otherwise each pack of the output is in two of the input, and both
// are read (64 x 151936 one element later 10.3 us, seven 10.3; where lanes hand each other what they lack, 10.4 and 10.6).
// Shared memory: the packs of a block, and one more if not ALIGNED, a state for each warp and for each block, a barrier for each
// chunk and three more.
template <typename T, template <typename> class Output, bool ALIGNED>
__device__ __forceinline__ void shared_lines(const T* x, T* y, int64_t lines, int64_t len, Scaling<float> scaling) {
    using Exchange = ClusterExchange<float>;
    constexpr bool LOG = !Output<float>::OF_EXPONENTIAL;
    constexpr int SIZE = 8, CHUNK = SHARED_THREADS, MORE = ALIGNED ? 0 : 1;
    // Steps whose exponentials are kept for packs of the output, not of the input
    constexpr int ORDERED = ALIGNED || LOG ? 0 : SHARED_KEPT;
    constexpr int BYTES_OF_SAMPLES = SHARED_BLOCKS * sizeof(Normalizer<float>), BYTES_OF_PARTS = SHARED_WARPS * BYTES_OF_SAMPLES;
    extern __shared__ __align__(128) uint4 held[];
    const int rank = Exchange::rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t line = blockIdx.x / SHARED_BLOCKS;
    const int packs = static_cast<int>(len / SIZE), most = (packs + SHARED_BLOCKS - 1) / SHARED_BLOCKS, first = rank * most;
    const int mine = most < packs - first ? most : packs - first, steps = (mine + MORE + CHUNK - 1) / CHUNK;
    auto* parts = reinterpret_cast<Normalizer<float>*>(held + most + MORE);
    auto* samples = parts + SHARED_BLOCKS * SHARED_WARPS;
    auto* copied = reinterpret_cast<ArrivalBarrier*>(samples + SHARED_BLOCKS);
    auto &sampled = copied[MAX_SHARED_CHUNKS], &referenced = copied[MAX_SHARED_CHUNKS + 1], &exchanged = copied[MAX_SHARED_CHUNKS + 2];
    // How many elements before it the input's pack begins
    const int shift = ALIGNED ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(x) / sizeof(T)) & (SIZE - 1);
    x += line * len + first * SIZE - shift;
    y += line * len + first * SIZE;

    if (threadIdx.x == 0) {
        sampled.init();
        referenced.init();
        for (int step = 0; step < steps; step++) copied[step].init();
        referenced.expect(BYTES_OF_SAMPLES);
    }
    Exchange::begin(exchanged, BYTES_OF_PARTS);
    __syncthreads();
    wait_for_kernel_before();
    // Not by the warp that looks at the sample: it would be late by 0.4 us.
    if (threadIdx.x == 32) {
        const auto copy = [&](int begin, int end, ArrivalBarrier& arrived) {
            // What shares 16 bytes with what lies behind the tensor, unless the chunk before had it and this one has nothing
            if (!ALIGNED && end > begin && end == packs - first + 1 && line == lines - 1) {
                end--;
                for (int i = 0; i < shift; i++) reinterpret_cast<T*>(held + end)[i] = x[end * SIZE + i];
            }
            arrived.expect((end - begin) * 16);
            if (end > begin) copy_in(held + begin, x + begin * SIZE, (end - begin) * 16, arrived);
        };
        copy(0, SAMPLE_PACKS, sampled);
        for (int step = 0; step < steps; step++) {
            const int begin = step * CHUNK + MORE, end = (step + 1) * CHUNK;
            copy(step > 0 ? begin : SAMPLE_PACKS, (end < mine ? end : mine) + MORE, copied[step]);
        }
    }
    // A pack of the output, …
    const auto pack_at = [&](int at) {
        auto pack = no_pack<T, SIZE>();
        const auto* from = reinterpret_cast<const Pack<T, SIZE>*>(held + at);
        if (at < mine) pack = ALIGNED ? load(from) : across_packs<T>(load(from), load(from + 1), shift);
        return pack;
    };
    // … and one of the input, for what has no order: of all from one of the output on.
    const auto input_pack_at = [&](int at, int begin) {
        auto pack = no_pack<T, SIZE>();
        if (at < mine + MORE) pack = load(reinterpret_cast<const Pack<T, SIZE>*>(held + at));
        if (!ALIGNED && (at == begin || at == mine)) pack = part_of(pack, at == begin ? shift : 0, at == mine ? shift : SIZE);
        return pack;
    };
    const auto max_of_pack = [](const Pack<T, SIZE>& pack) {
        return greater(greater(pack.units[0], pack.units[1]), greater(pack.units[2], pack.units[3]));
    };
    const auto max_of_warp = [](Unit<T> max) {
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) max = greater(max, __shfl_xor_sync(~0u, max, mask));
        return max_of_unit<T>(max);
    };
    const auto add = [](float a, float b) { return a + b; };
    const auto the_greater = [](float a, float b) { return greater(a, b); };

    Exchange::wait();
    if (warp == 0) {
        sampled.wait(0);
        Unit<T> max = no_elements<T>();
#pragma unroll
        for (int k = 0; k < SAMPLE_PACKS / 32; k++) max = greater(max, max_of_pack(input_pack_at(k * 32 + lane, 0)));
        const float of_sample = max_of_warp(max);
        if (lane < SHARED_BLOCKS) send(lane, samples + rank, Normalizer<float>{of_sample, 0}, referenced);
    }
    sampled.wait(0);
    referenced.wait(0);

    float kept[SHARED_KEPT][SIZE], reference, total, max_of_line;
#pragma unroll 1
    for (int attempt = 0;; attempt++) {
        reference = part_reference(greater(samples[0].max, samples[1].max));
        const RelativeExponential exponential(reference, scaling);
        float sums[4] = {0, 0, 0, 0};
        Unit<T> max = no_elements<T>();
        const auto take = [&](int step, float (&exponentials)[SIZE]) {
            if (step < steps) copied[step].wait(0);
            const int at = step * CHUNK + int(threadIdx.x);
            const auto pack = step < ORDERED ? pack_at(at) : input_pack_at(at, ORDERED * CHUNK);
            if (LOG) max = greater(max, max_of_pack(pack));
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                exponentials[i] = exponential(Element<T>::of_unit(pack.units[i / 2], i % 2));
                sums[i % 4] += exponentials[i];
            }
        };
#pragma unroll
        for (int step = 0; step < SHARED_KEPT; step++) take(step, kept[step]);
#pragma unroll 1
        for (int step = SHARED_KEPT; step < steps; step++) {
            float exponentials[SIZE];
            take(step, exponentials);
        }
        float sum = pairwise_sum(sums);
        sum = warp_group_reduce(sum, 32, add);
        const float max_of_part = LOG ? max_of_warp(max) : 0;
        if (lane < SHARED_BLOCKS) send(lane, parts + rank * SHARED_WARPS + warp, Normalizer<float>{max_of_part, sum}, exchanged);
        exchanged.wait(attempt);
        total = 0;
        max_of_line = negative_infinity<float>();
        if (lane < SHARED_WARPS) {
            const auto part = parts[lane], other = parts[SHARED_WARPS + lane];
            total = part.sum + other.sum;
            max_of_line = greater(part.max, other.max);
        }
        total = warp_group_reduce(total, 32, add);
        // The sample's maximum adds about 1. Where it was of nothing, or less than the line's by 14 or more, which would cost bits of
        // the exponents, the line's own is taken.
        if (attempt > 0 || (total >= 0.5f * HalfElement::EXP_SCALE && total < HalfElement::EXP_SCALE * float(1 << 20))) break;
        // Nobody reads the parts any longer.
        Cluster::sync();
        if (threadIdx.x == 0) {
            referenced.expect(BYTES_OF_SAMPLES);
            exchanged.expect(BYTES_OF_PARTS);
        }
        max = no_elements<T>();
#pragma unroll 1
        for (int step = 0; step < steps; step++) max = greater(max, max_of_pack(input_pack_at(step * CHUNK + int(threadIdx.x), 0)));
        const float of_warp = max_of_warp(max);
        if (lane == 0) parts[warp].max = of_warp;
        // Nor the samples.
        Cluster::sync();
        if (warp == 0) {
            const float of_block = warp_group_reduce(lane < SHARED_WARPS ? parts[lane].max : negative_infinity<float>(), 32, the_greater);
            if (lane < SHARED_BLOCKS) send(lane, samples + rank, Normalizer<float>{of_block, 0}, referenced);
        }
        referenced.wait(1);
    }

    const auto store_results = [&](int step, const float (&results)[SIZE]) {
        const auto pack = pack_of<T, SIZE>([&](int i) { return results[i]; });
        const int at = step * CHUNK + int(threadIdx.x);
        if (at < mine) store_streaming(reinterpret_cast<Pack<T, SIZE>*>(y + at * SIZE), pack);
    };
    const RelativeExponential exponential(reference, scaling);
    if constexpr (LOG) {
        const float max = warp_group_reduce(max_of_line, 32, the_greater);
        const Output<float> output(Normalizer<float>{max, total / exponential(part_reference(max))}, scaling);
#pragma unroll 2
        for (int step = 0; step < steps; step++) {
            const auto pack = pack_at(step * CHUNK + int(threadIdx.x));
            float results[SIZE];
#pragma unroll
            for (int i = 0; i < SIZE; i++) results[i] = output.of_kept(Element<T>::of_unit(pack.units[i / 2], i % 2));
            store_results(step, results);
        }
        return;
    }
    const float factor = quick_reciprocal(total + scaling.least);
#pragma unroll
    for (int step = 0; step < SHARED_KEPT; step++) {
        float results[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; i++) results[i] = kept[step][i] * factor;
        store_results(step, results);
    }
#pragma unroll 2
    for (int step = SHARED_KEPT; step < steps; step++) {
        const auto pack = pack_at(step * CHUNK + int(threadIdx.x));
        float results[SIZE];
#pragma unroll
        for (int i = 0; i < SIZE; i++) results[i] = exponential(Element<T>::of_unit(pack.units[i / 2], i % 2)) * factor;
        store_results(step, results);
    }
}
