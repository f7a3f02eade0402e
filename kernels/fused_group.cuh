// Softmax with what models put around it, of lines of any length along any dimension: a group of threads walks its lines twice.
// The second time they come from the L2 cache where what all groups have at once fits in. Each element is read twice and written once,
// 3/2 of the bytes of a copy; backward the gradients are read twice, too, 5/2. With nothing but a scale 4096 x 50257 takes 1.5 copies and 2.45 (H100, f32
// and bf16 alike); what lies side by side is bound by instructions, (4096, 4096) along dimension 0 1.8 and 2.5, bf16 2.6 and 3.6.
#pragma once
#include "fused.cuh"
#include "line_group.cuh"

// How a thread of a group walks lines that lie side by side, COUNT of them at once: element by element, or word by word, TILE of them in flight, …
template <typename T, bool BACKWARD, bool SCORES, int LINES = 1>
struct ScatteredLine : StridedLine {
    static constexpr int STEPS = 4, TILE = 4, COUNT = LINES;
    using Own = SideBySide<T, COUNT>;

    __device__ __forceinline__ ScatteredLine(const StridedLine& line, const T*) : StridedLine(line) {}

    static __device__ __forceinline__ void fetch_ahead(const T*, int64_t, bool) {}

    template <typename O, typename R>
    __device__ __forceinline__ void store(O* x, int64_t apart, int64_t j, int left, const R (&results)[COUNT][TILE]) const {
        if constexpr (COUNT == 1) {
            StridedLine::store<TILE>(x, apart, j, left, [&](int k) { return rounded_to<O>(results[0][k]); });
        } else {
            static_assert(std::is_same_v<O, T>, "of words, that are the scores'");
            StridedLine::store<TILE>(reinterpret_cast<typename Own::Word*>(x), apart, j, left, [&](int k) {
                const R each[COUNT] = {results[0][k], results[COUNT - 1][k]};
                return Own::write(each);
            });
        }
    }
};
template <typename T, bool BACKWARD, bool SCORES>
using ScatteredPair = ScatteredLine<T, BACKWARD, SCORES, 2>;

// … and a contiguous line: by packs that begin at multiples of 16 bytes of the scores x, `step` elements apart. The first one may begin before the
// line. What does not lie alike in another tensor, or not all in the line, is accessed element by element. Where registers would not hold as much,
// packs are of 8 bytes.
template <typename T, bool BACKWARD, bool SCORES>
struct ContiguousLine : StridedLine {
    static constexpr int COUNT = 1;
    using Own = SideBySide<T, COUNT>;
    static constexpr int BYTES = BACKWARD && !SCORES && sizeof(T) == 2 ? 8 : 16, SIZE = BYTES / sizeof(T);
    static constexpr int STEPS = BACKWARD || sizeof(T) == 2 ? 1 : 2, TILE = STEPS * SIZE;
    static constexpr int AHEAD = BACKWARD ? 1 : 2;  // tiles that are fetched into the L2 cache

    __device__ __forceinline__ ContiguousLine(const StridedLine& line, const T* x) : StridedLine(line) {
        const int before = static_cast<int>(reinterpret_cast<uintptr_t>(x) / sizeof(T) + start) & (SIZE - 1);
        if (len > 0) first = first * SIZE - before;
        step *= SIZE;
    }

    __device__ __forceinline__ int place(int k) const { return k / SIZE * static_cast<int>(step) + k % SIZE; }
    __device__ __forceinline__ bool has(int k, int left) const { return place(k) < left; }

    template <typename O>
    __device__ __forceinline__ void load(O (&tile)[TILE], const O* x, int64_t apart, int64_t j, int left) const {
        constexpr int PIECE = SIZE * sizeof(O) > 16 ? 16 / sizeof(O) : SIZE;
        if (apart == 1 && in_packs(x, j, left)) {
#pragma unroll
            for (int k = 0; k < TILE; k += PIECE) {
                const auto piece = load_neighbours<O, PIECE>(x + j + place(k));
#pragma unroll
                for (int i = 0; i < PIECE; i++) tile[k + i] = piece.of[i];
            }
            return;
        }
        const int64_t one = j > 0 ? j : 0;
#pragma unroll
        for (int k = 0; k < TILE; k++) tile[k] = x[(holds(j, k, left) ? j + place(k) : one) * apart];
    }

