/* What one instruction set offers. dispatch.c lists them. */
#ifndef CPU_ADAM_KERNELS_H
#define CPU_ADAM_KERNELS_H

#include "adam.h"
#include "coefficients.h"

/* All work on elements start .. stop - 1 of whole arrays. */
struct kernels {
    const char *name;
    int (*runs)(void); /* whether this CPU has the instructions and the system saves their registers */
    void (*update)(const struct adam_step *, const struct coefficients *, int64_t start, int64_t stop);
    void (*norm2)(const void *grad, int format, int64_t start, int64_t stop, double *block_sums);
    void (*split)(const float *master, uint16_t *hi, int16_t *lo, int64_t start, int64_t stop);
    void (*join)(const uint16_t *hi, const int16_t *lo, float *master, int64_t start, int64_t stop);
};

extern const struct kernels kernels_avx512, kernels_avx2, kernels_neon, kernels_generic;

const struct kernels *kernels_at(int isa);

int cpu_has_avx512(void);
int cpu_has_avx2(void);
int cpu_has_baseline(void);

#endif
