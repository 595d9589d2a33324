/* The C interface of cpu_adam: what Python fills in, and the few functions it calls.
 *
 * Rules for every array, checked in Python (update.py) before a call is made:
 *   - contiguous, `numel` elements, each address a multiple of its element's size (no more is asked);
 *   - no two arrays of one call overlap;
 *   - all stay alive and untouched by others until the call returns.
 * The functions allocate nothing, cannot fail, and may be called from several threads at once on
 * different data.
 */
#ifndef CPU_ADAM_H
#define CPU_ADAM_H

#include <stdint.h>

enum adam_format {
    ADAM_NONE = 0,  /* the array is absent */
    ADAM_FP32 = 1,
    ADAM_BF16 = 2,
    ADAM_FP16 = 3,
};

/* Hyperparameters as people give them, in double. */
struct adam_settings {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step;       /* counts from 1 */
    int32_t decoupled;  /* 1: AdamW, 0: Adam with L2 regularisation */
};

/* Elements start .. stop - 1 have settings of their own. */
struct adam_segment {
    int64_t start, stop;
    struct adam_settings settings;
};

/* One optimizer step over one flat buffer. */
struct adam_step {
    int64_t numel;
    void *param;          /* param_format; with param_lo: the bf16 high half of the fp32 master */
    int16_t *param_lo;    /* the master's remainder (remainder.h), or NULL */
    const void *grad;     /* grad_format */
    float *exp_avg;
    float *exp_avg_sq;
    void *param_out;      /* out_format, BF16 or FP16: rounded copy of the updated parameter, or NULL */
    int32_t param_format, grad_format, out_format;
    double grad_scale;
    struct adam_settings settings;  /* for all elements that no segment covers */
    int64_t segment_count;
    const struct adam_segment *segments;  /* ascending, not overlapping, none empty, within numel */
};

/* isa: index into the table that adam_isa_name walks. threads: at least 1; the caller is one of them. */
void adam_update(const struct adam_step *step, int isa, int threads);
void adam_split(const float *master, uint16_t *hi, int16_t *lo, int64_t numel, int isa, int threads);
void adam_join(const uint16_t *hi, const int16_t *lo, float *master, int64_t numel, int isa, int threads);

/* Sum of squares of `grad` in double. `block_sums`: scratch, adam_norm2_blocks(numel) doubles. */
double adam_norm2(const void *grad, int format, int64_t numel, double *block_sums, int isa, int threads);
int64_t adam_norm2_blocks(int64_t numel);

/* Instruction sets compiled in, best first; NULL past the last. runs: whether this CPU and system can. */
const char *adam_isa_name(int isa);
int adam_isa_runs(int isa);

/* Cores this process may use now. */
int adam_cores(void);

#endif
