// Rows of any length at any offset, read element by element; of half precision, a thread still has two columns.
#include "column_softmax.cuh"

#define HALF(dtype, T)                                           \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 2, 1, 16, 128, 6)  \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 2, 1, 32, 256, 2)
#define SINGLE(dtype, T)                                         \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 1, 1, 16, 256, 4)  \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 1, 1, 32, 256, 3)
#define DOUBLE(dtype, T) BOTH(COLUMN_KERNEL, column_any, dtype, T, 1, 1, 16, 256, 2)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
