// Log-sum-exp, and what cross-entropy needs to know of each line, of lines side by side, where there are many: a thread takes whole lines, one or,
// of half precision where rows begin at words, two. Sums over classes are not asked for. Reads each element once: half the time of a copy.
#include "line_group.cuh"
#include "packed_line.cuh"
#include "statistics.cuh"

constexpr int LINE_THREADS = 128;

// COUNT lines that lie side by side, which are this thread's
template <typename T, int COUNT>
struct ThreadLines {
    using R = Real<T>;
    using Lines = SideBySide<T, COUNT>;
    using Word = typename Lines::Word;

    const Request<T>& request;
    int64_t inner, number;  // elements from one row to the next; the first line
    const T* first;
    int64_t len;            // 0 where none of the lines is to be read
    bool there, skipped[COUNT];

    __device__ __forceinline__ ThreadLines(const Request<T>& request, int64_t inner)
        : request(request), inner(inner), number((blockIdx.x * int64_t(LINE_THREADS) + threadIdx.x) * COUNT), there(number < request.lines) {
        first = request.x + (there ? quotient(number, inner) * (request.len - 1) * inner + number : 0);
        bool none = true;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            skipped[i] = !there || request.skips(number + i);
            none = none && skipped[i];
        }
        len = none ? 0 : request.len;
    }

    // Line i has this maximum, and this sum of exponentials relative to it.
    __device__ __forceinline__ void write(int i, R max, R sum) const {
        if (there) request.write_alone(number + i, skipped[i], {max, sum}, {0, 0}, first + i, inner);
    }
};

// A tile of rows at a time, while the next one is on its way.
template <typename T, int COUNT>
__device__ __forceinline__ void walked(const Request<T>& request, int64_t inner) {
    using R = Real<T>;
    using Own = ThreadLines<T, COUNT>;
    using Word = typename Own::Word;
    constexpr int TILE = StridedLine::TILE;
    const Own own(request, inner);
    const StridedLine line{0, inner, 0, 1, own.len};
    SoftmaxState<R> states[COUNT];
#pragma unroll
    for (auto& state : states) state = SoftmaxState<R>::empty();
    Word tile[TILE], next[TILE];
    const auto load = [&](int64_t from) {
        const int left = line.left(from, line.len);
        if (left > 0) line.load(next, reinterpret_cast<const Word*>(own.first), inner / COUNT, from, left);
    };
    load(0);
    line.each_first(line.len, [&](int64_t from) {
        const int left = line.left(from, line.len);
#pragma unroll
        for (int k = 0; k < TILE; k++) tile[k] = next[k];
        load(from + TILE);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            R of_line[TILE];
#pragma unroll
            for (int k = 0; k < TILE; k++) of_line[k] = line.has(k, left) ? Own::Lines::read(tile[k], i) : negative_infinity<R>();
            const R reference = states[i].grow(max_of(of_line));
#pragma unroll
            for (auto& x : of_line) x = Element<T>::exponential(x - reference);
            states[i].add(pairwise_sum(of_line) * unscale<T>());
        }
    });
#pragma unroll
    for (int i = 0; i < COUNT; i++) own.write(i, states[i].max, sum_relative_to(states[i], part_reference(states[i].max)));
}

// All rows at once, up to 32.
template <typename T, int COUNT>
__device__ __forceinline__ void held(const Request<T>& request, int64_t inner) {
    using R = Real<T>;
    using Own = ThreadLines<T, COUNT>;
    using Word = typename Own::Word;
    constexpr int ROWS = 32, TILE = 8;
    const Own own(request, inner);
    const int len = static_cast<int>(own.len);
    // Calls f with each row that a thread of the warp may have.
    const auto each = [&](auto f) {
#pragma unroll
        for (int from = 0; from < ROWS; from += TILE) {
            if (from >= request.len) break;
#pragma unroll
            for (int k = from; k < from + TILE; k++) f(k);
        }
    };
    Unit<T> none = no_elements<T>();
    Word rows[ROWS];
    const auto* at = reinterpret_cast<const Word*>(own.first);
    each([&](int k) {
        rows[k] = reinterpret_cast<const Word&>(none);
        if (k < len) rows[k] = at[k * (inner / COUNT)];
    });
    R max[COUNT];
#pragma unroll
    for (auto& of_line : max) of_line = negative_infinity<R>();
    if constexpr (COUNT > 1) {
        Word greatest = none;
        each([&](int k) { greatest = greater(greatest, rows[k]); });
#pragma unroll
        for (int i = 0; i < COUNT; i++) max[i] = Own::Lines::read(greatest, i);
    } else {
        each([&](int k) { max[0] = greater(max[0], Own::Lines::read(rows[k], 0)); });
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const R reference = part_reference(max[i]);
        R terms[4] = {};
        each([&](int k) { terms[k % 4] += Element<T>::exponential(Own::Lines::read(rows[k], i) - reference); });
        own.write(i, max[i], pairwise_sum(terms) * unscale<T>());
    }
}

#define KERNELS(dtype, T) KERNEL(thread_statistics, dtype, T, LINE_THREADS, 1, (walked<T, 1>(request, inner)))
#define KERNELS_OF_PAIRS(dtype, T) KERNEL(thread_statistics_pairs, dtype, T, LINE_THREADS, 1, (walked<T, 2>(request, inner)))
#define HELD_KERNELS(dtype, T) \
    KERNEL(thread_statistics_held, dtype, T, LINE_THREADS, 1, (held<T, Element<T>::PER_UNIT>(request, inner)))
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS_OF_PAIRS)
FOR_EACH_SINGLE_DTYPE(HELD_KERNELS)
FOR_EACH_HALF_DTYPE(HELD_KERNELS)
