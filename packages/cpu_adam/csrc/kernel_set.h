/* All kernels of one instruction set. An isa_*.c file sets the compiler's target, includes this file, and
 * names the table; everything else here is static, so no code for that target can be called past the table. */
#include "adam_kernel.h"
#include "kernels.h"
#include "norm2_kernel.h"

static void kernel_split(const float *master, uint16_t *hi, int16_t *lo, int64_t start, int64_t stop) {
#pragma GCC ivdep
    for (int64_t i = start; i < stop; i++) {
        uint32_t bits = split_source(master[i]);
        hi[i] = split_hi(bits);
        lo[i] = split_lo(bits);
    }
}

static void kernel_join(const uint16_t *hi, const int16_t *lo, float *master, int64_t start, int64_t stop) {
#pragma GCC ivdep
    for (int64_t i = start; i < stop; i++) master[i] = joined(hi[i], lo[i]);
}

#define KERNEL_SET(NAME, RUNS)                                                                                \
    const struct kernels kernels_##NAME = {#NAME,         RUNS,         kernel_update,                        \
                                           kernel_norm2,  kernel_split, kernel_join};
