// The gradients, the bias' summed, of lines of any length and offset, without a softcap, in tiles.
#include "../fused_bias.cuh"
#include "../fused_tile.cuh"

// The lines of a bias that lie side by side, and where it is broadcast to them: a block takes a tile of them after the other, up to sixteen, and
// adds up their logits' gradients in shared memory, while the next tile comes. Moves what fused_backward_bias moves. Shared memory: twice what
// the gradients in tiles take, the sums, and masks.
template <typename T, bool WINDOW>
__device__ __forceinline__ void fused_backward_bias_tile(const Fused<Real<T>>& call, const BiasSums<Real<T>>& bias, const TileGroup<Real<T>>& group) {
    using R = Real<T>;
    constexpr int PER_UNIT = Element<T>::PER_UNIT;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ ArrivalBarrier arrived[2][2];
    prepare(arrived[0]);
    prepare(arrived[1]);
    const int len = static_cast<int>(call.len), elements = group.lines() * len, room = 2 * tile_room<T>(elements);
    const uint32_t tiles = (bias.kept_lines + group.lines() - 1) / group.lines(), part = blockIdx.x / tiles;
    const uint32_t kept = (blockIdx.x - part * tiles) * group.lines();
    const int here = min(bias.kept_lines - kept, group.lines());
    const uint32_t first = part * bias.lines_of_part, end = min(first + bias.lines_of_part, bias.summed_lines);
    const auto line_of = [&](uint32_t i) { return kept + bias.summed.line(i); };
    // Of half precision the sums begin at an odd place where the first tile's elements do, so that words of two elements lie as their sums do, in this
    // tile and mostly in all.
    const auto is_odd = [&](uint32_t line) { return PER_UNIT > 1 && Tile<T>::before(static_cast<const T*>(call.scores) + line * call.len) % 2 == 1; };
    uint32_t line = line_of(first), next = 0;
    const bool odd = is_odd(line);
    R* sums = reinterpret_cast<R*>(memory + 2 * room) + odd;
    for (int i = threadIdx.x; i < here * len; i += blockDim.x) sums[i] = R(0);
    const auto tiles_of = [&](uint32_t i, uint32_t line) {
        return TilesOfLines<T>(call, memory + ((i - first) & 1) * room, elements, line * call.len, here * len);
    };
    tiles_of(first, line).fetch(call, arrived[0]);
#pragma unroll 1
    for (uint32_t i = first; i < end; i++, line = next) {
        const auto wait = [&] {
            // Nobody reads the tiles before any more, which are written by copies next, nor adds up.
            announce_to_copies();
            __syncthreads();
            if (i + 1 < end) {
                next = line_of(i + 1);
                tiles_of(i + 1, next).fetch(call, arrived[(i + 1 - first) & 1]);
            }
            wait_for_copies(arrived[(i - first) & 1], (i - first) >> 1 & 1);
        };
        const auto add = [&](const auto& held, const Place& at) {
            R* own = sums + group.own() * len + at.first;
            const auto add_one = [&](int n, int j) { own[j] += held.z[n]; };
            if constexpr (PER_UNIT > 1) {
                if (is_odd(line) == odd) {
                    held.each_place([&](int k, int j, bool is) {
                        if (!is) return;
                        auto& of_unit = *reinterpret_cast<float2*>(own + j);
                        of_unit = {of_unit.x + held.z[2 * k], of_unit.y + held.z[2 * k + 1]};
                    });
                    return held.each_end(add_one);
                }
            }
            held.each(add_one);
        };
        unsigned char* behind = memory + 2 * room + (elements + PER_UNIT) * sizeof(R) / 16 * 16 + 16;
        Place at = locate<true>(call, group.own() < here ? line + group.own() : 0);
        if constexpr (!WINDOW) at.first = 0, at.end = len;
        gradients_of_tiles<WINDOW, T, LogitsInTiles<T>>(call, group, line, here, group.part(len), at, tiles_of(i, line), behind, wait, add);
        // Without results all meet here, before the next mask comes.
        if (!call.result) __syncthreads();
    }
    __syncthreads();
    R* to = bias.sums + (part * int64_t(bias.kept_lines) + kept) * len;
    for (int i = threadIdx.x; i < here * len; i += blockDim.x) to[i] = sums[i];
}

// f32 in 96 registers and half precision in 128: 128 x 12 x 197 x 197 f32 with a bias for each head 245 us, in 64 with more blocks 289, 4 x 16 x 1001 x 1001 276
// and 376; 2048 x 3 x 49 x 49 bf16 66, in 96 78.
template <typename T>
constexpr int BIAS_IN_TILES_THREADS = sizeof(T) == 2 ? 256 : 320;

#define KERNEL(name, dtype, T, WINDOW)                                                                                     \
    extern "C" __global__ void __launch_bounds__(BIAS_IN_TILES_THREADS<T>, 2)                                              \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, const __grid_constant__ BiasSums<Real<T>> bias, int shift) { \
        __shared__ Weighted<Real<T>> parts[MAX_WARPS];                                                                     \
        fused_backward_bias_tile<T, WINDOW>(call, bias, TileGroup<Real<T>>{shift, nullptr, parts});                        \
    }
#define KERNELS(dtype, T)                               \
    KERNEL(fused_backward_bias_tile, dtype, T, false)   \
    KERNEL(fused_backward_bias_tile_window, dtype, T, true)
FOR_EACH_SINGLE_DTYPE(KERNELS)
FOR_EACH_HALF_DTYPE(KERNELS)
