/* Adam's update, written once. Each isa_*.c compiles this file for its instruction set.
 *
 * Plain loops that gcc vectorises: the traffic to memory is the limit, so intrinsics would gain nothing.
 * What matters is how memory is walked:
 *
 * - One pass over memory, in blocks that stay in the first-level cache from loading to storing. A block of a 16-bit
 *   format is widened into a small tile first and narrowed from it last; the arithmetic sees fp32 only. That is
 *   faster than one loop that does it all (by a third for the split master with AVX2: the registers
 *   suffice), and the formats need not be multiplied out.
 * - Each stream is prefetched a fixed distance ahead. 1.25 KiB was best by measurement; 4 KiB loses 5-8 %.
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

INLINE size_t bytes_per_element(int format) { return format == ADAM_FP32 ? 4 : 2; }

INLINE char *element(const void *array, int format, int64_t i) {
    return (char *)array + (size_t)i * bytes_per_element(format);
}

/* ---- load: n elements from i on, as fp32; in place where they are fp32 already, else in `tile` ---- */

static float *load_format(const void *array, int format, int64_t i, ptrdiff_t n, float *restrict tile) {
    if (format == ADAM_FP32) return (float *)array + i;
    const uint16_t *half = (const uint16_t *)array + i;
    if (format == ADAM_BF16)
        for (ptrdiff_t j = 0; j < n; j++) tile[j] = float_of_bf16(half[j]);
    else
        for (ptrdiff_t j = 0; j < n; j++) tile[j] = float_of_fp16(half[j]);
    return tile;
}

static float *load_param(const struct adam_step *s, int64_t i, ptrdiff_t n, float *restrict tile) {
    if (!s->param_lo) return load_format(s->param, s->param_format, i, n, tile);
    const uint16_t *hi = (const uint16_t *)s->param + i;
    const int16_t *lo = s->param_lo + i;
    for (ptrdiff_t j = 0; j < n; j++) tile[j] = joined(hi[j], lo[j]);
    return tile;
}

/* ---- update ---- */

/* The equations of coefficients.h on n elements. Whether a parameter became NaN, as it does where a moment is. */
INLINE int update_block(float *restrict param, const float *restrict grad, float *restrict exp_avg,
                        float *restrict exp_avg_sq, const struct coefficients *coefficients, ptrdiff_t n) {
    const struct coefficients k = *coefficients;
    uint32_t nan = 0;
    for (ptrdiff_t j = 0; j < n; j++) {
        float p = param[j], m = exp_avg[j], v = exp_avg_sq[j];
        float g = k.grad_scale * grad[j];
        if (k.l2 != 0.0f) g = g + k.l2 * p;

        /* Moving m by a part of the distance rounds once where adding two parts of m and g rounds twice, but it loses
         * a small g beside a large m when that part is nearly the whole. */
        m = k.beta1 < 0.5f ? k.beta1 * m + k.one_minus_beta1 * g : m + k.one_minus_beta1 * (g - m);
        v = k.beta2.high * v + (k.beta2.low * v + (k.one_minus_beta2 * g) * g);
        p = k.decay * p - (k.step_size * m) / (sqrtf(v) + k.eps);

        param[j] = p;
        exp_avg[j] = m;
        exp_avg_sq[j] = v;
        nan |= p != p;
    }
    return nan != 0;
}

/* Stores the one canonical NaN (bits.h) wherever update_block left another. Apart from the loop above, which then
 * pays a single comparison for it. */
static __attribute__((noinline, cold)) void make_nan_canonical(float *param, float *exp_avg, float *exp_avg_sq,
                                                               ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; j++) {
        param[j] = canonical(param[j]);
        exp_avg[j] = canonical(exp_avg[j]);
        exp_avg_sq[j] = canonical(exp_avg_sq[j]);
    }
}

/* ---- store ---- */

INLINE void round_block(const float *restrict from, uint16_t *restrict to, int format, ptrdiff_t n) {
    if (format == ADAM_BF16)
        for (ptrdiff_t j = 0; j < n; j++) to[j] = bf16_of(from[j]);
    else
        for (ptrdiff_t j = 0; j < n; j++) to[j] = fp16_of(from[j]);
}