    __device__ __forceinline__ void fetch_ahead(const T* x, int64_t j, bool backwards) const {
        const int64_t then = j + (backwards ? -AHEAD : AHEAD) * STEPS * step;
#pragma unroll
        for (int k = 0; k < TILE; k += SIZE) {
            if (then >= 0 && then + place(k) < len) prefetch(x + then + place(k));
        }
    }

    template <typename O, typename R>
    __device__ __forceinline__ void store(O* x, int64_t, int64_t j, int left, const R (&of_lines)[COUNT][TILE]) const {
        const auto& results = of_lines[0];
        if (in_packs(x, j, left)) {
#pragma unroll
            for (int k = 0; k < TILE; k += SIZE) {
                R pack[SIZE];
#pragma unroll
                for (int i = 0; i < SIZE; i++) pack[i] = results[k + i];
                store_as(StreamingAccess{}, x + j + place(k), pack);
            }
            return;
        }
#pragma unroll
        for (int k = 0; k < TILE; k++) {
            if (holds(j, k, left)) x[j + place(k)] = rounded_to<O>(results[k]);
        }
    }

  private:
    __device__ __forceinline__ bool holds(int64_t j, int k, int left) const { return has(k, left) && j + place(k) >= 0; }
    // Whether a tile lies in packs of these elements, all of them.
    template <typename O>
    __device__ __forceinline__ bool in_packs(const O* x, int64_t j, int left) const {
        constexpr uintptr_t ALIGNMENT = SIZE * sizeof(O) > 16 ? 16 : SIZE * sizeof(O);
        return j >= 0 && has(TILE - 1, left) && reinterpret_cast<uintptr_t>(x + j) % ALIGNMENT == 0;
    }
};

// An element of a tensor whose dtype is told when the kernel runs. Calls, since such tensors are few and kernels are to be small.
template <typename R>
__device__ __noinline__ R read_as(const void* x, Dtype dtype, int64_t i) {
    R element = 0;
    by_dtype(dtype, [&](auto* type) {
        using O = std::remove_pointer_t<decltype(type)>;
        element = static_cast<R>(Element<O>::read(static_cast<const O*>(x)[i]));
    });
    return element;
}
template <typename R>
__device__ __noinline__ void write_as(void* y, Dtype dtype, int64_t i, R result) {
    by_dtype(dtype, [&](auto* type) {
        using O = std::remove_pointer_t<decltype(type)>;
        static_cast<O*>(y)[i] = rounded_to<O>(result);
    });
}

// The logits of a line, or of some side by side: those in its window. SCORES: which are the scores but for a scale, nothing is dropped, and results are
// of the scores' dtype.
template <typename T, typename Line, bool BACKWARD, bool SCORES>
struct FusedLogits {
    using R = Real<T>;
    using Word = typename Line::Own::Word;
    static constexpr int TILE = Line::TILE, COUNT = Line::COUNT;
    static_assert(COUNT == 1 || SCORES, "what is beside the scores lies otherwise");
    // The largest kernels go through both walks by the same code, so that the driver is through with them in time: of the gradients of (65536, 21, 64)
    // f32 with any options that takes 3.4 copies for 3.1.
    static constexpr int UNROLLED_WALKS = BACKWARD && !SCORES ? 1 : 2;

    const Fused<R>& call;
    Place at;           // of the first line
    int64_t sinks[COUNT];
    Line line;

    // Calls f with where this thread's tiles begin: those with anything in the window, the last one first, or all.
    template <typename F>
    __device__ __forceinline__ void each_tile(bool of_window, F f) const {
        const int64_t begin = of_window ? at.first : 0, end = of_window ? at.end : line.len;
        line.template each_first_of<Line::STEPS>(begin, end, of_window, [&](int64_t from) {
            line.fetch_ahead(static_cast<const T*>(call.scores) + at.scores, from, of_window);
            if (BACKWARD && (SCORES || call.dtype == OWN<T>)) line.fetch_ahead(static_cast<const T*>(call.gradient) + at.scores, from, of_window);
            f(from);
        });
    }

