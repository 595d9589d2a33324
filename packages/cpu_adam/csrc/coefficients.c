/* Kingma and Ba, Adam (arXiv 1412.6980), in the form at the end of its section 2: the bias corrections
 * and the learning rate are folded into one step size per step,
 *
 *   alpha_t = lr * sqrt(1 - beta2^t) / (1 - beta1^t),   eps_hat = eps * sqrt(1 - beta2^t),
 *   p_t = p_{t-1} - alpha_t * m_t / (sqrt(v_t) + eps_hat).
 *
 * That equals lr * m_hat / (sqrt(v_hat) + eps), eps standing outside the root and beside the corrected one, as
 * in algorithm 1 and in torch, with one division and two roundings fewer an element.
 */
#include "coefficients.h"

#include <math.h>

/* base^exponent by squaring. Not pow(): its last bit depends on the C library and on the CPU. */
static double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result *= base;
        base *= base;
    }
    return result;
}

/* beta2 = 0.999 rounded to one float is off by 1.3e-8, which is 1.3e-5 of 1 - beta2 and shifts v by as much:
 * by far the largest error of an fp32 Adam. Two floats hold beta to 1e-15.
 * `low` is kept above zero (unless beta is 0), since 0 * infinity would make a NaN of an infinite moment. */
static struct two_floats in_two_floats(double beta) {
    float high = (float)beta;
    if (beta > 0.0 && (double)high >= beta) high = nextafterf(high, 0.0f);
    return (struct two_floats){high, (float)(beta - (double)high)};
}

struct coefficients coefficients_of(const struct adam_settings *s, double grad_scale) {
    double correction1 = 1.0 - power(s->beta1, s->step);
    double correction2_root = sqrt(1.0 - power(s->beta2, s->step));
    return (struct coefficients){
        .grad_scale = (float)grad_scale,
        .l2 = s->decoupled ? 0.0f : (float)s->weight_decay,
        .beta1 = (float)s->beta1,
        .one_minus_beta1 = (float)(1.0 - s->beta1),
        .beta2 = in_two_floats(s->beta2),
        .one_minus_beta2 = (float)(1.0 - s->beta2),
        .decay = s->decoupled ? (float)(1.0 - s->lr * s->weight_decay) : 1.0f,
        .step_size = (float)(s->lr * correction2_root / correction1),
        .eps = (float)(s->eps * correction2_root),
    };
}
