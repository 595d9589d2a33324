/* Steps hard data in every form on every instruction set this machine runs, from several threads at once, and
 * prints a hash of the results: "form isa hash". test_c_core.py builds it for this machine and for ARM, with
 * and without sanitizers, and wants one hash a form everywhere.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adam.h"

enum { NUMEL = 5000 + 37, STEPS = 3, CALLERS = 3 };

/* A repeatable stream of bit patterns (xorshift32), which every platform agrees on. */
static uint32_t next_pattern(uint32_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

/* Every 8th number is any pattern at all (NaN, infinities and denormals among them), the others lie in 1 .. 2. */
static void fill_floats(float *array, uint32_t seed, int positive) {
    uint32_t state = seed;
    for (int i = 0; i < NUMEL; i++) {
        uint32_t bits = next_pattern(&state);
        if (bits % 8 != 0) bits = (bits & 0x807FFFFF) | 0x3F800000;
        if (bits % 64 == 0) bits = (bits & 0x807FFFFF) | (bits % 128 ? 0x7F800000 : 0);
        if (positive) bits &= 0x7FFFFFFF;
        memcpy(&array[i], &bits, sizeof bits);
    }
}

static void fill_halves(uint16_t *array, uint32_t seed) {
    uint32_t state = seed;
    for (int i = 0; i < NUMEL; i++) array[i] = (uint16_t)(next_pattern(&state) >> 16);
}

static uint64_t add_to_hash(uint64_t hash, const void *bytes, size_t nbytes) { /* FNV-1a */
    for (size_t i = 0; i < nbytes; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001B3u;
    return hash;
}

struct form {
    const char *name;
    int param_format, split, grad_format, out_format, decoupled;
    double beta1;
};

static const struct form forms[] = {
    {"fp32", ADAM_FP32, 0, ADAM_FP32, ADAM_NONE, 1, 0.9},
    {"fp32-l2", ADAM_FP32, 0, ADAM_FP32, ADAM_NONE, 0, 0.9},
    {"fp32-low-beta", ADAM_FP32, 0, ADAM_FP32, ADAM_NONE, 1, 0.25},
    {"bf16-gradient", ADAM_FP32, 0, ADAM_BF16, ADAM_BF16, 1, 0.9},
    {"fp16-gradient", ADAM_FP32, 0, ADAM_FP16, ADAM_FP16, 1, 0.9},
    {"split", ADAM_BF16, 1, ADAM_BF16, ADAM_NONE, 1, 0.9},
    {"split-l2-out", ADAM_BF16, 1, ADAM_FP32, ADAM_FP16, 0, 0.5},
    {"bf16", ADAM_BF16, 0, ADAM_BF16, ADAM_NONE, 1, 0.9},
    {"fp16", ADAM_FP16, 0, ADAM_FP16, ADAM_BF16, 1, 0.9},
};

enum { FORMS = sizeof forms / sizeof *forms };

/* One caller's arrays. Sized exactly, so that the address sanitizer sees any step past an end. */
struct arrays {
    float *param, *grad, *exp_avg, *exp_avg_sq;
    uint16_t *half_param, *half_grad, *out;
    int16_t *lo;
};

static void *array_of(size_t element) {
    void *array = calloc(NUMEL, element);
    if (!array) abort();
    return array;
}

static struct arrays new_arrays(void) {
    return (struct arrays){array_of(4), array_of(4), array_of(4), array_of(4),
                           array_of(2), array_of(2), array_of(2), array_of(2)};
}

static void free_arrays(struct arrays a) {
    void *all[] = {a.param, a.grad, a.exp_avg, a.exp_avg_sq, a.half_param, a.half_grad, a.out, a.lo};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static uint64_t hash_of(const struct form *form, int isa, int threads) {
    struct arrays a = new_arrays();
    fill_floats(a.param, 1, 0);
    fill_floats(a.grad, 2, 0);
    fill_floats(a.exp_avg, 3, 0);
    fill_floats(a.exp_avg_sq, 4, 1);
    fill_halves(a.half_param, 5);
    fill_halves(a.half_grad, 6);
    if (form->split) adam_split(a.param, a.half_param, a.lo, NUMEL, isa, threads);

    struct adam_settings own = {1e-2, form->beta1, 0.999, 1e-8, 0.1, 1, form->decoupled};
    struct adam_segment segments[] = {{10, 1000, own}, {1001, 1002, own}, {4000, NUMEL, own}};
    segments[0].settings.lr = 0.5;
    segments[1].settings.beta2 = 0.5;
    segments[2].settings.weight_decay = 0.0;
    for (own.step = 1; own.step <= STEPS; own.step++) {
        struct adam_step step = {
            .numel = NUMEL,
            .param = form->param_format == ADAM_FP32 ? (void *)a.param : a.half_param,
            .param_lo = form->split ? a.lo : NULL,
            .grad = form->grad_format == ADAM_FP32 ? (void *)a.grad : a.half_grad,
            .exp_avg = a.exp_avg,
            .exp_avg_sq = a.exp_avg_sq,
            .param_out = form->out_format ? a.out : NULL,
            .param_format = form->param_format,
            .grad_format = form->grad_format,
            .out_format = form->out_format,
            .grad_scale = 0.75,
            .settings = own,
            .segment_count = sizeof segments / sizeof *segments,
            .segments = segments,
        };
        adam_update(&step, isa, threads);
    }
    double *block_sums = malloc(sizeof(double) * (size_t)adam_norm2_blocks(NUMEL));
    const void *normed = form->grad_format == ADAM_FP32 ? (void *)a.exp_avg_sq : a.out;
    double norm2 = adam_norm2(normed, form->grad_format, NUMEL, block_sums, isa, threads);
    free(block_sums);

    uint64_t hash = add_to_hash(0xCBF29CE484222325u, &norm2, sizeof norm2);
    hash = add_to_hash(hash, a.param, NUMEL * sizeof *a.param);
    hash = add_to_hash(hash, a.exp_avg, NUMEL * sizeof *a.exp_avg);
    hash = add_to_hash(hash, a.exp_avg_sq, NUMEL * sizeof *a.exp_avg_sq);
    hash = add_to_hash(hash, a.half_param, NUMEL * sizeof *a.half_param);
    hash = add_to_hash(hash, a.lo, NUMEL * sizeof *a.lo);
    hash = add_to_hash(hash, a.out, NUMEL * sizeof *a.out);
    free_arrays(a);
    return hash;
}

struct caller {
    int isa, threads;
    uint64_t hashes[FORMS];
};

static void *call(void *argument) {
    struct caller *caller = argument;
    for (int form = 0; form < FORMS; form++)
        caller->hashes[form] = hash_of(&forms[form], caller->isa, caller->threads);
    return NULL;
}

int main(void) {
    int wrong = 0;
    for (int isa = 0; adam_isa_name(isa); isa++) {
        if (!adam_isa_runs(isa)) continue;
        struct caller callers[CALLERS];
        pthread_t threads[CALLERS];
        for (int i = 0; i < CALLERS; i++) {
            callers[i] = (struct caller){.isa = isa, .threads = i + 1};
            pthread_create(&threads[i], NULL, call, &callers[i]);
        }
        for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
        for (int form = 0; form < FORMS; form++) {
            for (int i = 1; i < CALLERS; i++) wrong |= callers[i].hashes[form] != callers[0].hashes[form];
            printf("%s %s %016llx\n", forms[form].name, adam_isa_name(isa),
                   (unsigned long long)callers[0].hashes[form]);
        }
    }
    if (wrong) fprintf(stderr, "callers with different numbers of threads disagree\n");
    return wrong;
}
