// Rows that are whole packs of four elements (two of f64). Of half precision short lines have half as many elements to a thread,
// whose exponentials it keeps.
#include "column_softmax.cuh"

#define HALF(dtype, T)                                      \
    BOTH(COLUMN_KERNEL, column, dtype, T, 4, 4, 8, 128, 6)  \
    BOTH(COLUMN_KERNEL, column, dtype, T, 4, 4, 16, 512, 2)
#define SINGLE(dtype, T) BOTH(COLUMN_KERNEL, column, dtype, T, 4, 4, 16, 256, 2)
#define DOUBLE(dtype, T) BOTH(COLUMN_KERNEL, column, dtype, T, 2, 2, 16, 256, 2)
FOR_EACH_HALF_DTYPE(HALF)
FOR_EACH_SINGLE_DTYPE(SINGLE)
FOR_EACH_DOUBLE_DTYPE(DOUBLE)
