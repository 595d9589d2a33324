/* The plainest CPU of its kind: on x86-64 that is SSE2, elsewhere whatever the compiler's default is. */
#include "kernel_set.h"

KERNEL_SET(generic, cpu_has_baseline)