static void store_param(const struct adam_step *s, int64_t i, ptrdiff_t n, const float *restrict updated) {
    if (s->param_format == ADAM_FP32) return; /* was updated in place */
    uint16_t *restrict half = (uint16_t *)s->param + i;
    if (!s->param_lo) {
        round_block(updated, half, s->param_format, n);
        return;
    }
    int16_t *restrict lo = s->param_lo + i;
#pragma GCC ivdep
    for (ptrdiff_t j = 0; j < n; j++) {
        half[j] = split_hi(bits_of(updated[j]));
        lo[j] = split_lo(bits_of(updated[j]));
    }
}

/* A full block lies at an aligned address (update_range sees to that) and is written around the cache. */
static void store_out(const struct adam_step *s, int64_t i, ptrdiff_t n, const float *updated) {
    uint16_t rounded[BLOCK] __attribute__((aligned(CACHE_LINE)));
    uint16_t *out = (uint16_t *)s->param_out + i;
    if (n == BLOCK) {
        round_block(updated, rounded, s->out_format, BLOCK);
        stream_block(out, rounded, sizeof rounded);
    } else {
        round_block(updated, out, s->out_format, n);
    }
}

/* ---- a range, block by block ---- */

/* Asks for the lines that the block PREFETCH_BYTES further on will need. Past the end it does no harm. */
INLINE void prefetch(const char *block, size_t nbytes) {
    for (size_t byte = 0; byte < nbytes; byte += CACHE_LINE) __builtin_prefetch(block + PREFETCH_BYTES + byte);
}

INLINE void prefetch_block(const struct adam_step *s, int64_t i) {
    prefetch(element(s->param, s->param_format, i), BLOCK * bytes_per_element(s->param_format));
    if (s->param_lo) prefetch((const char *)(s->param_lo + i), BLOCK * sizeof *s->param_lo);
    prefetch(element(s->grad, s->grad_format, i), BLOCK * bytes_per_element(s->grad_format));
    prefetch((const char *)(s->exp_avg + i), BLOCK * sizeof *s->exp_avg);
    prefetch((const char *)(s->exp_avg_sq + i), BLOCK * sizeof *s->exp_avg_sq);
}

/* Elements from i up to the next cache line of param_out, at least one; without param_out a whole block. */
INLINE int64_t block_length(const struct adam_step *s, int64_t i) {
    if (!s->param_out) return BLOCK;
    size_t past_line = (uintptr_t)((uint16_t *)s->param_out + i) % CACHE_LINE;
    return past_line ? (int64_t)((CACHE_LINE - past_line) / sizeof(uint16_t)) : BLOCK;
}

static void kernel_update(const struct adam_step *s, const struct coefficients *c, int64_t start, int64_t stop) {
    float param_tile[BLOCK] __attribute__((aligned(CACHE_LINE)));
    float grad_tile[BLOCK] __attribute__((aligned(CACHE_LINE)));
    for (int64_t i = start, n; i < stop; i += n) {
        n = block_length(s, i);
        if (n > stop - i) n = stop - i;
        prefetch_block(s, i);
        float *param = load_param(s, i, n, param_tile);
        const float *grad = load_format(s->grad, s->grad_format, i, n, grad_tile);
        float *exp_avg = s->exp_avg + i, *exp_avg_sq = s->exp_avg_sq + i;
        /* The same twice: a constant length spares the usual block all questions about remainders. */
        int nan = n == BLOCK ? update_block(param, grad, exp_avg, exp_avg_sq, c, BLOCK)
                             : update_block(param, grad, exp_avg, exp_avg_sq, c, n);
        if (nan) make_nan_canonical(param, exp_avg, exp_avg_sq, n);
        store_param(s, i, n, param);
        if (s->param_out) store_out(s, i, n, param);
    }
    if (s->param_out) stream_fence();
}

#endif
