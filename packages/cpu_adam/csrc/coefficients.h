/* From hyperparameters to the float constants of the inner loop. */
#ifndef CPU_ADAM_COEFFICIENTS_H
#define CPU_ADAM_COEFFICIENTS_H

#include "adam.h"

/* A constant factor as the sum of two floats, so that multiplying by both loses nothing of it. */
struct two_floats {
    float high, low;
};

struct coefficients {
    float grad_scale;         /* g  = grad_scale * grad                                   */
    float l2;                 /* g += l2 * p              0 when the decay is decoupled   */
    float beta1;              /* m  = beta1 * m + one_minus_beta1 * g                     */
    float one_minus_beta1;
    struct two_floats beta2;  /* v  = beta2 * v + one_minus_beta2 * g * g                 */
    float one_minus_beta2;
    float decay;              /* p  = decay * p - step_size * m / (sqrt(v) + eps)         */
    float step_size;
    float eps;
};

struct coefficients coefficients_of(const struct adam_settings *settings, double grad_scale);

#endif
