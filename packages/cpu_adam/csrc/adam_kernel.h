/* Adam's update, written once. Each isa_*.c compiles this file for its instruction set.
 *
 * Plain loops that gcc vectorises: the traffic to memory is the limit, so intrinsics would gain nothing.
 * What matters is how memory is walked:
 *
 * - One pass, in blocks of 64 elements with a plain inner loop, each stream prefetched a fixed distance
 *   ahead. 1.25 KiB was best by measurement; 4 KiB loses 5-8 %.
 * - `param_out` is written around the cache, since nothing in this pass reads it: saves fetching the line
 *   first. Parameters and moments were just read and are in the cache: ordinary stores are faster for them.
 *
 * What must not happen is a fused multiply-add (-ffp-contract=off): then results are the same bits on every
 * instruction set. It would gain neither speed nor accuracy here.
 */
#ifndef CPU_ADAM_KERNEL_H
#define CPU_ADAM_KERNEL_H

#include <math.h>
#include <stddef.h>

#include "coefficients.h"
#include "half_formats.h"
#include "remainder.h"
#include "streaming.h"

enum {
    BLOCK = 64,             /* elements: whole cache lines of every format */
    PREFETCH_BYTES = 1280,  /* ahead of the block at hand */
    CACHE_LINE = 64,
};

/* How the parameter is held; beside the plain formats of adam.h. */
enum { SPLIT = 4 };

/* ---- loads and stores by format; `format` is a constant wherever these are used ---- */

INLINE float load(const void *array, int format, ptrdiff_t i) {
    if (format == ADAM_FP32) return ((const float *)array)[i];
    uint16_t half = ((const uint16_t *)array)[i];
    return format == ADAM_BF16 ? float_of_bf16(half) : float_of_fp16(half);
}

INLINE void store(void *array, int format, ptrdiff_t i, float value) {
    if (format == ADAM_FP32) ((float *)array)[i] = value;
    else ((uint16_t *)array)[i] = format == ADAM_BF16 ? bf16_of(value) : fp16_of(value);
}

INLINE size_t bytes_per_element(int format) { return format == ADAM_FP32 ? 4 : 2; }

/* ---- one block ---- */

/* The arrays of one call, moved along block by block. */
struct cursor {
    char *param;
    int16_t *param_lo;
    const char *grad;
    float *m, *v;
    uint16_t *out;
};

INLINE struct cursor cursor_at(const struct adam_step *s, int param, int grad, int out, int64_t i) {
    int stored = param == SPLIT ? ADAM_BF16 : param;
    return (struct cursor){
        .param = (char *)s->param + i * bytes_per_element(stored),
        .param_lo = param == SPLIT ? s->param_lo + i : NULL,
        .grad = (const char *)s->grad + i * bytes_per_element(grad),
        .m = s->exp_avg + i,
        .v = s->exp_avg_sq + i,
        .out = out ? (uint16_t *)s->param_out + i : NULL,
    };
}

/* Asks for the lines of `elements` elements that lie PREFETCH_BYTES ahead. Past the end it does no harm. */
INLINE void prefetch(const void *stream, size_t bytes) {
    for (size_t byte = 0; byte < bytes; byte += CACHE_LINE)
        __builtin_prefetch((const char *)stream + PREFETCH_BYTES + byte);
}

/* Stores the one canonical NaN wherever update_block left another. */
static __attribute__((noinline, cold)) void make_nan_canonical(struct cursor at, ptrdiff_t n, int param, int keep,
                                                               float *updated) {
    for (ptrdiff_t i = 0; i < n; i++) {
        at.m[i] = canonical(at.m[i]);
        at.v[i] = canonical(at.v[i]);
        if (param == SPLIT) {
            uint16_t *hi = (uint16_t *)at.param;
            uint32_t bits = split_source(joined(hi[i], at.param_lo[i]));
            hi[i] = split_hi(bits);
            at.param_lo[i] = split_lo(bits);
        } else {
            store(at.param, param, i, canonical(load(at.param, param, i)));
        }
        if (keep) updated[i] = canonical(updated[i]);
    }
}

