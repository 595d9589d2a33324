#if defined(__x86_64__)
#pragma GCC target("avx2")
#include "kernel_set.h"

KERNEL_SET(avx2, cpu_has_avx2)
#endif
