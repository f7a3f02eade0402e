// The targets of a loss, and the numbers of a line that are a loss's.
#pragma once
#include <cstdint>

// `lines` apart, as src/statistics.rs has them: the log-probability of the target, its weight, the maximum, and ln of the sum of
// exp(x - maximum); with weights or smoothing also 1, the sum over classes of weight times log-probability, and that of the weights. All 0
// for an ignored target.
enum Statistic { LOG_P, WEIGHT, MAX, LOG_SUM, FEWEST_STATISTICS, KEPT = FEWEST_STATISTICS, SMOOTH, SUM_OF_WEIGHTS, MOST_STATISTICS };

// What has gradients, `lines` apart, too: the first statistic, log-sum-exp, and the sum over classes. Of these there are none, but one of
// log-sum-exp, the first one, or all.
enum StatisticGradient { OF_LOG_P, OF_LOG_SUM_EXP, OF_SMOOTH, MOST_GRADIENTS };

// Whether a line with this target is ignored. The lowest number stands for none, as in src/statistics.rs.
__device__ __forceinline__ bool ignores(int64_t ignored, int64_t target) { return target == ignored && ignored != INT64_MIN; }