/* Updates elements 0 .. n - 1. `updated` receives the new parameters in fp32 when `keep` is set. */
INLINE void update_block(struct cursor at, const struct coefficients *c, ptrdiff_t n, int param, int grad,
                         int keep, float *restrict updated) {
    const struct coefficients k = *c;
    uint32_t nan = 0;
#pragma GCC ivdep
    for (ptrdiff_t i = 0; i < n; i++) {
        float p = param == SPLIT ? joined(((uint16_t *)at.param)[i], at.param_lo[i]) : load(at.param, param, i);
        float m = at.m[i], v = at.v[i];
        float g = k.grad_scale * load(at.grad, grad, i);
        if (k.l2 != 0.0f) g = g + k.l2 * p;

        m = k.beta1.high * m + (k.beta1.low * m + k.one_minus_beta1 * g);
        v = k.beta2.high * v + (k.beta2.low * v + (k.one_minus_beta2 * g) * g);
        p = k.decay * p - (k.step_size * m) / (sqrtf(v) + k.eps);

        at.m[i] = m;
        at.v[i] = v;
        if (param == SPLIT) {
            ((uint16_t *)at.param)[i] = split_hi(bits_of(p));
            at.param_lo[i] = split_lo(bits_of(p));
        } else {
            store(at.param, param, i, p);
        }
        if (keep) updated[i] = p;
        nan |= p != p; /* true also wherever m or v is NaN */
    }
    if (nan) make_nan_canonical(at, n, param, keep, updated);
}

/* Rounds `updated` into param_out. `whole`: a full block at an aligned address, written around the cache. */
INLINE void write_out(uint16_t *out, int format, const float *updated, ptrdiff_t n, int whole) {
    uint16_t rounded[BLOCK] __attribute__((aligned(CACHE_LINE)));
    if (format == ADAM_BF16)
        for (ptrdiff_t i = 0; i < n; i++) rounded[i] = bf16_of(updated[i]);
    else
        for (ptrdiff_t i = 0; i < n; i++) rounded[i] = fp16_of(updated[i]);
    if (whole) stream_block(out, rounded, sizeof rounded);
    else memcpy(out, rounded, (size_t)n * sizeof *out);
}

/* ---- a range: a head up to where param_out is aligned, whole blocks, a tail ---- */

INLINE void update_range(const struct adam_step *s, const struct coefficients *c, int64_t start, int64_t stop,
                         int param, int grad, int out) {
    float updated[BLOCK] __attribute__((aligned(CACHE_LINE)));
    int64_t i = start;
    while (i < stop) {
        struct cursor at = cursor_at(s, param, grad, out, i);
        int64_t n = stop - i < BLOCK ? stop - i : BLOCK;
        if (out) {
            size_t past_line = (uintptr_t)at.out % CACHE_LINE;
            int64_t to_line = past_line ? (int64_t)((CACHE_LINE - past_line) / sizeof *at.out) : BLOCK;
            n = to_line < n ? to_line : n;
        }
        if (n == BLOCK) {
            prefetch(at.param, BLOCK * bytes_per_element(param == SPLIT ? ADAM_BF16 : param));
            if (param == SPLIT) prefetch(at.param_lo, BLOCK * sizeof *at.param_lo);
            prefetch(at.grad, BLOCK * bytes_per_element(grad));
            prefetch(at.m, BLOCK * sizeof *at.m);
            prefetch(at.v, BLOCK * sizeof *at.v);
            update_block(at, c, BLOCK, param, grad, out, updated);
            if (out) write_out(at.out, s->out_format, updated, BLOCK, 1);
        } else {
            update_block(at, c, n, param, grad, out, updated);
            if (out) write_out(at.out, s->out_format, updated, n, 0);
        }
        i += n;
    }
    if (out) stream_fence();
}

/* ---- every combination of formats as a function of its own, so that each inner loop is straight ---- */

#define FORMS(X, GRAD) \
    X(ADAM_FP32, GRAD, 0) X(ADAM_BF16, GRAD, 0) X(ADAM_FP16, GRAD, 0) X(SPLIT, GRAD, 0) \
    X(ADAM_FP32, GRAD, 1) X(ADAM_BF16, GRAD, 1) X(ADAM_FP16, GRAD, 1) X(SPLIT, GRAD, 1)
#define ALL_FORMS(X) FORMS(X, ADAM_FP32) FORMS(X, ADAM_BF16) FORMS(X, ADAM_FP16)

#define DEFINE_FORM(PARAM, GRAD, OUT)                                                                         \
    static __attribute__((noinline)) void update_##PARAM##_##GRAD##_##OUT(                                    \
        const struct adam_step *s, const struct coefficients *c, int64_t start, int64_t stop) {               \
        update_range(s, c, start, stop, PARAM, GRAD, OUT);                                                    \
    }
ALL_FORMS(DEFINE_FORM)

typedef void update_function(const struct adam_step *, const struct coefficients *, int64_t, int64_t);

#define ENTER_FORM(PARAM, GRAD, OUT) [PARAM][GRAD][OUT] = update_##PARAM##_##GRAD##_##OUT,
static update_function *const update_forms[SPLIT + 1][ADAM_FP16 + 1][2] = {ALL_FORMS(ENTER_FORM)};

static void kernel_update(const struct adam_step *s, const struct coefficients *c, int64_t start, int64_t stop) {
    int param = s->param_lo ? SPLIT : s->param_format;
    update_forms[param][s->grad_format][s->param_out != NULL](s, c, start, stop);
}

#endif
