// The targets of a loss, and the numbers of a line that are a loss's.
#pragma once
#include <cstdint>

// `lines` apart, as src/statistics.rs has them: the log-probability of the target, log-sum-exp, sum over classes of weight times
// log-probability, weight of the target, 1; the maximum, ln of the sum of exp(x - maximum), and the sum of the weights. All 0 for an
// ignored target.
enum Statistic { LOG_P, LOG_SUM_EXP, SMOOTH, WEIGHT, KEPT, MAX, LOG_SUM, SUM_OF_WEIGHTS, STATISTICS };

// Whether a line with this target is ignored. The lowest number stands for none, as in src/statistics.rs.
__device__ __forceinline__ bool ignores(int64_t ignored, int64_t target) { return target == ignored && ignored != INT64_MIN; }