    // The scores from element `from` on, …
    __device__ __forceinline__ void read_scores(int64_t from, Word (&scores)[TILE]) const { read_words(call.scores, from, scores); }
    __device__ __forceinline__ void read_words(const void* x, int64_t from, Word (&words)[TILE]) const {
        const auto* of_line = reinterpret_cast<const Word*>(static_cast<const T*>(x) + at.scores);
        line.load(words, of_line, call.inner / COUNT, from, line.left(from, at.end));
    }

    // … and the logits of them, of line i of those side by side; -inf of what takes no part
    __device__ __forceinline__ void read_logits(int i, int64_t from, R (&z)[TILE], const Word (&scores)[TILE]) const {
        const int left = line.left(from, at.end);
        if (SCORES || !(call.cap > R(0))) {
#pragma unroll
            for (int k = 0; k < TILE; k++) z[k] = product(Line::Own::read(scores[k], i), call.scale);
        }
        if constexpr (!SCORES) {
            T added[TILE];
            uint8_t kept[TILE];
            if (call.adds) line.load(added, static_cast<const T*>(call.bias) + at.bias, call.bias_step, from, left);
            if (call.masks) line.load(kept, static_cast<const uint8_t*>(call.mask) + at.mask, call.mask_step, from, left);
            if (call.cap > R(0)) {
                by_steepness<T>(call, [&](auto steep) {
#pragma unroll
                    for (int k = 0; k < TILE; k++) z[k] = product(call.cap, tangent<steep>(call, Element<T>::read(scores[k])));
                });
            }
            if (call.adds) {
#pragma unroll
                for (int k = 0; k < TILE; k++) z[k] += Element<T>::read(added[k]);
            }
            if (call.masks) {
#pragma unroll
                for (int k = 0; k < TILE; k++) z[k] = kept[k] ? z[k] : negative_infinity<R>();
            }
        }
        if (line.has(TILE - 1, left) && from >= at.first) return;
#pragma unroll
        for (int k = 0; k < TILE; k++) z[k] = line.has(k, left) && from + line.place(k) >= at.first ? z[k] : negative_infinity<R>();
    }

