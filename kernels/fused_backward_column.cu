#include "fused_column.cuh"

#define KERNEL(any, dtype, T, SIZE, WHOLE, ROWS, BLOCKS) \
    FUSED_COLUMN(fused_backward_column##any, fused_backward_columns, dtype, T, SIZE, WHOLE, ROWS, BLOCKS)
#define HALF(dtype, T) KERNEL(, dtype, T, 4, true, 8, 3) KERNEL(, dtype, T, 2, true, 16, 4) KERNEL(, dtype, T, 4, true, 12, 2) KERNEL(_any, dtype, T, 2, false, 16, 4)
#define SINGLE(dtype, T) KERNEL(, dtype, T, 4, true, 8, 2) KERNEL(, dtype, T, 1, true, 16, 4)
#define DOUBLE(dtype, T) KERNEL(, dtype, T, 1, true, 16, 2)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
