// The columns that a thread has of a strip of lines side by side.
#pragma once
#include "pack.cuh"

// What rows are: whole packs of as many elements as a thread has columns; of half precision, two columns, whole words in the results alone; or anything.
enum class Rows { PACKS, WORDS, ANY };

// SIZE of them: neighbours; but where rows are anything one or, of half precision, several as far apart as there are threads `across` the strip, whose accesses
// are of neighbours so. By neighbours to a thread every sector of memory would be written in parts twice: (64, 1000, 127) bf16 takes 22 us for 16; but of
// whole words, which are written at once, (16, 64, 56, 56) from the second element on 4.1 for 4.9.
template <typename T, int SIZE, Rows ROWS>
struct StripColumns {
    static constexpr bool IS_HALF = Element<T>::PER_UNIT == 2, APART = ROWS == Rows::ANY && IS_HALF;
    static_assert(ROWS == Rows::PACKS || (ROWS == Rows::WORDS ? IS_HALF && SIZE == 2 : IS_HALF || SIZE == 1), "no such columns");
    int across, column;  // threads, and this one's place
    int64_t inner;
    unsigned outer;      // whose strip it is of the outer dimension, through all of which strips are numbered
    int first;           // the first of its columns

    // Of 2^shift threads
    __device__ __forceinline__ StripColumns(unsigned strip, int shift, int64_t inner)
        : across(1 << shift), column(threadIdx.x & (across - 1)), inner(inner), outer(strip / strips(inner, shift)),
          first(int(strip - outer * strips(inner, shift)) * count(across) + place(0)) {}
    static __device__ __forceinline__ int count(int across) { return across * SIZE; }
    // How many strips there are side by side
    static __device__ __forceinline__ int strips(int64_t inner, int shift) {
        return static_cast<int>(((inner + SIZE - 1) / SIZE + (1 << shift) - 1) >> shift);
    }

    // The place in the strip of this thread's i-th, and how far it is from the one before
    __device__ __forceinline__ int place(int i) const { return APART ? column + i * across : column * SIZE + i; }
    __device__ __forceinline__ int apart() const { return APART ? across : 1; }
    __device__ __forceinline__ bool has(int i) const { return first + i * apart() < inner; }

    // What there is of a row, given where its first element is
    __device__ __forceinline__ void load_if(bool wanted, Pack<T, SIZE>& pack, const T* from) const {
        if constexpr (ROWS == Rows::PACKS || !IS_HALF) {
            ::load_if(wanted, pack, from);
        } else {
#pragma unroll
            for (int u = 0; u < pack.UNITS; u++) {
                const T* at = from + 2 * u * apart();
                load_each_if(wanted && has(2 * u), wanted && has(2 * u + 1), pack.units[u], at, at + apart());
            }
        }
    }
    // The same back
    template <typename Access>
    __device__ __forceinline__ void store(const Access& access, T* to, const Pack<T, SIZE>& pack) const {
        if constexpr (!APART) {
            access.store(reinterpret_cast<Pack<T, SIZE>*>(to), pack);
        } else {
#pragma unroll
            for (int u = 0; u < pack.UNITS; u++) {
                if (has(2 * u)) to[2 * u * apart()] = pack.units[u].x;
                if (has(2 * u + 1)) to[(2 * u + 1) * apart()] = pack.units[u].y;
            }
        }
    }
};
