// Rows that are whole packs of four elements (two of f64). Of half precision threads take half as many elements of short lines,
// and keep their exponentials, and as many in rows that are whole words of two.
#include "column_softmax.cuh"

#define HALF(dtype, T)                                          \
    BOTH(COLUMN_KERNEL, column, dtype, T, 2, PACKS, 16, 128, 6) \
    BOTH(COLUMN_KERNEL, column, dtype, T, 2, PACKS, 32, 256, 2) \
    BOTH(COLUMN_KERNEL, column, dtype, T, 4, PACKS, 16, 512, 2)
#define SINGLE(dtype, T) BOTH(COLUMN_KERNEL, column, dtype, T, 4, PACKS, 16, 256, 2)
#define DOUBLE(dtype, T) BOTH(COLUMN_KERNEL, column, dtype, T, 2, PACKS, 16, 256, 2)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
