// Rows of any length at any offset: one column to a thread, of half precision two or, of wide rows, four. And such of half precision that are whole words of
// two but for where the input begins.
#include "column_softmax.cuh"

#define HALF(dtype, T)                                                \
    BOTH(COLUMN_KERNEL, column_words, dtype, T, 2, WORDS, 16, 128, 6) \
    BOTH(COLUMN_KERNEL, column_words, dtype, T, 2, WORDS, 32, 256, 2) \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 2, ANY, 16, 128, 6)     \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 2, ANY, 32, 256, 2)     \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 4, ANY, 8, 512, 2)
#define SINGLE(dtype, T)                                          \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 1, ANY, 16, 256, 4) \
    BOTH(COLUMN_KERNEL, column_any, dtype, T, 1, ANY, 32, 256, 3)
#define DOUBLE(dtype, T) BOTH(COLUMN_KERNEL, column_any, dtype, T, 1, ANY, 16, 256, 2)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
