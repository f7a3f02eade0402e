// Lines of any length, of an input at any offset.
#include "register_softmax.cuh"

#define KERNELS(dtype, T) REGISTER_KERNELS(register_any_softmax, register_any_log_softmax, dtype, T, false)
#define WIDE_KERNELS(dtype, T) WIDE_REGISTER_KERNELS(register_any_softmax, register_any_log_softmax, dtype, T, false)
FOR_EACH_DTYPE(KERNELS)
FOR_EACH_WIDE_DTYPE(WIDE_KERNELS)