    // The gradients of the results from element `from` on
    __device__ __forceinline__ void read_gradients(int64_t from, R (&of_lines)[COUNT][TILE]) const {
        if constexpr (SCORES) {
            Word words[TILE];
            read_words(call.gradient, from, words);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
#pragma unroll
                for (int k = 0; k < TILE; k++) of_lines[i][k] = Line::Own::read(words[k], i);
            }
        } else {
            read_any_gradients(from, of_lines[0]);
        }
    }
    // … of any dtype, of what is not dropped
    __device__ __forceinline__ void read_any_gradients(int64_t from, R (&g)[TILE]) const {
        const auto of = [&](auto* type) {
            using O = std::remove_pointer_t<decltype(type)>;
            O elements[TILE];
            line.load(elements, static_cast<const O*>(call.gradient) + at.scores, call.inner, from, line.left(from, at.end));
#pragma unroll
            for (int k = 0; k < TILE; k++) g[k] = static_cast<R>(Element<O>::read(elements[k]));
        };
        if (call.dtype == OWN<T>) of(static_cast<T*>(nullptr));
        else if (sizeof(T) == 2 && call.dtype == F32) of(static_cast<float*>(nullptr));
        else {
            R elements[TILE];
            each_place(from, at.end, [&](int k, int64_t i) { elements[k] = read_as<R>(call.gradient, call.dtype, i); });
#pragma unroll
            for (int k = 0; k < TILE; k++) g[k] = elements[k];
        }
        if (call.threshold) drop_any(from, g, call.kept_scale);
    }

    // Multiplies what is not dropped, and sets to 0 what is.
    __device__ __forceinline__ void drop_any(int64_t from, R (&values)[TILE], R factor) const {
        uint32_t dropped = 0;
        RandomBits bits;
        int64_t of_eight = -2;  // which eight elements they are of
#pragma unroll 1
        for (int k = 0; k < TILE; k++) {
            const int64_t j = from + line.place(k);
            if (j >> 3 != of_eight) {
                bits = RandomBits(call, at.line, j);
                of_eight = j >> 3;
            }
            if (bits.of(j & 7) < call.threshold) dropped |= 1u << k;
        }
#pragma unroll
        for (int k = 0; k < TILE; k++) values[k] = dropped >> k & 1 ? R(0) : values[k] * factor;
    }

    template <typename O>
    __device__ __forceinline__ void store(O* to, int64_t from, const R (&results)[COUNT][TILE]) const {
        line.store(to + at.scores, call.inner / COUNT, from, line.left(from, line.len), results);
    }
    // Results of any dtype
    __device__ __forceinline__ void store(int64_t from, const R (&results)[COUNT][TILE]) const {
        if (SCORES || call.dtype == OWN<T>) {
            store(static_cast<T*>(call.result), from, results);
        } else if constexpr (!SCORES) {
            if (sizeof(T) == 2 && call.dtype == F32) store(static_cast<float*>(call.result), from, results);
            else each_place(from, line.len, [&](int k, int64_t i) { write_as(call.result, call.dtype, i, results[0][k]); });
        }
    }
    __device__ __forceinline__ R sink(int i) const { return sink_of<T>(call, sinks[i]); }

  private:
    // Calls f(k, its place in the tensor) for the elements of a tile that lie in the line, before `end`.
    template <typename F>
    __device__ __forceinline__ void each_place(int64_t from, int64_t end, F f) const {
        const int left = line.left(from, end);
#pragma unroll 1
        for (int k = 0; k < TILE; k++) {
            const int64_t j = from + line.place(k);
            if (line.has(k, left) && j >= 0) f(k, at.scores + j * call.inner);
        }
    }
};

// The state of a line, and the sum of the gradients g of its results, which has the exponentials as its weights or, of log-softmax, none.
template <typename R>
struct WeighedState : SoftmaxState<R> {
    using Softmax = SoftmaxState<R>;
    CompensatedSum<R> dot;
    bool weighted;

    __device__ __forceinline__ R grow(R other) {
        const R before = Softmax::reference();
        const bool any = Softmax::max != negative_infinity<R>();
        const R reference = Softmax::grow(other);
        if (weighted && any && reference != before) dot.scale(exponential(before - reference));
        return reference;
    }
    __device__ __forceinline__ void merge(WeighedState other) {
        grow(other.max);
        other.grow(Softmax::max);
        Softmax::sum.merge(other.sum);
        dot.merge(other.dot);
    }
};
static_assert(sizeof(WeighedState<float>) <= 6 * sizeof(float) && sizeof(WeighedState<double>) <= 6 * sizeof(double), "as src/cuda/launch.rs has it");

// A finished line: its maximum and sum with the sink, which becomes part of the state, and whether nothing takes part.
template <typename State, typename R>
__device__ __forceinline__ Normalizer<R> finished(const Fused<R>& call, R sink, State& state, bool& empty) {
    if (call.sinks) {
        const R reference = state.grow(sink);
        state.add(swift_exponential(sink - reference));
    }
    empty = state.max == negative_infinity<R>() && state.sum.value() == R(0);
    return state.finish_by(swift_exponential(state.max - state.reference()));
}

