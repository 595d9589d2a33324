/* Adam's update, written once. Each isa_*.c compiles this file for its instruction set.
 *
 * Plain loops that gcc vectorises: the traffic to memory is the limit, so intrinsics would gain nothing.
 * What matters is how memory is walked:
 *
 * - One pass over memory, in tiles that stay in the first-level cache from loading to storing. A tile of a 16-bit
 *   format is widened first and narrowed last; the arithmetic sees fp32 only. That is faster than one loop that
 *   does it all (by a third for the split master with AVX2: the registers suffice), and the formats need not
 *   be multiplied out.
 * - Each stream is prefetched a fixed distance ahead, strip by strip between the arithmetic: all of a tile's lines
 *   asked for at once would wait for one another. Strip and distance are by measurement. On a Zen 3 with AVX2 512 bytes
 *   and 32 elements make 1.00 of a plain loop's speed with two threads, where 1.25 KiB and 64 make 0.83-0.96. On a
 *   Zen 4 with AVX-512 512 bytes and 16 elements, one register, make 1.1-1.2 of what those do with one thread, and 1.0
 *   (fp32) and 1.2 (with a copy) with two. On ARM neither was measured.
 * - The split master with AVX-512 goes line by line instead (update_split_lines): on that Zen 4 1.15-1.20 of the tiles'
 *   speed with one thread, 1.00-1.02 with two. AVX2 gains nothing by it, and plain SSE2 loses a quarter.
 * - `param_out` is written around the cache, since nothing in this pass reads it: saves fetching the line
 *   first. Parameters and moments were just read and are in the cache: ordinary stores are faster for them.
 *
 * What must not happen is a fused multiply-add (-ffp-contract=off): then results are the same bits on every
 * instruction set. It would gain no speed, and half a bit of the first moment's rounding, of which parameters show
 * nothing.
 */
#ifndef CPU_ADAM_KERNEL_H
#define CPU_ADAM_KERNEL_H

#include <math.h>
#include <stddef.h>

#include "coefficients.h"
#include "half_formats.h"
#include "remainder.h"
#include "streaming.h"

#ifndef STRIP
#define STRIP 32       /* elements */
#define STORED ANY_NAN /* by update_strip */
#endif

enum {
    PREFETCH_BYTES = 512, /* ahead of the strip at hand */
    TILE = 256,           /* elements */
    CACHE_LINE = 64,
};

INLINE size_t bytes_per_element(int format) { return format == ADAM_FP32 ? 4 : 2; }

/* ---- load: n elements from i on, as fp32; in place where they are fp32 already, else in `tile` ---- */

INLINE float *load_format(const void *array, int format, int64_t i, ptrdiff_t n, float *restrict tile) {
    if (format == ADAM_FP32) return (float *)array + i;
    const uint16_t *half = (const uint16_t *)array + i;
    if (format == ADAM_BF16)
        for (ptrdiff_t j = 0; j < n; j++) tile[j] = float_of_bf16(half[j]);
    else
        for (ptrdiff_t j = 0; j < n; j++) tile[j] = float_of_fp16(half[j]);
    return tile;
}

INLINE void join_all(const uint16_t *restrict hi, const int16_t *restrict lo, float *restrict to, ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; j++) to[j] = joined(hi[j], lo[j]);
}

static float *load_param(const struct adam_step *s, int64_t i, ptrdiff_t n, float *restrict tile) {
    if (!s->param_lo) return load_format(s->param, s->param_format, i, n, tile);
    join_all((const uint16_t *)s->param + i, s->param_lo + i, tile, n);
    return tile;
}

/* ---- update ---- */

enum nan_stored { ANY_NAN, ONE_NAN }; /* as it comes, or the canonical one (bits.h) */

