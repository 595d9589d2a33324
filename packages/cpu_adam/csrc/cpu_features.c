/* What this CPU has. gcc's __builtin_cpu_supports asks the operating system too (XGETBV): wide registers count
 * only if they are saved when threads are switched. */
#include "kernels.h"

int cpu_has_baseline(void) { return 1; }

#if defined(__x86_64__)

int cpu_has_avx2(void) { return __builtin_cpu_supports("avx2") != 0; }

int cpu_has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#endif
