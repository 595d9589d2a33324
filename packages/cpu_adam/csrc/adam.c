/* Cuts the work into one contiguous range a thread and calls the chosen kernels.
 *
 * One static range each: the hardware's prefetching starts anew at every border, and ranges of 64 Ki elements handed
 * out by a counter were 3-5 % slower.
 */
#include "adam.h"

#include <math.h>

#include "float_environment.h"
#include "kernels.h"
#include "threads.h"

enum {
    GRAIN = 64,         /* borders between ranges fall on whole cache lines of work */
    NORM2_BLOCK = 4096, /* and for norm2 on whole blocks */
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

struct range {
    int64_t start, stop;
};

/* Range number `part` of `parts` over 0 .. numel - 1, in units of `grain`. The last ones may be empty. */
static struct range range_of(int part, int parts, int64_t numel, int64_t grain) {
    int64_t grains = (numel + grain - 1) / grain;
    int64_t length = (grains + parts - 1) / parts * grain;
    return (struct range){least(part * length, numel), least((part + 1) * length, numel)};
}

/* One call of this file's functions, as the parts see it. */
struct work {
    const struct kernels *kernels;
    int parts;
    int64_t numel;
    const void *from[2];
    void *to[2];
    int format;
};

/* ---- step ---- */

/* A range with the settings of the segments in it, and the call's own in the gaps between them. */
static void update_segments(const struct kernels *kernels, const struct adam_step *s, struct range r) {
    int64_t i = r.start;
    for (int64_t n = 0; i < r.stop; n++) {
        const struct adam_segment *segment = n < s->segment_count ? &s->segments[n] : 0;
        int64_t gap_stop = segment ? least(segment->start, r.stop) : r.stop;
        if (i < gap_stop) {
            struct coefficients c = coefficients_of(&s->settings, s->grad_scale);
            kernels->update(s, &c, i, gap_stop);
            i = gap_stop;
        }
        if (!segment) break;
        int64_t stop = least(segment->stop, r.stop);
        if (i < stop) {
            struct coefficients c = coefficients_of(&segment->settings, s->grad_scale);
            kernels->update(s, &c, i, stop);
            i = stop;
        }
    }
}

static void update_part(void *context, int part) {
    const struct work *w = context;
    float_mode before = enter_default_mode();
    update_segments(w->kernels, w->from[0], range_of(part, w->parts, w->numel, GRAIN));
    leave_default_mode(before);
}

void adam_update(const struct adam_step *step, int isa, int threads) {
    struct work w = {kernels_at(isa), threads, step->numel, .from = {step}};
    run_parts(threads, update_part, &w);
}

/* ---- split and join: bits only, so the floating-point mode does not matter ---- */

static void split_part(void *context, int part) {
    const struct work *w = context;
    struct range r = range_of(part, w->parts, w->numel, GRAIN);
    w->kernels->split(w->from[0], w->to[0], w->to[1], r.start, r.stop);
}

void adam_split(const float *master, uint16_t *hi, int16_t *lo, int64_t numel, int isa, int threads) {
    struct work w = {kernels_at(isa), threads, numel, .from = {master}, .to = {hi, lo}};
    run_parts(threads, split_part, &w);
}

static void join_part(void *context, int part) {
    const struct work *w = context;
    struct range r = range_of(part, w->parts, w->numel, GRAIN);
    w->kernels->join(w->from[0], w->from[1], w->to[0], r.start, r.stop);
}

void adam_join(const uint16_t *hi, const int16_t *lo, float *master, int64_t numel, int isa, int threads) {
    struct work w = {kernels_at(isa), threads, numel, .from = {hi, lo}, .to = {master}};
    run_parts(threads, join_part, &w);
}

/* ---- norm2 ---- */

static void norm2_part(void *context, int part) {
    const struct work *w = context;
    struct range r = range_of(part, w->parts, w->numel, NORM2_BLOCK);
    float_mode before = enter_default_mode();
    w->kernels->norm2(w->from[0], w->format, r.start, r.stop, w->to[0]);
    leave_default_mode(before);
}

int64_t adam_norm2_blocks(int64_t numel) { return (numel + NORM2_BLOCK - 1) / NORM2_BLOCK; }

double adam_norm2(const void *grad, int format, int64_t numel, double *block_sums, int isa, int threads) {
    struct work w = {kernels_at(isa), threads, numel, .from = {grad}, .to = {block_sums}, .format = format};
    run_parts(threads, norm2_part, &w);
    float_mode before = enter_default_mode();
    double sum = 0.0;
    for (int64_t block = 0; block < adam_norm2_blocks(numel); block++) sum += block_sums[block];
    leave_default_mode(before);
    return sum != sum ? (double)NAN : sum; /* one NaN everywhere, as in bits.h */
}

int adam_cores(void) { return usable_cores(); }
