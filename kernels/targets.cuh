// The targets of a loss.
#pragma once
#include <cstdint>

// Whether a line with this target is ignored. The lowest number stands for none, as in src/statistics.rs.
__device__ __forceinline__ bool ignores(int64_t ignored, int64_t target) { return target == ignored && ignored != INT64_MIN; }