// Both walks go back and forth: the tile that is read last on the way to the line's state is the first that is needed again, and kept.
template <typename T, typename Line, bool SCORES>
__device__ __forceinline__ void fused_line(const FusedLogits<T, Line, false, SCORES>& logits, const LineGroup& group, Phase phase,
                                           Each<SoftmaxState<Real<T>>, Line::COUNT>* parts, int64_t number) {
    using R = Real<T>;
    constexpr int TILE = Line::TILE, COUNT = Line::COUNT;
    const auto& call = logits.call;
    Each<SoftmaxState<R>, COUNT> states;
#pragma unroll
    for (auto& state : states.of) state = SoftmaxState<R>::empty();
    R max[COUNT], inverse[COUNT], log_sum[COUNT];
    bool empty[COUNT];
    int64_t kept = INT64_MIN;
    R z[COUNT][TILE];
#pragma unroll logits.UNROLLED_WALKS
    for (int walk = 0; walk < 2; walk++) {
        if (walk == 0 && phase == Phase::MERGED) continue;
        if (walk == 1) {
            if (!group.merge(states, phase, parts, number, logits.line)) return;
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const auto line = finished(call, logits.sink(i), states.of[i], empty[i]);
                max[i] = line.max;
                inverse[i] = call.kept_scale / line.sum;
                log_sum[i] = call.log ? logarithm(line.sum) : R(0);
            }
        }
        logits.each_tile(walk == 0, [&](int64_t from) {
            if (walk == 0 || from != kept) {
                typename Line::Own::Word scores[TILE];
                logits.read_scores(from, scores);
#pragma unroll
                for (int i = 0; i < COUNT; i++) logits.read_logits(i, from, z[i], scores);
                kept = from;
            }
            R results[COUNT][TILE];
            if (walk == 0) {
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    auto& state = states.of[i];
                    const R reference = state.grow(max_of(z[i]));
#pragma unroll
                    for (int k = 0; k < TILE; k++) results[i][k] = swift_exponential(z[i][k] - reference);
                    state.add(pairwise_sum(results[i]));
                }
                return;
            }
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (call.log) {
#pragma unroll
                    for (int k = 0; k < TILE; k++) results[i][k] = (z[i][k] - max[i]) - log_sum[i];
                } else {
#pragma unroll
                    for (int k = 0; k < TILE; k++) results[i][k] = swift_exponential(z[i][k] - max[i]) * inverse[i];
                }
                if (empty[i]) {
                    const R of_none = call.nan_rows && !call.sinks ? R(NAN) : call.log ? negative_infinity<R>() : R(0);
#pragma unroll
                    for (auto& x : results[i]) x = of_none;
                }
            }
            if (!SCORES && call.threshold) logits.drop_any(from, results[0], R(1));
            logits.store(from, results);
        });
    }
}

