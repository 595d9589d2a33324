#if defined(__x86_64__)
#pragma GCC target("avx2")
#define PREFETCH_BYTES 512 /* adam_kernel.h */
#include "kernel_set.h"

KERNEL_SET(avx2, cpu_has_avx2)
#endif
