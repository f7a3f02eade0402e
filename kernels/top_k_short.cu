// Up to 64 of the greatest elements of short lines: a warp or a part of one holds a line in registers, reads it once and finds one after the other; the ceiling
// is half a copy.
#include "start.cuh"
#include "top_k.cuh"

// Keys of half precision, for places below 1024
struct HalfKeys {
    using Key = uint32_t;
    static __device__ __forceinline__ Key of(uint32_t rank, uint32_t place) { return rank << 10 | (1023 - place); }
    static __device__ __forceinline__ uint32_t rank(Key key) { return key >> 10; }
    static __device__ __forceinline__ uint32_t place(Key key) { return 1023 - (key & 1023); }
};
template <typename T>
using ShortKeys = std::conditional_t<sizeof(T) == 2, HalfKeys, Keys<T>>;

// A lane's elements by their keys, in groups whose greatest comes first
template <typename Key, int GROUPS, int SIZE>
struct SortedGroups {
    Key keys[GROUPS][SIZE];

    __device__ __forceinline__ void sort() {
#pragma unroll
        for (auto& group : keys) {
#pragma unroll
            for (int round = 0; round < SIZE; round++) {
#pragma unroll
                for (int i = round % 2; i + 1 < SIZE; i += 2) {
                    const Key a = group[i], b = group[i + 1];
                    const bool swaps = b > a;
                    group[i] = swaps ? b : a;
                    group[i + 1] = swaps ? a : b;
                }
            }
        }
    }
    __device__ __forceinline__ Key greatest() const {
        Key greatest = keys[0][0];
#pragma unroll
        for (int g = 1; g < GROUPS; g++) greatest = keys[g][0] > greatest ? keys[g][0] : greatest;
        return greatest;
    }
    // By all lanes, of which one has it, in this group
    __device__ __forceinline__ void remove(const Key& key, int group) {
        // By a jump: of eight groups, or their first elements, seven are left alone.
        switch (group) {
            case 0: remove_first<0>(key); break;
            case 1: remove_first<1>(key); break;
            case 2: remove_first<2>(key); break;
            case 3: remove_first<3>(key); break;
            case 4: remove_first<4>(key); break;
            case 5: remove_first<5>(key); break;
            case 6: remove_first<6>(key); break;
            case 7: remove_first<7>(key); break;
        }
    }
    template <int GROUP>
    __device__ __forceinline__ void remove_first(const Key& key) {
        if constexpr (GROUP < GROUPS) {
            auto& group = keys[GROUP];
            const bool here = group[0] == key;
#pragma unroll
            for (int i = 0; i < SIZE; i++) group[i] = here ? (i + 1 < SIZE ? group[i + 1] : Key{}) : group[i];
        }
    }
};

constexpr int SHORT_THREADS = 128, MOST_FOUND = 64;

// Lines of up to LANES GROUPS SIZE elements: LANES have one, each of them every LANES-th of its elements. Up to 64 are looked for.
template <int LANES, int GROUPS, int SIZE, typename T>
__device__ __forceinline__ void short_rows(const T* x, const TopK<T>& call, int64_t lines, int len) {
    using R = Real<T>;
    using Key = typename ShortKeys<T>::Key;
    constexpr int ELEMENTS = LANES * GROUPS * SIZE, MOST = ELEMENTS < MOST_FOUND ? ELEMENTS : MOST_FOUND;
    __shared__ Key found_by[SHORT_THREADS / LANES][MOST];
    const int lane = threadIdx.x % LANES, k = call.k;
    const int64_t line = blockIdx.x * int64_t(SHORT_THREADS / LANES) + threadIdx.x / LANES;
    const bool inside = line < lines;
    wait_for_kernel_before(false, 256);
    Key* found = found_by[threadIdx.x / LANES];
    x += line * len;
    SortedGroups<Key, GROUPS, SIZE> left;
#pragma unroll
    for (int i = 0; i < GROUPS * SIZE; i++) {
        const int place = i * LANES + lane;
        left.keys[i / SIZE][i % SIZE] = inside && place < len ? ShortKeys<T>::of(short_rank_of(x[place]), place) : Key{};
    }
    left.sort();
#pragma unroll 1
    for (int n = 0; n < k; n++) {
        const Key key = greatest_of<LANES>(left.greatest());
        left.remove(key, GROUPS == 1 ? 0 : static_cast<int>(ShortKeys<T>::place(key)) / (LANES * SIZE));
        if (lane == 0) found[n] = key;
    }
    __syncwarp();
    const auto number_at = [&](int n) { return number_of<T>(ShortKeys<T>::rank(found[n])); };
    const R max = number_at(0);
    R sum = 0, exponentials[MOST / LANES];
#pragma unroll
    for (int i = 0; i < MOST / LANES; i++) {
        const int n = i * LANES + lane;
        exponentials[i] = n < k ? quick_exponential(number_at(n) - max) : R(0);
        if (call.renormalise) sum += exponentials[i];
    }
    if (!call.renormalise && inside) {
        // All are read again, from a cache, since code for each that is held would be longer than all else.
#pragma unroll 1
        for (int place = lane; place < len; place += LANES) sum += quick_exponential(Element<T>::read(x[place]) - max);
    }
    sum = warp_group_reduce(sum, LANES, [](R a, R b) { return a + b; });
    if (!inside) return;
    const R inverse = reciprocal(sum);
#pragma unroll
    for (int i = 0; i < MOST / LANES; i++) {
        const int n = i * LANES + lane;
        if (n >= k) break;
        call.weights[line * k + n] = Element<T>::write(exponentials[i] * inverse);
        call.places[line * k + n] = ShortKeys<T>::place(found[n]);
    }
    if (call.sums && lane == 0) call.sums[line] = sum;
}

#define KERNEL(elements, dtype, T, LANES, GROUPS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(SHORT_THREADS)                                                                    \
        top_k_short_rows_##elements##_##dtype(const T* x, T* weights, uint32_t* places, Real<T>* sums, int64_t lines, int64_t len, \
                                              int k, int renormalise) {                                                            \
        short_rows<LANES, GROUPS, 4>(x, TopK<T>{weights, places, sums, k, renormalise != 0}, lines, static_cast<int>(len));        \
    }
#define KERNELS(dtype, T)        \
    KERNEL(8, dtype, T, 2, 1)    \
    KERNEL(16, dtype, T, 4, 1)   \
    KERNEL(32, dtype, T, 8, 1)   \
    KERNEL(64, dtype, T, 16, 1)  \
    KERNEL(128, dtype, T, 32, 1) \
    KERNEL(256, dtype, T, 32, 2)
FOR_EACH_DTYPE(KERNELS)
#undef KERNELS
// Not of f64, for which the code would be twice as long as the rest.
#define KERNELS(dtype, T)        \
    KERNEL(512, dtype, T, 32, 4) \
    KERNEL(1024, dtype, T, 32, 8)
FOR_EACH_SINGLE_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS)