template <typename T, typename Line, bool SCORES>
__device__ __forceinline__ void fused_backward_line(const FusedLogits<T, Line, true, SCORES>& logits, const LineGroup& group, Phase phase,
                                                    Each<WeighedState<Real<T>>, Line::COUNT>* parts, int64_t number) {
    using R = Real<T>;
    constexpr int TILE = Line::TILE, COUNT = Line::COUNT;
    const auto& call = logits.call;
    const auto takes_part = [](R z) { return !(z == negative_infinity<R>()); };
    Each<WeighedState<R>, COUNT> states;
#pragma unroll
    for (auto& state : states.of) state = {SoftmaxState<R>::empty(), CompensatedSum<R>::empty(), !call.log};
    R inverse[COUNT], reference[COUNT], dot[COUNT];
    int64_t kept = INT64_MIN;
    R z[COUNT][TILE], g[COUNT][TILE];
    typename Line::Own::Word scores[TILE];
#pragma unroll logits.UNROLLED_WALKS
    for (int walk = 0; walk < 2; walk++) {
        if (walk == 0 && phase == Phase::MERGED) continue;
        if (walk == 1) {
            if (!group.merge(states, phase, parts, number, logits.line)) return;
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                auto& state = states.of[i];
                bool empty;
                const auto line = finished(call, logits.sink(i), state, empty);
                inverse[i] = empty ? R(0) : R(1) / line.sum;
                reference[i] = empty ? R(0) : line.max;
                dot[i] = state.dot.value();
                if (!call.log) dot[i] = empty ? R(0) : dot[i] / state.sum.value();
                if (call.sinks_gradient && group.leads() && blockIdx.y == 0 && logits.line.len > 0) {
                    const R p = empty ? R(0) : swift_exponential(logits.sink(i) - reference[i]) * inverse[i];
                    call.sinks_gradient[logits.at.line + i] = -p * dot[i];
                }
            }
        }
        logits.each_tile(walk == 0, [&](int64_t from) {
            if (walk == 0 || from != kept) {
                logits.read_scores(from, scores);
                logits.read_gradients(from, g);
#pragma unroll
                for (int i = 0; i < COUNT; i++) logits.read_logits(i, from, z[i], scores);
                kept = from;
            }
            R results[COUNT][TILE];
            if (walk == 0) {
#pragma unroll
                for (int i = 0; i < COUNT; i++) {
                    auto& state = states.of[i];
                    const R of_tile = state.grow(max_of(z[i]));
                    R terms[TILE];
#pragma unroll
                    for (int k = 0; k < TILE; k++) {
                        const R e = results[i][k] = swift_exponential(z[i][k] - of_tile);
                        // What takes no part does not count, even if it is not a number.
                        terms[k] = !takes_part(z[i][k]) ? R(0) : call.log ? g[i][k] : g[i][k] * e;
                    }
                    state.add(pairwise_sum(results[i]));
                    state.dot.add(pairwise_sum(terms));
                }
                return;
            }
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
#pragma unroll
                for (int k = 0; k < TILE; k++) {
                    const R p = swift_exponential(z[i][k] - reference[i]) * inverse[i];
                    results[i][k] = !takes_part(z[i][k]) ? R(0) : call.log ? g[i][k] - p * dot[i] : p * (g[i][k] - dot[i]);
                }
            }
            if constexpr (!SCORES) {
                if (call.logits_gradient) logits.store(call.logits_gradient, from, results);
            }
            if (!call.result) return;
            if (SCORES || !(call.cap > R(0))) {
#pragma unroll
                for (auto& of_line : results) {
#pragma unroll
                    for (auto& x : of_line) x *= call.scale;
                }
            } else if constexpr (!SCORES) {
                by_steepness<T>(call, [&](auto steep) {
#pragma unroll
                    for (int k = 0; k < TILE; k++) results[0][k] = behind_softcap(results[0][k], slope<steep>(call, Element<T>::read(scores[k])));
                });
            }
            logits.store(static_cast<T*>(call.result), from, results);
        });
    }
}

// The elements of lines as `Line` has them.
template <typename T, typename Line, bool BACKWARD, bool SCORES, typename State>
__device__ __forceinline__ void fused_group(const Fused<Real<T>>& call, int shape, int64_t groups, Phase phase, State* parts) {
    constexpr int COUNT = Line::COUNT;
    const LineGroup group(groups, call.len, call.inner / COUNT, shape);
    group.each([&](int64_t number, const StridedLine& line) {
        FusedLogits<T, Line, BACKWARD, SCORES> logits{call, locate<false>(call, number * COUNT), {}, Line(line.of_grid(), static_cast<const T*>(call.scores))};
#pragma unroll
        for (int i = 0; i < COUNT; i++) logits.sinks[i] = i == 0 ? logits.at.sink : locate<false>(call, number * COUNT + i).sink;
        logits.at.scores = line.start * COUNT;
        if (line.len == 0) logits.at.first = logits.at.end = 0;
        auto* of_lines = reinterpret_cast<Each<State, COUNT>*>(parts);
        if constexpr (BACKWARD) fused_backward_line(logits, group, phase, of_lines, number);
        else fused_line(logits, group, phase, of_lines, number);
    });
}

#define GROUP_KERNEL(name, dtype, T, Line, BACKWARD, SCORES, State)                                                                \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS, sizeof(T) == 8 ? 1 : 2)                                            \
        name##_##dtype(const __grid_constant__ Fused<Real<T>> call, int shape, int64_t groups, int phase, State<Real<T>>* parts) { \
        fused_group<T, Line<T, BACKWARD, SCORES>, BACKWARD, SCORES>(call, shape, groups, static_cast<Phase>(phase), parts);                \
    }