/* The equations of coefficients.h on n elements. */
INLINE void update_strip(float *restrict param, const float *restrict grad, float *restrict exp_avg,
                         float *restrict exp_avg_sq, const struct coefficients *coefficients, enum nan_stored stored,
                         ptrdiff_t n) {
    const struct coefficients k = *coefficients;
    for (ptrdiff_t j = 0; j < n; j++) {
        float p = param[j], m = exp_avg[j], v = exp_avg_sq[j];
        float g = k.grad_scale * grad[j];
        if (k.l2 != 0.0f) g = g + k.l2 * p;

        /* Moving m by a part of the distance rounds once where adding two parts of m and g rounds twice, but it loses
         * a small g beside a large m when that part is nearly the whole. */
        m = k.beta1 < 0.5f ? k.beta1 * m + k.one_minus_beta1 * g : m + k.one_minus_beta1 * (g - m);
        v = k.beta2.high * v + (k.beta2.low * v + (k.one_minus_beta2 * g) * g);
        p = k.decay * p - (k.step_size * m) / (sqrtf(v) + k.eps);

        param[j] = stored == ONE_NAN ? canonical(p) : p;
        exp_avg[j] = stored == ONE_NAN ? canonical(m) : m;
        exp_avg_sq[j] = stored == ONE_NAN ? canonical(v) : v;
    }
}

INLINE int any_nan(const float *values, ptrdiff_t n) {
    int32_t nan = 0;
    for (ptrdiff_t j = 0; j < n; j++) nan |= values[j] != values[j];
    return nan;
}

/* A tile's NaN, all at once: where an instruction set has no masks (AVX-512 has), a look at its parameters costs less
 * than three selects for every element. Where a moment is NaN its parameter is. */
static __attribute__((noinline, cold)) void make_nan_canonical(float *param, float *exp_avg, float *exp_avg_sq,
                                                               ptrdiff_t n) {
    for (ptrdiff_t j = 0; j < n; j++) {
        param[j] = canonical(param[j]);
        exp_avg[j] = canonical(exp_avg[j]);
        exp_avg_sq[j] = canonical(exp_avg_sq[j]);
    }
}

/* ---- store ---- */

INLINE void round_all(const float *restrict from, uint16_t *restrict to, int format, ptrdiff_t n) {
    if (format == ADAM_BF16)
        for (ptrdiff_t j = 0; j < n; j++) to[j] = bf16_of(from[j]);
    else
        for (ptrdiff_t j = 0; j < n; j++) to[j] = fp16_of(from[j]);
}

/* Of numbers or the canonical NaN. */
INLINE void split_all(const float *restrict from, uint16_t *restrict hi, int16_t *restrict lo, ptrdiff_t n) {
#pragma GCC ivdep
    for (ptrdiff_t j = 0; j < n; j++) {
        hi[j] = split_hi(bits_of(from[j]));
        lo[j] = split_lo(bits_of(from[j]));
    }
}

static void store_param(const struct adam_step *s, int64_t i, ptrdiff_t n, const float *restrict updated) {
    if (s->param_format == ADAM_FP32) return; /* was updated in place */
    uint16_t *restrict half = (uint16_t *)s->param + i;
    if (!s->param_lo) {
        round_all(updated, half, s->param_format, n);
        return;
    }
    split_all(updated, half, s->param_lo + i, n);
}

/* A whole tile lies at an aligned address (tile_length sees to that) and is written around the cache. */
static void store_out(const struct adam_step *s, int64_t i, ptrdiff_t n, const float *updated) {
    uint16_t rounded[TILE] __attribute__((aligned(CACHE_LINE)));
    uint16_t *out = (uint16_t *)s->param_out + i;
    if (n == TILE) {
        round_all(updated, rounded, s->out_format, TILE);
        stream(out, rounded, sizeof rounded);
    } else {
        round_all(updated, out, s->out_format, n);
    }
}

/* ---- prefetch: past the end it does no harm ---- */

/* The lines of elements i .. i + n - 1. */
INLINE void prefetch(const void *array, size_t bytes_per_element, int64_t i, ptrdiff_t n) {
    const char *first = (const char *)array + (size_t)i * bytes_per_element;
    for (size_t byte = 0; byte < n * bytes_per_element; byte += CACHE_LINE) __builtin_prefetch(first + byte);
}

