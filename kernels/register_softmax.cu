// Lines that are whole packs, of an input that is aligned as the output is.
#include "register_softmax.cuh"

#define KERNELS(dtype, T) REGISTER_KERNELS(register_softmax, register_log_softmax, dtype, T, true)
#define WIDE_KERNELS(dtype, T) WIDE_REGISTER_KERNELS(register_softmax, register_log_softmax, dtype, T, true)
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_WIDE_DTYPE(WIDE_KERNELS)
