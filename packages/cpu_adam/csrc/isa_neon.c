#if defined(__aarch64__)
/* NEON belongs to every 64-bit ARM: no target to set and no question to ask. */
#include "kernel_set.h"

KERNEL_SET(neon, cpu_has_baseline)
#endif