/* The lines that the strip PREFETCH_BYTES further on than i will need. */
INLINE void prefetch_strip(const struct adam_step *s, int64_t i) {
    size_t param_bytes = bytes_per_element(s->param_format), grad_bytes = bytes_per_element(s->grad_format);
    prefetch(s->param, param_bytes, i + PREFETCH_BYTES / param_bytes, STRIP);
    if (s->param_lo) prefetch(s->param_lo, sizeof *s->param_lo, i + PREFETCH_BYTES / sizeof *s->param_lo, STRIP);
    prefetch(s->grad, grad_bytes, i + PREFETCH_BYTES / grad_bytes, STRIP);
    prefetch(s->exp_avg, sizeof *s->exp_avg, i + PREFETCH_BYTES / sizeof *s->exp_avg, STRIP);
    prefetch(s->exp_avg_sq, sizeof *s->exp_avg_sq, i + PREFETCH_BYTES / sizeof *s->exp_avg_sq, STRIP);
}

/* ---- a range, tile by tile ---- */

/* Elements from i up to the next cache line of param_out, at least one; without param_out a whole tile. */
INLINE int64_t tile_length(const struct adam_step *s, int64_t i) {
    if (!s->param_out) return TILE;
    size_t past_line = (uintptr_t)((uint16_t *)s->param_out + i) % CACHE_LINE;
    return past_line ? (int64_t)((CACHE_LINE - past_line) / sizeof(uint16_t)) : TILE;
}

#ifdef SPLIT_BY_LINES
enum {
    LINE = CACHE_LINE / sizeof(uint16_t), /* elements */
    LINES_AHEAD = 8 * LINE,               /* elements; for all streams as many, where strips count bytes */
};

/* The split master with bf16 gradients, a line of each 16-bit stream at a time: all lengths are constants, so this is
 * straight code, and the divisions and roots of one line run while the next is widened. Returns how far it came. */
static int64_t update_split_lines(const struct adam_step *s, const struct coefficients *c, int64_t i, int64_t stop) {
    float param[LINE] __attribute__((aligned(CACHE_LINE)));
    float grad_tile[LINE] __attribute__((aligned(CACHE_LINE)));
    uint16_t *hi = s->param;
    for (; i + LINE <= stop; i += LINE) {
        prefetch(hi, sizeof *hi, i + LINES_AHEAD, LINE);
        prefetch(s->param_lo, sizeof *s->param_lo, i + LINES_AHEAD, LINE);
        prefetch(s->grad, sizeof *hi, i + LINES_AHEAD, LINE);
        prefetch(s->exp_avg, sizeof *s->exp_avg, i + LINES_AHEAD, LINE);
        prefetch(s->exp_avg_sq, sizeof *s->exp_avg_sq, i + LINES_AHEAD, LINE);
        join_all(hi + i, s->param_lo + i, param, LINE);
        const float *grad = load_format(s->grad, ADAM_BF16, i, LINE, grad_tile);
        update_strip(param, grad, s->exp_avg + i, s->exp_avg_sq + i, c, ONE_NAN, LINE);
        split_all(param, hi + i, s->param_lo + i, LINE);
    }
    return i;
}
#endif

static void kernel_update(const struct adam_step *s, const struct coefficients *c, int64_t start, int64_t stop) {
#ifdef SPLIT_BY_LINES
    if (s->param_lo && s->grad_format == ADAM_BF16 && !s->param_out) start = update_split_lines(s, c, start, stop);
#endif
    float param_tile[TILE] __attribute__((aligned(CACHE_LINE)));
    float grad_tile[TILE] __attribute__((aligned(CACHE_LINE)));
    for (int64_t i = start, n; i < stop; i += n) {
        n = tile_length(s, i);
        if (n > stop - i) n = stop - i;
        float *param = load_param(s, i, n, param_tile);
        const float *grad = load_format(s->grad, s->grad_format, i, n, grad_tile);
        float *exp_avg = s->exp_avg + i, *exp_avg_sq = s->exp_avg_sq + i;

        ptrdiff_t j = 0;
        for (; j + STRIP <= n; j += STRIP) { /* a constant length spares these all questions about remainders */
            prefetch_strip(s, i + j);
            update_strip(param + j, grad + j, exp_avg + j, exp_avg_sq + j, c, STORED, STRIP);
        }
        if (j < n) update_strip(param + j, grad + j, exp_avg + j, exp_avg_sq + j, c, STORED, n - j);
        if (STORED == ANY_NAN && any_nan(param, n)) make_nan_canonical(param, exp_avg, exp_avg_sq, n);

        store_param(s, i, n, param);
        if (s->param_out) store_out(s, i, n, param);
    }
    if (s->param_out) stream_fence();
}

#endif
