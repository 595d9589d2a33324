/* Sum of squares of one block of a gradient, in double.
 *
 * Double, because squares of bf16 gradients above 1.8e19 overflow fp32 and would report an infinity that is not
 * there; an infinity or NaN in the gradient is one in the sum. The order of additions is fixed: element i of a
 * block goes to lane i % LANES, the lanes are added in halves, the blocks one after the other (adam.c). So the sum
 * depends neither on the number of threads nor on the instruction set.
 */
#ifndef CPU_ADAM_NORM2_KERNEL_H
#define CPU_ADAM_NORM2_KERNEL_H

#include "adam_kernel.h"

enum {
    NORM2_BLOCK = 4096, /* elements */
    LANES = 32,         /* doubles: enough independent sums to hide an addition's latency with AVX-512 */
};

/* Adds the squares of n elements to the lanes. Unless it is the block's last, n is a multiple of LANES. */
INLINE void add_squares(const float *restrict grad, ptrdiff_t n, double *restrict lane) {
    ptrdiff_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (ptrdiff_t j = 0; j < LANES; j++) lane[j] += (double)grad[i + j] * grad[i + j];
    for (ptrdiff_t j = 0; i + j < n; j++) lane[j] += (double)grad[i + j] * grad[i + j];
}

static double block_norm2(const void *grad, int format, int64_t start, int64_t stop) {
    float tile[TILE] __attribute__((aligned(CACHE_LINE)));
    double lane[LANES] = {0};
    for (int64_t i = start, n; i < stop; i += n) {
        n = stop - i < TILE ? stop - i : TILE;
        const float *values = load_format(grad, format, i, n, tile);
        if (n == TILE) add_squares(values, TILE, lane);
        else add_squares(values, n, lane);
    }
    for (ptrdiff_t half = LANES / 2; half > 0; half /= 2)
        for (ptrdiff_t j = 0; j < half; j++) lane[j] += lane[j + half];
    return lane[0];
}

/* Block sums of elements start .. stop - 1; start is a multiple of NORM2_BLOCK. */
static void kernel_norm2(const void *grad, int format, int64_t start, int64_t stop, double *block_sums) {
    for (int64_t i = start; i < stop; i += NORM2_BLOCK) {
        int64_t end = stop - i < NORM2_BLOCK ? stop : i + NORM2_BLOCK;
        block_sums[i / NORM2_BLOCK] = block_norm2(grad, format, i, end);
    }
}

#endif
