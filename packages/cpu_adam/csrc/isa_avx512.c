#if defined(__x86_64__)
/* Features by name: the compiler need not know the CPU. f, bw, dq, vl is what every AVX-512 server has had
 * since Skylake. gcc would prefer 256-bit registers without being told. */
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define STRIP 16 /* adam_kernel.h */
#define STORED ONE_NAN
#define SPLIT_BY_LINES
#include "kernel_set.h"

KERNEL_SET(avx512, cpu_has_avx512)
#endif
